// The coordinator's part in a planned departure: nothing is decided after what the leaver saves.
#include <algorithm>
#include <cstdint>

#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

void GroupJob::HaltForLeavers(TimePoint now, AddressedMessages& out) {
  // What the group goes on with must be known, and in lanes that work.
  if (leavers_.empty() || !Formed()) return;
  if (job_ != nullptr && job_->lacks_lanes()) return;
  int64_t step = job_ == nullptr ? 0 : job_->restore.step.value();
  if (job_ != nullptr && job_->has_steps()) {
    const bool patient = std::all_of(leavers_.begin(), leavers_.end(), [now](const auto& leaver) {
      return now < leaver.second.patience_ends;
    });
    if (job_->steps->in_flight() && !job_->steps->lost() && patient) return;
    job_->steps->Halt();
    step = job_->steps->last_committed().value();
  }
  for (auto& [node, leaver] : leavers_) {
    if (leaver.told) continue;
    leaver.told = true;
    v1::Halted& halted = *out.emplace_back().message.mutable_halted();
    halted.set_node(node);
    halted.set_step(step);
  }
}

}  // namespace dmuond::scheduler
