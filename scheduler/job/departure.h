// A planned departure of this node: the group halts the job, the job's state is saved, and only
// then the node leaves. To other nodes its daemon is gone then; the daemon's successor finds
// everything on the disk. Pure.
//
//               begin          halted        saved       broken, formed   job over   deadline
//   Serving     Halting (1)    -             -           -                -          -
//   Halting     -              Saving (2)    (3)         Halting          Publishing Publishing
//   Saving      -              -             Publishing  Halting          Publishing Publishing
//   Publishing  -              -             -           Prepared         Prepared   Prepared
//   Prepared    -              -             -           -                -          -
//
// (1) Publishing where there is nothing to save. (2) Publishing where nothing can be saved; then
// the group may be broken, too. (3) Publishing where the group is broken, and where the job is
// parked: without lanes of this node nothing is committed, and it gets no lanes here any more.
// Whether the job is saved is also seen in the directory, when it is broken. Publishing also ends
// when the trainers of this node have the weights of the last step, and where no lanes can give
// them those: in a parked job.
#ifndef DMUOND_SCHEDULER_JOB_DEPARTURE_H_
#define DMUOND_SCHEDULER_JOB_DEPARTURE_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/save_request.h"

namespace dmuond::scheduler {

class Departure {
 public:
  enum class State : uint8_t { kServing, kHalting, kSaving, kPublishing, kPrepared };

  // The departure ends at `deadline` at the latest, and waits for `patience` at most for the
  // attempt in flight. If it has begun already, the earlier deadline counts. `saves`: there is a
  // directory for snapshots.
  [[nodiscard]] node::Actions Begin(NodeJob& job, TimePoint deadline,
                                    std::chrono::milliseconds patience, bool saves);
  // Call it whenever HasNews() is true, and at the deadline. REQUIRES: begun().
  [[nodiscard]] node::Actions Advance(TimePoint now, NodeJob& job);
  [[nodiscard]] bool HasNews(const NodeJob& job) const;
  // The group is broken, and whether the job's state is in a snapshot was not heard: the caller
  // looks into the directory, again and again, and tells NodeJob::OnSnapshotSeen(). Others who
  // leave may have made it, and taken the news with them.
  [[nodiscard]] bool LooksForSnapshot(const NodeJob& job) const {
    return state_ == State::kHalting && saves_ && job.epoch() == 0 && !job.Saved();
  }
  // The group has formed anew: tells it again that this node leaves.
  [[nodiscard]] node::Actions OnFormed(NodeJob& job) const;

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool begun() const { return state_ != State::kServing; }
  // Why the last steps are in no snapshot. OK: they are in one, or there are none, or there is no
  // directory. REQUIRES: Prepared.
  [[nodiscard]] const absl::Status& saved() const { return saved_; }

 private:
  void End(absl::Status saved);
  // Nothing is lost when this node leaves as the job stands now.
  [[nodiscard]] bool NeedsNoHalt(const NodeJob& job) const;
  // No weights come to the trainers of this node, however long it stays.
  [[nodiscard]] static bool NothingIsPublished(const NodeJob& job);

  State state_ = State::kServing;
  TimePoint deadline_;
  std::chrono::milliseconds patience_{};
  bool saves_ = false;
  uint64_t number_ = 0;  // of the job
  std::optional<SaveRequest> request_;
  absl::Status saved_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_DEPARTURE_H_
