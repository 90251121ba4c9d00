// A ProtocolTrainer that calls a Daemon of its own process, as that one's Trainer service would.
#ifndef DMUOND_TESTS_SERVER_DAEMON_IN_PROCESS_TRAINER_H_
#define DMUOND_TESTS_SERVER_DAEMON_IN_PROCESS_TRAINER_H_

#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/daemon/daemon.h"
#include "tests/server/protocol_trainer.h"

namespace dmuond::server {

class InProcessTrainer final : public dmuond::testing::ProtocolTrainer {
 public:
  // `daemon` must outlive it. Calls that wait end when `cancelled` says so.
  InProcessTrainer(
      Daemon& daemon, const std::string& address,
      Daemon::Cancelled cancelled = [] { return false; })
      : ProtocolTrainer(address), daemon_(daemon), cancelled_(std::move(cancelled)) {}

  absl::Status Call(const v1::OpenSessionRequest& request, v1::OpenSessionReply* reply) override {
    return Keep(daemon_.OpenSession(request, std::nullopt, cancelled_), reply);
  }
  absl::Status Call(const v1::RegisterLayoutRequest& request,
                    v1::RegisterLayoutReply* reply) override {
    return Keep(daemon_.PlaceOf(request.key()).sessions.RegisterLayout(request, cancelled_), reply);
  }
  absl::Status Call(const v1::AttachBuffersRequest& request,
                    v1::AttachBuffersReply* reply) override {
    return Keep(daemon_.PlaceOf(request.key()).buffers.AttachBuffers(request, cancelled_), reply);
  }
  absl::Status Call(const v1::PushParametersRequest& request,
                    v1::PushParametersReply* reply) override {
    return Keep(daemon_.PlaceOf(request.key()).steps.Push(request, PushedState(), cancelled_),
                reply);
  }
  absl::Status Call(const v1::SubmitStepRequest& request, v1::SubmitStepReply* reply) override {
    std::promise<absl::StatusOr<v1::SubmitStepReply>> answer;
    std::future<absl::StatusOr<v1::SubmitStepReply>> answered = answer.get_future();
    StepCalls& steps = daemon_.PlaceOf(request.key()).steps;
    const StateMutex::LateId wait = steps.SubmitStep(
        request,
        [&](absl::StatusOr<v1::SubmitStepReply> what) { answer.set_value(std::move(what)); });
    steps.TellLanes();
    constexpr std::chrono::milliseconds kLookAtCaller{20};
    while (answered.wait_for(kLookAtCaller) != std::future_status::ready) {
      if (cancelled_()) steps.Cancel(wait);
    }
    return Keep(answered.get(), reply);
  }
  absl::Status Call(const v1::CloseSessionRequest& request, v1::CloseSessionReply* reply) override {
    return Keep(daemon_.PlaceOf(request.key()).sessions.CloseSession(request), reply);
  }

  // Until it can submit.
  absl::Status Begin(int32_t rank, int32_t world) {
    absl::Status status = Open(rank, world);
    if (status.ok()) status = Register();
    if (status.ok()) status = Attach();
    if (status.ok()) status = Push();
    return status;
  }

 private:
  template <typename Reply>
  static absl::Status Keep(absl::StatusOr<Reply> from, Reply* reply) {
    if (!from.ok()) return from.status();
    *reply = *std::move(from);
    return absl::OkStatus();
  }

  Daemon& daemon_;
  const Daemon::Cancelled cancelled_;
};

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_IN_PROCESS_TRAINER_H_
