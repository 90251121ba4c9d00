#include "scheduler/snapshot_schedule.h"

namespace dmuond::scheduler {

bool SnapshotSchedule::OnCommitted(StepId step, TimePoint now) {
  const bool by_steps = options_.every_steps > 0 && step.value() >= due_step_;
  const bool by_time = options_.every.count() > 0 && now >= due_;
  if (!by_steps && !by_time && !requested_) return false;
  if (writing_.has_value()) {
    // A request waits for its turn; it is not left out.
    if (by_steps || by_time) ++counts_.left_out;
    if (by_steps) due_step_ = NextAfter(step);
    if (by_time) due_ = now + options_.every;
    return false;
  }
  requested_ = false;
  writing_ = step;
  due_step_ = NextAfter(step);
  due_ = now + options_.every;
  return true;
}

void SnapshotSchedule::OnFinished(bool durable) {
  if (!writing_.has_value()) return;  // nothing was begun
  if (durable) {
    durable_ = writing_;
  } else {
    ++counts_.failed;
  }
  writing_.reset();
}

}  // namespace dmuond::scheduler
