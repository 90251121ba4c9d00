// The inside of Session; session.h says what each call means.
//
// Public calls are in pairs: what the caller asks for, and one try of it with the daemon that the
// session is linked to. A try that fails goes through Settle(), which takes the session's place in
// the job again where the daemon has gone or the job goes back.
#ifndef DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_
#define DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/src/link.h"
#include "client/cpp/src/wait_notice.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/trainer.pb.h"

namespace dmuond::client {

class Session::Impl {
 public:
  explicit Impl(const Options& options) : options_(options) {}

  absl::Status Open(const std::string& path);
  absl::StatusOr<Registered> Register(const Layout& layout);
  absl::Status Attach(const FirstWeights& first);
  absl::Status PushWeights(const std::vector<std::string>* parameters);
  absl::Status PushState(const std::vector<StateTensor>& tensors);
  absl::StatusOr<std::vector<float>> Pull(int32_t parameter, StateKind kind, int32_t fragment);
  absl::Status MarkReady(int32_t bucket, SessionMemory::Stream stream);
  absl::StatusOr<Outcome> Submit(const StepScalars& scalars, const SubmitOptions& options);
  absl::StatusOr<Outcome> Wait(std::chrono::milliseconds wait);
  absl::Status WaitPublished(std::chrono::milliseconds timeout);
  absl::Status WaitPublished(CUstream_st* stream);
  absl::StatusOr<Outcome> Step(const StepScalars& scalars, const SubmitOptions& options);
  absl::StatusOr<Snapshot> SaveSnapshot();
  absl::StatusOr<int64_t> LoadSnapshot(int64_t step);
  void ReleaseStale() { stale_.clear(); }
  absl::Status Close();

  [[nodiscard]] const Link& link() const { return *link_; }

  const Options options_;
  Registered registered_;
  int64_t last_committed_step_ = 0;
  uint64_t loads_ = 0;  // LoadSnapshot calls
  std::optional<int64_t> durable_step_;
  std::string trainer_state_;
  uint64_t next_attempt_ = 0;
  StepTiming timing_;

 private:
  using Milliseconds = std::chrono::milliseconds;

  // ROLLED_BACK where the caller has yet to be told so.
  absl::Status CheckOpen(const char* call) const;
  absl::Status CheckAttached(const char* call) const;
  absl::Status CheckSubmit(const SubmitOptions& options) const;
  void AdoptOpened();
  // REQUIRES: the job has state.
  void AdoptAttached(const v1::AttachBuffersReply& attached);

  // One try each. An outcome ROLLED_BACK is an error of that reason here.
  absl::StatusOr<Outcome> TrySubmit(const StepScalars& scalars, const SubmitOptions& options);
  absl::StatusOr<Outcome> TryWait(Milliseconds wait);
  absl::StatusOr<Outcome> TryStep(const StepScalars& scalars, const SubmitOptions& options);
  absl::Status TryWaitPublished(Milliseconds timeout);
  [[nodiscard]] Milliseconds PublishedWithin() const;
  [[nodiscard]] Milliseconds LongestWaitOfACall() const;
  absl::Status TryPush(std::vector<v1::PushParametersRequest>& messages);
  absl::StatusOr<std::vector<float>> TryPull(int32_t parameter, StateKind kind, int32_t fragment);

  // A group that forms anew between two steps publishes the masters over weights that were changed.
  absl::Status CheckNotRepublished();
  void HoldBack(const std::vector<int32_t>& absent);
  [[nodiscard]] Milliseconds SilentFor() const;
  // A call to a daemon that may be stopped for a while and go on where it was.
  absl::Status CallPatiently(const std::function<absl::Status()>& call);
  absl::StatusOr<Outcome> Answered(const v1::Outcome& outcome, const v1::StepTiming& timing);
  // An error of a submitted attempt: trainers disagree, or the attempt is no longer the open one.
  absl::StatusOr<Outcome> Refused(absl::Status status);
  void Follow(const absl::Status& status);
  // Asks the daemon why weights do not come. OK: it knows no reason.
  absl::Status AskWhy(bool poisoned);

  // Turns the error of a try into what the caller is told. Where the job goes back, or the daemon
  // has gone and has a successor, it waits until the weights of the step that the job goes back to
  // lie in the arenas, and returns ROLLED_BACK. If that is the step at which this trainer stands
  // already, the caller need not know: it returns OK and sets carried_on_, and the call is to be
  // tried again.
  absl::Status Settle(absl::Status status);
  [[nodiscard]] bool IsTheEnd(const absl::Status& status);
  absl::Status Acknowledge(int64_t to_step, uint32_t epoch);
  absl::Status OpenWithin(Milliseconds connect_timeout);
  // The daemon leaves, and this rank, which is not in its job yet, may wait for the successor.
  [[nodiscard]] bool IsLeaving(const absl::Status& status) const;
  // Opens the session anew with the successor of a daemon that leaves. DAEMON_LOST: none has come
  // within the reconnect timeout.
  absl::Status BeginAgain();
  absl::Status ComeBack(const absl::Status& why);
  absl::Status TryComeBack();
  [[nodiscard]] absl::Status NotBack(const absl::Status& last);
  // The same for calls that answer with an outcome.
  absl::StatusOr<Outcome> Settle(absl::StatusOr<Outcome> outcome);
  template <typename Try>
  auto Surviving(const Try& attempt) -> decltype(attempt()) {
    for (;;) {
      auto answer = Settle(attempt());
      if (!carried_on_) return answer;
    }
  }
  // The rollback is complete. Whether the caller need not know. REQUIRES: the caller has not been
  // told.
  absl::StatusOr<bool> CarryOn(uint64_t arrived_before);
  // A push changes the state: a snapshot of the last step may lack what is pushed from here on.
  void ForgetState() {
    state_known_ = false;
    stands_at_.reset();
  }
  void Say(const std::string& what) const;

  std::string path_;
  std::optional<Layout> layout_;
  bool closed_ = false;
  bool in_job_ = false;      // the job has state, and this trainer its place in it
  bool moved_ = false;       // the memory is another, and the caller has not been told
  absl::Status going_back_;  // ROLLED_BACK that the caller has not been told
  Link* shown_ = nullptr;    // with moved_: whose memory the caller has
  bool carried_on_ = false;  // Settle() has nothing to tell
  // The step whose weights have arrived here, and after which nothing was pushed: its state is what
  // any snapshot of it has. And the same but for the weights' arrival.
  std::optional<int64_t> stands_at_;
  bool state_known_ = false;
  std::optional<WaitNotice> notice_;  // of the step that is submitted
  bool undecided_ = false;            // a submit has no outcome yet
  uint64_t published_attempt_ = 0;    // whose weights WaitPublished() waits for
  uint64_t arrived_attempt_ = 0;      // whose weights, or newer ones, the caller knows to lie there
  std::string submitted_state_;

  // Kept from step to step, so that a step allocates no messages.
  std::vector<uint8_t> held_back_;  // bucket -> waits for the submit, because of absent parameters
  std::vector<uint8_t> hold_none_;
  v1::SubmitStepRequest submit_request_;
  v1::SubmitStepReply submit_reply_;
  v1::WaitStepRequest wait_request_;
  v1::WaitStepReply wait_reply_;

  std::vector<std::unique_ptr<Link>> stale_;  // for pointers into their memory
  std::unique_ptr<Link> link_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_SESSION_IMPL_H_
