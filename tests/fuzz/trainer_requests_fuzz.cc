// Requests of the Trainer and Admin services out of nowhere, to a real daemon with a real lane and
// a job in mid-run. Whatever comes, the daemon answers or refuses, lives, and serves the next one.
//
// An input: method, flags (1: the job's own session key; 2: its open attempt, or a fresh nonce),
// and the request's bytes. Bytes that are no message of that kind are gRPC's business.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "dmuond/v1/admin.grpc.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond {
namespace {

using testing::DaemonProcess;
using testing::RawTrainer;

// Calls that wait are hung up on.
constexpr std::chrono::milliseconds kPatience{50};
constexpr int kRequestsPerJob = 500;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

class Target {
 public:
  Target() {
    auto daemon = DaemonProcess::Start(
        {.devices = "cpu:1", .flags = {"--session_linger=0", "--log_level=error"}});
    if (!daemon.ok()) Die(daemon.status().ToString());
    daemon_ = *std::move(daemon);
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    admin_ = v1::Admin::NewStub(grpc::CreateCustomChannel(
        "unix:" + daemon_->address(), grpc::InsecureChannelCredentials(), arguments));
  }

  void Run(uint8_t method, uint8_t flags, const std::string& body) {
    if (trainer_ == nullptr || requests_++ % kRequestsPerJob == 0) NewJob();
    own_key_ = (flags & 1) != 0;
    own_attempt_ = (flags & 2) != 0;
    Dispatch(method % 19, body);
    if (daemon_->Wait(std::chrono::milliseconds(0)) >= 0)
      Die("the daemon died:\n" + daemon_->Log());
  }

 private:
  using Stub = v1::Trainer::Stub;

  void NewJob() {
    for (int attempt = 0; attempt < 100; ++attempt) {
      trainer_.reset();
      trainer_ = std::make_unique<RawTrainer>(daemon_->address());
      // The last job may be ending still.
      if (trainer_->Open().ok() && trainer_->Register().ok() && trainer_->Attach().ok() &&
          trainer_->Push().ok() && trainer_->Step(1).ok()) {
        return;
      }
    }
    Die("no job can be made any more:\n" + daemon_->Log());
  }

  template <typename Request>
  bool Parse(const std::string& body, Request& request) const {
    if (!request.ParseFromString(body)) return false;
    if constexpr (requires { request.mutable_key(); }) {
      if (own_key_) *request.mutable_key() = trainer_->key();
    }
    if constexpr (requires { request.set_attempt(uint64_t{}); }) {
      if (own_attempt_) request.set_attempt(trainer_->attempt());
    }
    if constexpr (requires { request.set_nonce(std::string()); }) {
      if (own_attempt_) {
        fresh_ = std::make_unique<RawTrainer>(daemon_->address());
        request.set_nonce(fresh_->OpenRequest().nonce());
      }
    }
    return true;
  }
  static void Hurry(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
  }

  template <typename Service, typename Request, typename Reply>
  void Unary(Service& stub,
             grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Reply*),
             const std::string& body) {
    Request request;
    if (!Parse(body, request)) return;
    grpc::ClientContext context;
    Hurry(context);
    Reply reply;
    // Refused or not: that there is an answer counts.
    (void)(stub.*method)(&context, request, &reply);
  }
  template <typename Request, typename Reply>
  void Stream(std::unique_ptr<grpc::ClientReader<Reply>> (Stub::*method)(grpc::ClientContext*,
                                                                         const Request&),
              const std::string& body) {
    Request request;
    if (!Parse(body, request)) return;
    grpc::ClientContext context;
    Hurry(context);
    auto reader = (trainer_->stub().*method)(&context, request);
    Reply reply;
    while (reader->Read(&reply)) {
    }
    (void)reader->Finish();
  }
  // Its messages one after another: two bytes of length, then so many of message.
  void Push(const std::string& body) {
    grpc::ClientContext context;
    Hurry(context);
    v1::PushParametersReply reply;
    const auto writer = trainer_->stub().PushParameters(&context, &reply);
    for (size_t at = 0; at + 2 <= body.size();) {
      const size_t length =
          static_cast<uint8_t>(body[at]) + (size_t{static_cast<uint8_t>(body[at + 1])} << 8);
      v1::PushParametersRequest request;
      if (Parse(body.substr(at + 2, length), request) && !writer->Write(request)) break;
      at += 2 + length;
    }
    writer->WritesDone();
    (void)writer->Finish();
  }

  void Dispatch(int method, const std::string& body) {
    using Admin = v1::Admin::Stub;
    Stub& stub = trainer_->stub();
    switch (method) {
      case 0:
        return Unary(stub, &Stub::Hello, body);
      case 1:
        return Unary(stub, &Stub::OpenSession, body);
      case 2:
        return Unary(stub, &Stub::RegisterLayout, body);
      case 3:
        return Unary(stub, &Stub::AttachBuffers, body);
      case 4:
        return Push(body);
      case 5:
        return Stream(&Stub::PullParameters, body);
      case 6:
        return Unary(stub, &Stub::SubmitStep, body);
      case 7:
        return Unary(stub, &Stub::WaitStep, body);
      case 8:
        return Stream(&Stub::WatchSession, body);
      case 9:
        return Unary(stub, &Stub::AckRollback, body);
      case 10:
        return Unary(stub, &Stub::SaveSnapshot, body);
      case 11:
        return Unary(stub, &Stub::LoadSnapshot, body);
      case 12:
        Unary(stub, &Stub::CloseSession, body);
        if (own_key_) trainer_.reset();
        return;
      case 13:
        return Unary(*admin_, &Admin::GetStatus, body);
      case 14:
        return Unary(*admin_, &Admin::GetPlan, body);
      case 15:
        return Unary(*admin_, &Admin::GetRouting, body);
      case 16:
        return Unary(*admin_, &Admin::SetLogLevel, body);
      case 17: {
        // A session that has a layout and nothing else.
        RawTrainer other(daemon_->address());
        v1::RegisterLayoutRequest request;
        if (!request.ParseFromString(body)) return;
        trainer_.reset();
        for (int tries = 0; !other.Open().ok(); ++tries) {
          if (tries > 1000) Die("no session can be opened any more:\n" + daemon_->Log());
        }
        *request.mutable_key() = other.key();
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
        v1::RegisterLayoutReply reply;
        (void)other.stub().RegisterLayout(&context, request, &reply);
        return;
      }
      default: {
        // Bytes on the attach socket, where trainers say nothing.
        const RawTrainer talks(daemon_->address());
        return talks.Say(body);
      }
    }
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<RawTrainer> trainer_;
  mutable std::unique_ptr<RawTrainer> fresh_;
  bool own_key_ = false;
  bool own_attempt_ = false;
  int64_t requests_ = 0;
};

}  // namespace
}  // namespace dmuond

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const target = new dmuond::Target();  // its processes end with this one
  if (size < 2) return 0;
  target->Run(data[0], data[1], std::string(reinterpret_cast<const char*>(data) + 2, size - 2));
  return 0;
}
