// A planned departure of this node: the group halts the job, what it has come to is saved, and only
// then the node goes. For the others it is a daemon that is gone, whose successor finds everything
// on the disk. Pure.
//
//               begin          halted        saved       broken, formed   job over   deadline
//   Serving     Halting (1)    -             -           -                -          -
//   Halting     -              Saving (2)    -           Halting          Publishing Publishing
//   Saving      -              -             Publishing  Halting          Publishing Publishing
//   Publishing  -              -             -           Prepared         Prepared   Prepared
//   Prepared    -              -             -           -                -          -
//
// (1) Publishing where there is nothing to save. (2) Publishing where nothing can be saved. From
// Publishing it goes on as soon as trainers of this node have the weights of the last step.
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

  // Everything is to be done by `deadline`; the attempt in flight may take `patience`. Begun again,
  // it has the earlier deadline of the two.
  // `saves`: there is a directory for snapshots.
  [[nodiscard]] node::Actions Begin(NodeJob& job, TimePoint deadline,
                                    std::chrono::milliseconds patience, bool saves);
  // Whenever HasNews(), and at the deadline. REQUIRES: begun.
  [[nodiscard]] node::Actions Advance(TimePoint now, NodeJob& job);
  [[nodiscard]] bool HasNews(const NodeJob& job) const;
  // The group has formed anew: it is told again.
  [[nodiscard]] node::Actions OnFormed(NodeJob& job) const;

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool begun() const { return state_ != State::kServing; }
  // REQUIRES: Prepared. Why the last steps are in no snapshot; OK: they are, or there are none, or
  // there is no directory.
  [[nodiscard]] const absl::Status& saved() const { return saved_; }

 private:
  void End(absl::Status saved);

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
