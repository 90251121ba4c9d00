#include "scheduler/job/save_request.h"

#include <utility>

#include "scheduler/reason.h"

namespace dmuond::scheduler {

std::optional<absl::StatusOr<v1::SnapshotDone>> SaveRequest::Advance(NodeJob& job,
                                                                     node::Actions& actions) {
  if (absl::Status still = job.CheckStill(number_); !still.ok()) return still;
  if (asked_) {
    const v1::SnapshotDone& end = job.snapshot().done();
    const bool done = job.snapshot().times_done() > before_ && end.attempt() >= wanted_;
    const bool same_lanes = job.epoch() == epoch_ && !job.lanes_come();
    if (done && end.error().empty()) return end;
    if (done && same_lanes) {
      return Error(absl::StatusCode::kUnavailable, end.reason(),
                   Say("step ", Named("step", end.step()), " was not saved: ", end.error()));
    }
    if (same_lanes) return std::nullopt;
    // Lanes that were to copy are gone, or nobody heard: those that come next are asked.
    asked_ = false;
  }
  if (!job.settled()) return std::nullopt;
  asked_ = true;
  wanted_ = job.applied_attempt();
  epoch_ = job.epoch();
  before_ = job.snapshot().times_done();
  actions = job.AskForSnapshot();
  return std::nullopt;
}

}  // namespace dmuond::scheduler
