// Requests of the Trainer and Admin services out of nowhere, to a real daemon with a real
// lane and a job in mid-run, of which snapshots are made. Whatever comes, the daemon answers or
// refuses, lives, and serves the next one soon: what a request costs is bounded before it is done.
//
// An input: method, flags (1: the job's own session key; 2: its open attempt, a fresh nonce, the
// next number of a call, or the way back that the job is on), and the request's bytes. Bytes that
// are no message of that kind are gRPC's business.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "dmuond/v1/admin.grpc.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "dmuond/wire/layout_parts.h"
#include "grpcpp/grpcpp.h"
#include "tests/client/daemon_process.h"
#include "tests/fuzz/reached.h"
#include "tests/server/daemon/support.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond {
namespace {

using testing::DaemonProcess;
using testing::RawTrainer;

// Calls that wait are hung up on.
constexpr std::chrono::milliseconds kPatience{50};
// Except for what a disk or new lanes take; it ends by itself.
constexpr std::chrono::seconds kLongPatience{5};
constexpr int kRequestsPerJob = 500;
// That meet a job which has gone back, before its trainer acknowledges that.
constexpr int kRequestsOnTheWayBack = 3;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

// Processor time that one request may cost the daemon, its plan included: its lock is kept for
// less. Not of the clock, which goes on while others have the processors.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSanitized = false;
#endif
constexpr std::chrono::milliseconds kProcessorTimeMax{kSanitized ? 5000 : 1000};
constexpr int64_t kResidentKibMax = int64_t{kSanitized ? 4 : 1} << 20;

// Drains that are obeyed: each is a new daemon.
constexpr int kDrainEvery = 200;

Reached reached(1000, {"saves", "loads", "acknowledged", "drains"});

class Target {
 public:
  Target() {
    auto daemon = DaemonProcess::Start(
        {.devices = "cpu:1",
         .flags = {"--session_linger=0", "--log_level=error", "--drain_timeout=2s",
                   "--snapshot_dir=" + snapshots_.path(), "--snapshot_every_steps=1"}});
    if (!daemon.ok()) Die(daemon.status().ToString());
    daemon_ = *std::move(daemon);
    grpc::ChannelArguments arguments;
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    const auto channel = [&](const std::string& address) {
      return grpc::CreateCustomChannel("unix:" + address, grpc::InsecureChannelCredentials(),
                                       arguments);
    };
    admin_ = v1::Admin::NewStub(channel(daemon_->address() + ".admin"));
  }

  void Run(uint8_t method, uint8_t flags, const std::string& body) {
    reached.NextInput();
    if (trainer_ == nullptr || requests_++ % kRequestsPerJob == 0) NewJob();
    if (way_back_ > 0 && --way_back_ == 0) Acknowledge();
    own_key_ = (flags & 1) != 0;
    own_attempt_ = (flags & 2) != 0;
    const pid_t pid = daemon_->pid();
    const auto before = ProcessorTime(pid);
    Dispatch(method % 24, body);
    if (daemon_->Wait(std::chrono::milliseconds(0)) >= 0)
      Die("the daemon died:\n" + daemon_->Log());
    if (daemon_->pid() == pid) CheckBudget(before);
  }

 private:
  using Stub = v1::Trainer::Stub;

  static std::chrono::milliseconds ProcessorTime(pid_t pid) {
    clockid_t clock{};
    timespec used{};
    if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &used) != 0) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec));
  }
  // Whether the daemon's core comes to what is new: its status is no old one. Half a minute.
  bool Turns() {
    for (int asked = 0; asked < 30; ++asked) {
      const auto status = Unary(*admin_, &v1::Admin::Stub::GetStatus, "", std::chrono::seconds(10));
      if (!status.has_value()) return false;
      if (status->picture_age_ms() == 0) return true;  // else it has waited for a second
    }
    return false;
  }
  // That the daemon goes on, and what the request has cost.
  void CheckBudget(std::chrono::milliseconds before) {
    if (!Turns()) Die("the daemon does not answer any more:\n" + daemon_->Log());
    const auto used = ProcessorTime(daemon_->pid()) - before;
    if (used > kProcessorTimeMax) {
      Die("a request took " + std::to_string(used.count()) + " ms of the daemon's time");
    }
    const std::string path = "/proc/" + std::to_string(daemon_->pid()) + "/status";
    std::ifstream status(path);
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:") && std::stoll(line.substr(6)) > kResidentKibMax) {
        Die("the daemon has grown: " + line);
      }
    }
  }

  void NewJob() {
    way_back_ = 0;
    for (int attempt = 0; attempt < 100; ++attempt) {
      trainer_.reset();
      trainer_ = std::make_unique<RawTrainer>(daemon_->address());
      ForgetSnapshots();
      // The last job may be ending still.
      if (trainer_->Open().ok() && trainer_->Register().ok() && trainer_->Attach().ok() &&
          trainer_->Push().ok() && trainer_->Step(1).ok()) {
        return;
      }
    }
    Die("no job can be made any more:\n" + daemon_->Log());
  }

  // A job begins with those that there are, and these begin anew.
  void ForgetSnapshots() const {
    for (const auto& job : std::filesystem::directory_iterator(snapshots_.path())) {
      std::error_code ignored;  // the last one may be writing still
      std::filesystem::remove_all(job, ignored);
    }
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
    if constexpr (requires { request.set_call(uint64_t{}); }) {
      if (own_attempt_) request.set_call(++calls_);
    }
    if constexpr (requires { request.set_epoch(uint32_t{}); }) {
      if (own_attempt_) SetWayBack(request);
    }
    if constexpr (requires { request.set_nonce(std::string()); }) {
      if (own_attempt_) {
        fresh_ = std::make_unique<RawTrainer>(daemon_->address());
        request.set_nonce(fresh_->OpenRequest().nonce());
      }
    }
    return true;
  }
  // As a step's outcome names it.
  template <typename Request>
  void SetWayBack(Request& request) const {
    v1::WaitStepRequest wait;
    *wait.mutable_key() = trainer_->key();
    v1::WaitStepReply reply;
    if (!trainer_->Call(&Stub::WaitStep, wait, &reply).ok()) return;
    request.set_to_step(reply.outcome().to_step());
    request.set_epoch(reply.outcome().epoch());
  }
  static void Hurry(grpc::ClientContext& context, std::chrono::milliseconds patience = kPatience) {
    context.set_deadline(std::chrono::system_clock::now() + patience);
  }

  // Refused or not: that there is an answer counts. What the answer is, where it is not refused.
  template <typename Service, typename Request, typename Reply>
  std::optional<Reply> Unary(
      Service& stub, grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Reply*),
      const std::string& body, std::chrono::milliseconds patience = kPatience) {
    Request request;
    if (!Parse(body, request)) return std::nullopt;
    grpc::ClientContext context;
    Hurry(context, patience);
    Reply reply;
    if (!(stub.*method)(&context, request, &reply).ok()) return std::nullopt;
    return reply;
  }
  template <typename Service, typename Request, typename Reply>
  void Stream(Service& stub,
              std::unique_ptr<grpc::ClientReader<Reply>> (Service::*method)(grpc::ClientContext*,
                                                                            const Request&),
              const std::string& body) {
    Request request;
    if (!Parse(body, request)) return;
    grpc::ClientContext context;
    Hurry(context);
    auto reader = (stub.*method)(&context, request);
    Reply reply;
    while (reader->Read(&reply)) {
    }
    (void)reader->Finish();
  }
  void Register(const std::string& body) {
    v1::RegisterLayoutRequest request;
    if (!Parse(body, request)) return;
    grpc::ClientContext context;
    Hurry(context);
    v1::RegisterLayoutReply reply;
    (void)wire::RegisterLayout(trainer_->stub(), &context, request, &reply);
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

  // The way back that the job is on, without a body.
  void Acknowledge(const std::string& body = "") {
    if (body.empty()) own_key_ = own_attempt_ = true;
    const auto back = Unary(trainer_->stub(), &Stub::AckRollback, body, kLongPatience);
    if (!back.has_value()) return;
    ++reached["acknowledged"];
    trainer_->set_attempt(back->next_attempt());
  }

  void Dispatch(int method, const std::string& body) {
    using Admin = v1::Admin::Stub;
    Stub& stub = trainer_->stub();
    switch (method) {
      case 0:
        (void)Unary(stub, &Stub::Hello, body);
        return;
      case 1:
        (void)Unary(stub, &Stub::OpenSession, body);
        return;
      case 2:
        return Register(body);
      case 3:
        (void)Unary(stub, &Stub::AttachBuffers, body);
        return;
      case 4:
        return Push(body);
      case 5:
        return Stream(stub, &Stub::PullParameters, body);
      case 6:
        (void)Unary(stub, &Stub::SubmitStep, body);
        return;
      case 7:
        (void)Unary(stub, &Stub::WaitStep, body);
        return;
      case 8:
        return Stream(stub, &Stub::WatchSession, body);
      case 9:
        return Acknowledge(body);
      case 10:
        if (Unary(stub, &Stub::SaveSnapshot, body, kLongPatience)) ++reached["saves"];
        return;
      case 11:
        if (!Unary(stub, &Stub::LoadSnapshot, body, kLongPatience)) return;
        ++reached["loads"];
        way_back_ = kRequestsOnTheWayBack;
        return;
      case 12:
        (void)Unary(stub, &Stub::CloseSession, body);
        if (own_key_) trainer_.reset();
        return;
      case 13:
        (void)Unary(*admin_, &Admin::GetStatus, body);
        return;
      case 14:
        (void)Unary(*admin_, &Admin::GetPlan, body);
        return;
      case 15:
        (void)Unary(*admin_, &Admin::GetRouting, body);
        return;
      case 16:
        (void)Unary(*admin_, &Admin::SetLogLevel, body);
        return;
      case 17: {
        // A session that has a layout and nothing else.
        v1::RegisterLayoutRequest request;
        if (!request.ParseFromString(body)) return;
        trainer_.reset();
        std::unique_ptr<RawTrainer> other;
        for (int tries = 0; other == nullptr || !other->Open().ok(); ++tries) {
          if (tries > 1000) Die("no session can be opened any more:\n" + daemon_->Log());
          ForgetSnapshots();
          other = std::make_unique<RawTrainer>(daemon_->address());  // a refusal is its nonce's
        }
        *request.mutable_key() = other->key();
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
        v1::RegisterLayoutReply reply;
        (void)wire::RegisterLayout(other->stub(), &context, request, &reply);
        return;
      }
      case 18: {
        // Bytes on the attach socket, where trainers say nothing.
        const RawTrainer talks(daemon_->address());
        return talks.Say(body);
      }
      case 19:
        if (Unary(*admin_, &Admin::LoadJob, body, kLongPatience)) {
          way_back_ = kRequestsOnTheWayBack;
        }
        return;
      case 20:
        (void)Unary(*admin_, &Admin::SaveJob, body, kLongPatience);
        return;
      case 21:
        (void)Unary(*admin_, &Admin::ListJobs, body);
        return;
      case 22:
        (void)Unary(*admin_, &Admin::GetReadiness, body);
        return;
      default:
        if (drains_++ % kDrainEvery == 0) Drain(body);
    }
  }

  void Drain(const std::string& body) {
    if (!Unary(*admin_, &v1::Admin::Stub::Drain, body, kLongPatience)) return;
    if (daemon_->Wait(std::chrono::seconds(30)) < 0) {
      Die("the daemon does not leave:\n" + daemon_->Log());
    }
    ++reached["drains"];
    trainer_.reset();
    fresh_.reset();
    if (const absl::Status started = daemon_->StartAgain(); !started.ok()) Die(started.ToString());
    requests_ = 1;
    NewJob();
  }

  const server::TempDir snapshots_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<RawTrainer> trainer_;
  mutable std::unique_ptr<RawTrainer> fresh_;
  mutable uint64_t calls_ = 0;
  int way_back_ = 0;
  bool own_key_ = false;
  bool own_attempt_ = false;
  int64_t requests_ = 0;
  int64_t drains_ = 0;
};

}  // namespace
}  // namespace dmuond

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static dmuond::Target target;
  if (size < 2) return 0;
  target.Run(data[0], data[1], std::string(reinterpret_cast<const char*>(data) + 2, size - 2));
  return 0;
}
