// SubmitStep, WaitStep and PushParameters.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/daemon/calls/tensor_calls.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class StepCalls {
 public:
  StepCalls(Core& core, TensorCalls& tensors) : core_(core), tensors_(tensors) {}

  absl::StatusOr<v1::SubmitStepReply> SubmitStep(const v1::SubmitStepRequest& request,
                                                 const Core::Cancelled& cancelled);
  absl::StatusOr<v1::WaitStepReply> WaitStep(const v1::WaitStepRequest& request,
                                             const Core::Cancelled& cancelled);
  // A push of weights, or of the state that KeepStateChunk() has collected, chunk by chunk, after
  // CheckMayPush(): nothing is kept for who has no right to it.
  absl::StatusOr<v1::PushParametersReply> Push(const v1::PushParametersRequest& header,
                                               const PushedState& state,
                                               const Core::Cancelled& cancelled);

 private:
  // Waits until (step, attempt) is answered or the deadline; pending answers are not an error.
  absl::StatusOr<scheduler::StepAnswer> Await(const v1::SessionKey& key, scheduler::StepId step,
                                              scheduler::Attempt attempt, Core::Deadline deadline,
                                              const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // One attempt of a push: submitted, and its answer, which may be pending after step_timeout.
  absl::StatusOr<scheduler::StepAnswer> PushOnce(const v1::SessionKey& key,
                                                 const scheduler::Submission& submission,
                                                 const PushedState& state,
                                                 const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
  TensorCalls& tensors_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_STEP_CALLS_H_
