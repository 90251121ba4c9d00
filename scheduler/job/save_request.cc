#include "scheduler/job/save_request.h"

#include <utility>

#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

v1::SnapshotDone BeginsFrom(const v1::SnapshotId& snapshot) {
  v1::SnapshotDone done;
  done.set_attempt(snapshot.attempt());
  done.set_step(snapshot.step());
  return done;
}

}  // namespace

bool SaveRequest::Done(const NodeJob& job) const {
  return job.snapshot().times_done() > before_ && job.snapshot().done().attempt() >= wanted_;
}

bool SaveRequest::SameLanes(const NodeJob& job) const {
  return job.epoch() == epoch_ && !job.lanes_come();
}

bool SaveRequest::HasNews(const NodeJob& job) const {
  if (!job.CheckStill(number_).ok()) return true;
  if (asked_ && (Done(job) || SameLanes(job))) return Done(job);
  return job.settled() || job.begins_from_snapshot();
}

std::optional<absl::StatusOr<v1::SnapshotDone>> SaveRequest::Advance(NodeJob& job,
                                                                     node::Actions& actions) {
  if (absl::Status still = job.CheckStill(number_); !still.ok()) return still;
  if (asked_) {
    const v1::SnapshotDone& end = job.snapshot().done();
    if (Done(job) && end.error().empty()) return end;
    if (Done(job) && SameLanes(job)) {
      return Error(absl::StatusCode::kUnavailable, end.reason(),
                   Say("step ", Named("step", end.step()), " was not saved: ", end.error()));
    }
    if (SameLanes(job)) return std::nullopt;
    // Lanes that were to copy are gone, or nobody heard: those that come next are asked.
    asked_ = false;
  }
  // Its state is that snapshot's until it has begun, for which it may wait for trainers.
  if (job.begins_from_snapshot()) return BeginsFrom(job.wire().restore());
  if (!job.settled()) return std::nullopt;
  asked_ = true;
  wanted_ = job.applied_attempt();
  epoch_ = job.epoch();
  before_ = job.snapshot().times_done();
  actions = job.AskForSnapshot();
  return std::nullopt;
}

}  // namespace dmuond::scheduler
