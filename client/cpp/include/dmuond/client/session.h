// A trainer's session with the daemon of its node: the whole client.
//
//   auto session = Session::Open({.rank = rank, .world_size = world_size});
//   (*session)->Register(layout);              // answers when every rank has registered
//   (*session)->Attach();                      // arenas and timeline are mapped
//   … fill (*session)->Weight<float>(w1) …
//   (*session)->Push();                        // they become the masters, equal on all ranks
//   for (…) {
//     … fill (*session)->Gradient<float>(w1) …
//     auto outcome = (*session)->Step(scalars);  // new weights lie in the arena when it returns
//   }
//   (*session)->Close();
//
// Step() is Submit(), again where the daemon says so, and WaitPublished(). A trainer that wants to
// overlap calls them itself: MarkReady(bucket) as the backward pass completes a bucket, Submit(),
// host work, WaitPublished() before the next forward pass reads the weights.
//
// On a GPU: Options::arenas, and device_arenas.h.
//
// Going back: the job may be set back to a step, by a snapshot that is loaded or because a daemon
// was lost. Step(), Submit() and Wait() then return kRolledBack, and other calls an error of reason
// ROLLED_BACK, when the weights of that step lie in the arena: go on from last_committed_step()
// with trainer_state(). When this node's daemon goes, the watcher ends every wait, and the next
// call waits for the daemon's successor (Options::reconnect_timeout) and takes this trainer's place
// in the job again, with fresh memory: Outcome::fresh_memory, or `fresh_memory` in the error's
// metadata. Without a successor in time it is UNAVAILABLE (DAEMON_LOST), without the job's state
// DATA_LOSS (STATE_LOST). Where the weights do not come it is another error, and the next call goes
// on with the way back and says where to.
//
// Ownership: a session owns its connection, its mappings and one watcher thread. Pointers into
// arenas are valid until it is destroyed, those into a former daemon's until ReleaseStale(), too.
// A session that is destroyed without Close() is, to the daemon, a trainer that died: its
// replacement may come.
//
// Threads: one caller at a time. MarkReady may be called by several threads for different buckets
// while no other method runs. Do not fork without exec while a session is open: gRPC does not
// survive it.
//
// Errors: absl::Status; ReasonOf() of errors.h gives the stable reason.
#ifndef DMUOND_CLIENT_SESSION_H_
#define DMUOND_CLIENT_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/client/arenas.h"
#include "dmuond/client/errors.h"
#include "dmuond/client/layout.h"
#include "dmuond/client/options.h"
#include "dmuond/client/types.h"

namespace dmuond::client {

// What a submit carries besides its scalars.
struct SubmitOptions {
  std::vector<int32_t> absent;  // parameters (indices in the layout) without a gradient
  std::string trainer_state;    // opaque, at most 1 MiB; commits with the step
  // A stream of the arenas' device. When it has done everything that has been enqueued in it, the
  // gradients are there and the trainer reads the weights no more. Unset: both hold already.
  std::optional<CUstream_st*> stream;
  bool withdraw = false;  // a bucket that was marked ready has changed: abort this attempt
  // A parameter (index in the layout) whose gradient here has an infinity or a NaN: every rank's
  // step is skipped. Lanes see that in gradients that they read. They read none of
  // Contribution::kNone, and of kSame the lowest rank's alone: where ranks compute those each by
  // itself, a trainer looks at its own. FAILED_PRECONDITION with a daemon that is too old for it.
  std::optional<int32_t> not_finite;
  // How long to wait for the decision; kPending when it has not come.
  std::chrono::milliseconds wait = std::chrono::hours(24);
};

// State of one fragment: its box, row-major. StateKind::kStep has one value.
struct StateTensor {
  int32_t parameter = 0;  // index in the layout
  int32_t fragment = 0;   // index among this rank's fragments of the parameter
  StateKind kind = StateKind::kMaster;
  std::vector<float> values;
};

class Session {
 public:
  // Connects, waiting for a daemon that is just starting, and opens the session.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Session>> Open(const Options& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // ---- before the first step, in this order ----

  // Answers when the whole world has registered and the plan is made.
  absl::StatusOr<Registered> Register(const Layout& layout);
  // Maps the layout's arenas. With a job that has state, returns when its weights lie in them; they
  // are those of last_committed_step(), which may be an older one than when the session opened.
  absl::Status Attach(const FirstWeights& first = {});
  // The weights in the arenas are the truth: all of them, or those of the named parameters.
  // Collective; returns when they are published to every holder. WEIGHTS_REPUBLISHED when the group
  // has formed anew since the last step, and may have overwritten them: write them again.
  absl::Status Push();
  absl::Status Push(const std::vector<std::string>& parameters);

  // ---- memory; valid from Attach() on ----

  // Of this rank's `fragment`-th fragment of a parameter, from its first element; strides as
  // registered. Null where the fragment is empty or the parameter is the trainer's.
  [[nodiscard]] std::byte* WeightBytes(int32_t parameter, int32_t fragment = 0) const;
  [[nodiscard]] std::byte* GradientBytes(int32_t parameter, int32_t fragment = 0) const;
  // The same as elements of a dense fragment, as LayoutBuilder makes them.
  // REQUIRES: T has the size of the parameter's element type.
  template <typename T>
  [[nodiscard]] std::span<T> Weight(int32_t parameter, int32_t fragment = 0) const {
    return {reinterpret_cast<T*>(WeightBytes(parameter, fragment)), Size(parameter, fragment)};
  }
  template <typename T>
  [[nodiscard]] std::span<T> Gradient(int32_t parameter, int32_t fragment = 0) const {
    return {reinterpret_cast<T*>(GradientBytes(parameter, fragment)), Size(parameter, fragment)};
  }
  // Elements of a fragment of this rank; 0 where it holds none.
  [[nodiscard]] size_t Size(int32_t parameter, int32_t fragment = 0) const;

  // ---- steps ----

  // The bucket's gradients lie in the arena: they may be collected from now on, and must not change
  // until the step is decided. Optional: a bucket that is not marked is, by Submit. Not for a
  // bucket with a parameter that may turn out absent. Buckets in which this trainer holds nothing
  // are ignored.
  void MarkReady(int32_t bucket);
  // The same, once everything is done that has been enqueued in `stream`, of the arenas' device;
  // the stream is not held up, and must not be one that is being captured into a graph. Needs
  // Options::arenas.
  absl::Status MarkReady(int32_t bucket, CUstream_st* stream);

  // Hands the step in and waits for its decision. INVALID_ARGUMENT when the trainers' scalars
  // differ: nothing has changed, and a corrected submit may follow with the same gradients.
  absl::StatusOr<Outcome> Submit(const StepScalars& scalars, const SubmitOptions& options = {});
  // After a kPending: waits for the decision of the submitted step.
  absl::StatusOr<Outcome> Wait(std::chrono::milliseconds wait = std::chrono::hours(24));
  // Waits until the weights after the last decided attempt lie in the arenas.
  absl::Status WaitPublished(std::chrono::milliseconds timeout = std::chrono::minutes(10));
  // The same for what is enqueued in `stream` from now on; the caller does not wait. Where the
  // daemon is lost or the job goes back meanwhile, the stream goes on with undefined weights, and
  // the next call says so. Needs Options::arenas; not for a stream that is being captured.
  absl::Status WaitPublished(CUstream_st* stream);
  // A whole step: kCommitted or kSkipped with the weights published, or kRolledBack. An aborted
  // attempt that may be retried is, with the same gradients; one that may not is ABORTED with the
  // outcome's reason.
  absl::StatusOr<Outcome> Step(const StepScalars& scalars, const SubmitOptions& options = {});

  // ---- optimizer state of this rank's fragments ----

  // Not collective: any rank, at any time between steps.
  absl::StatusOr<std::vector<float>> Pull(int32_t parameter, StateKind kind, int32_t fragment = 0);
  // Collective: takes effect, and returns, when every rank has pushed. What is not named stays.
  absl::Status PushState(const std::vector<StateTensor>& tensors);

  // ---- snapshots ----

  // Writes one of the last committed step. Any rank, not collective.
  absl::StatusOr<Snapshot> SaveSnapshot();
  // Sets the whole job back to one (0: the newest); its step. One rank calls it; every rank's next
  // step is kRolledBack.
  absl::StatusOr<int64_t> LoadSnapshot(int64_t step = 0);

  // ---- the end ----

  // Unmaps the memory of daemons that have gone: nothing points into it any more.
  void ReleaseStale();

  // Leaves the job, which ends when every rank has closed. Idempotent.
  absl::Status Close();

  // ---- what is known ----

  [[nodiscard]] int32_t rank() const;
  [[nodiscard]] int32_t world_size() const;
  [[nodiscard]] int32_t lanes() const;  // of this node
  [[nodiscard]] const std::string& device_type() const;
  [[nodiscard]] const std::string& server() const;
  // As Register() answered, or the daemon's successor when this trainer came back to it.
  [[nodiscard]] const Registered& registered() const;
  // The job had optimizer state when the session opened: Attach() brings its weights.
  [[nodiscard]] bool has_state() const;
  [[nodiscard]] int64_t last_committed_step() const;  // or skipped; 0: none
  [[nodiscard]] std::optional<int64_t> durable_step() const;
  [[nodiscard]] const std::string& trainer_state() const;  // as of last_committed_step
  [[nodiscard]] uint64_t next_attempt() const;
  [[nodiscard]] const StepTiming& last_timing() const;
  [[nodiscard]] bool lost()
      const;  // the daemon has gone: the weights are undefined until a call returns

 private:
  class Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_SESSION_H_
