// A ProtocolTrainer over gRPC: for what the client library would not let through.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_
#define DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "dmuond/wire/layout_parts.h"
#include "grpcpp/grpcpp.h"
#include "server/common/errors.h"
#include "tests/server/protocol_trainer.h"

namespace dmuond::testing {

class RawTrainer final : public ProtocolTrainer {
 public:
  using Stub = v1::Trainer::Stub;

  // Connects both sockets.
  explicit RawTrainer(const std::string& address);

  template <typename Request, typename Reply>
  absl::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return server::FromGrpc((stub_.get()->*method)(&context, request, reply));
  }
  absl::Status Call(const v1::OpenSessionRequest& request, v1::OpenSessionReply* reply) override {
    return Call(&Stub::OpenSession, request, reply);
  }
  absl::Status Call(const v1::RegisterLayoutRequest& request,
                    v1::RegisterLayoutReply* reply) override {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return server::FromGrpc(wire::RegisterLayout(*stub_, &context, request, reply));
  }
  absl::Status Call(const v1::AttachBuffersRequest& request,
                    v1::AttachBuffersReply* reply) override {
    return Call(&Stub::AttachBuffers, request, reply);
  }
  absl::Status Call(const v1::PushParametersRequest& request,
                    v1::PushParametersReply* reply) override;
  absl::Status Call(const v1::SubmitStepRequest& request, v1::SubmitStepReply* reply) override {
    return Call(&Stub::SubmitStep, request, reply);
  }
  absl::Status Call(const v1::CloseSessionRequest& request, v1::CloseSessionReply* reply) override {
    return Call(&Stub::CloseSession, request, reply);
  }

  [[nodiscard]] Stub& stub() { return *stub_; }

 private:
  std::unique_ptr<Stub> stub_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_
