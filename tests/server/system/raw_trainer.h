// A trainer made of the protocol alone: every call by hand, with whatever in it, and a timeline
// that says what the test wants it to. For what the client library would not let through.
//
// Threads: calls from any; the rest one at a time.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_
#define DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "dmuond/wire/timeline.h"
#include "dmuond/wire/unique_fd.h"
#include "grpcpp/grpcpp.h"
#include "kernels/device.h"
#include "server/daemon/errors.h"

namespace dmuond::testing {

class RawTrainer {
 public:
  using Stub = v1::Trainer::Stub;

  // Connects both sockets and has a nonce. Failures are the test's.
  explicit RawTrainer(const std::string& address);

  template <typename Request, typename Reply>
  absl::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return server::FromGrpc((stub_.get()->*method)(&context, request, reply));
  }

  // ---- requests that are right: tests change one thing ----
  [[nodiscard]] v1::OpenSessionRequest OpenRequest(int32_t rank = 0, int32_t world = 1) const;
  // One 8 x 16 matrix "matrix", replicated: gradient in arena 1, weight in arena 2.
  [[nodiscard]] v1::RegisterLayoutRequest LayoutRequest() const;
  [[nodiscard]] v1::AttachBuffersRequest AttachRequest() const;
  [[nodiscard]] v1::SubmitStepRequest SubmitRequest(int64_t step) const;

  // ---- the life of a trainer, by these requests ----
  absl::Status Open(int32_t rank = 0, int32_t world = 1);
  absl::Status Register();
  absl::Status Attach();  // maps arenas and timeline
  absl::Status Push(int64_t step = 0);
  absl::Status Submit(const v1::SubmitStepRequest& request, v1::SubmitStepReply* reply);
  // Signals its bucket and submits: committed, or what came instead.
  absl::Status Step(int64_t step);
  absl::Status Close();

  [[nodiscard]] v1::SessionKey& key() { return key_; }
  [[nodiscard]] uint64_t attempt() const { return attempt_; }
  void set_attempt(uint64_t attempt) { attempt_ = attempt; }
  [[nodiscard]] const wire::UniqueFd& arena(int index) const { return arenas_[index]; }
  [[nodiscard]] float* weights() const;
  [[nodiscard]] wire::TimelinePage page() const { return wire::TimelinePage(timeline_->data()); }
  // The next frame of the attach socket is there already, or comes within 50 ms.
  [[nodiscard]] bool HasFrame() const;
  // One packet on the attach socket, on which trainers have nothing to say.
  void Say(const std::string& bytes) const;
  // Waits until the daemon has closed the attach socket.
  [[nodiscard]] bool AttachSocketEnds() const;
  [[nodiscard]] Stub& stub() { return *stub_; }

 private:
  std::unique_ptr<Stub> stub_;
  wire::UniqueFd socket_;
  std::string nonce_;
  v1::SessionKey key_;
  uint64_t attempt_ = 0;
  wire::UniqueFd arenas_[2];
  std::unique_ptr<kernels::Mapping> gradient_;
  std::unique_ptr<kernels::Mapping> weight_;
  std::unique_ptr<kernels::Mapping> timeline_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_RAW_TRAINER_H_
