// SubmitStep, WaitStep and PushParameters.
//
// Threads: any. Push() blocks; the others are answered later, and hold no thread meanwhile.
#ifndef DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_

#include <atomic>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/daemon/calls/tensor_calls.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class StepCalls {
 public:
  StepCalls(Core& core, TensorCalls& tensors) : core_(core), tensors_(tensors) {}

  // Called once, without the daemon's lock: before the call returns, or later by whichever thread
  // brings what it waits for. It must not block.
  template <typename Reply>
  using Answer = std::function<void(absl::StatusOr<Reply>)>;

  // `request` must live until the answer. Returns what Cancel() takes; 0: answered already. What it
  // has for lanes may be theirs at the next TellLanes() only, so that the submissions of many
  // trainers that come together are one message; the caller sees to it soon. Of absent gradients
  // lanes are told before the answer.
  StateMutex::LateId SubmitStep(const v1::SubmitStepRequest& request,
                                Answer<v1::SubmitStepReply> answer);
  void TellLanes();
  StateMutex::LateId WaitStep(const v1::WaitStepRequest& request, Answer<v1::WaitStepReply> answer);
  // The caller has gone: the answer is given at once, whatever it is then.
  void Cancel(StateMutex::LateId wait);
  // A push of weights, or of `state`. That is what KeepStateChunk() has collected, chunk by chunk,
  // after CheckMayPush(), so that nothing is kept for a caller without the right to push.
  absl::StatusOr<v1::PushParametersReply> Push(const v1::PushParametersRequest& header,
                                               const PushedState& state,
                                               const Core::Cancelled& cancelled);

 private:
  // What is known now of (step, attempt); it may be pending.
  absl::StatusOr<scheduler::StepAnswer> Ask(const v1::SessionKey& key, scheduler::StepId step,
                                            scheduler::Attempt attempt)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until (step, attempt) is answered or the deadline; pending answers are not an error.
  absl::StatusOr<scheduler::StepAnswer> Await(const v1::SessionKey& key, scheduler::StepId step,
                                              scheduler::Attempt attempt, Core::Deadline deadline,
                                              const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  absl::StatusOr<scheduler::StepAnswer> Submit(const v1::SubmitStepRequest& request)
      DMUOND_REQUIRES(core_.mutex);
  absl::StatusOr<scheduler::StepAnswer> MayWait(const v1::WaitStepRequest& request)
      DMUOND_REQUIRES(core_.mutex);
  template <typename Reply>
  absl::StatusOr<Reply> ReplyOf(const absl::StatusOr<scheduler::StepAnswer>& answer)
      DMUOND_REQUIRES(core_.mutex);
  // Answers a request: at once if the answer of `begin` is final, else when the step is decided.
  template <typename Reply, typename Request>
  StateMutex::LateId AnswerLate(
      const Request& request,
      absl::StatusOr<scheduler::StepAnswer> (StepCalls::*begin)(const Request&),
      Answer<Reply> answer) DMUOND_EXCLUDES(core_.mutex);
  // One attempt of a push: submitted, and its answer, which may be pending after step_timeout.
  absl::StatusOr<scheduler::StepAnswer> PushOnce(const v1::SessionKey& key,
                                                 const scheduler::Submission& submission,
                                                 const PushedState& state,
                                                 const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
  TensorCalls& tensors_;
  std::atomic<bool> lanes_wait_{false};  // for TellLanes()
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_
