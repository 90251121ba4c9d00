// The inside of Session; session.h says what each call means.
#ifndef DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_
#define DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/src/attach_socket.h"
#include "client/cpp/src/channel.h"
#include "client/cpp/src/session_memory.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/trainer.pb.h"

namespace dmuond::client {

class Session::Impl {
 public:
  explicit Impl(const Options& options) : options_(options) {}

  absl::Status Open(const std::string& path);
  absl::StatusOr<Registered> Register(const Layout& layout);
  absl::Status Attach();
  absl::Status PushWeights(const std::vector<std::string>* parameters);
  absl::Status PushState(const std::vector<StateTensor>& tensors);
  absl::StatusOr<std::vector<float>> Pull(int32_t parameter, StateKind kind, int32_t fragment);
  void MarkReady(int32_t bucket);
  absl::StatusOr<Outcome> Submit(const StepScalars& scalars, const SubmitOptions& options);
  absl::StatusOr<Outcome> Wait(std::chrono::milliseconds wait);
  absl::Status WaitPublished(std::chrono::milliseconds timeout);
  absl::Status AcknowledgeRollback(const Outcome& outcome);
  absl::Status Close();

  const Options options_;
  v1::HelloReply hello_;
  v1::OpenSessionReply opened_;
  SessionMemory memory_;
  int64_t last_committed_step_ = 0;
  std::optional<int64_t> durable_step_;
  std::string trainer_state_;
  uint64_t next_attempt_ = 0;
  StepTiming timing_;
  std::atomic<bool> lost_{false};

 private:
  absl::Status CheckOpen(const char* call) const;
  absl::Status CheckAttached(const char* call) const;
  absl::Status HoldBack(const std::vector<int32_t>& absent);
  absl::Status Push(const std::vector<v1::PushParametersRequest>& messages);
  absl::StatusOr<Outcome> Answered(const v1::Outcome& outcome, const v1::StepTiming& timing);
  // An error of a submitted attempt: trainers disagree, or the attempt is no longer the open one.
  absl::Status Refused(absl::Status status);
  [[nodiscard]] v1::SessionKey Key() const;

  bool closed_ = false;
  bool undecided_ = false;          // a submit has no outcome yet
  uint64_t published_attempt_ = 0;  // whose weights WaitPublished() waits for
  std::string submitted_state_;

  // Kept from step to step, so that a step allocates no messages.
  std::vector<uint8_t> held_back_;  // bucket -> waits for the submit, because of absent parameters
  std::vector<uint8_t> hold_none_;
  v1::SubmitStepRequest submit_request_;
  v1::SubmitStepReply submit_reply_;
  v1::WaitStepRequest wait_request_;
  v1::WaitStepReply wait_reply_;

  std::unique_ptr<Channel> channel_;
  // Last: its watcher must end before what it touches.
  std::unique_ptr<AttachSocket> attach_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_
