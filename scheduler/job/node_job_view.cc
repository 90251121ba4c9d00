// What a job shows to who watches it. Nothing here changes it.
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/job/saved_trainer_state.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

bool NodeJob::planned() const { return WorldSizeOf(job_->wire) > 0; }

absl::Status NodeJob::CheckStill(uint64_t number) const {
  if (job_ == nullptr || job_->number != number) {
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED",
                 scheduler::Say("the job ended meanwhile"));
  }
  return job_->failed;
}

bool NodeJob::HasOrGetsState() const {
  return job_ != nullptr &&
         (job_->has_state || job_->wire.has_restore() || job_->resume.has_value());
}

bool NodeJob::restores() const {
  return job_ != nullptr && job_->failed.ok() && job_->wire.has_restore() && !job_->restored;
}

bool NodeJob::restores_somewhere() const {
  return job_ != nullptr && job_->failed.ok() && epoch_ != 0 && job_->wire.has_restore() &&
         !job_->steps.has_value();
}

bool NodeJob::settled() const {
  return job_ != nullptr && job_->phase == Phase::kRunning && job_->has_state && epoch_ != 0 &&
         job_->steps.has_value() && EpochOf(job_->steps->open().attempt).value() == epoch_;
}

bool NodeJob::Published() const {
  if (job_ == nullptr) return true;
  if ((lanes_come() && job_->over_old_memory) || job_->broken_since.has_value()) return false;
  // Attempts that were aborted or refused are not published; the newest one that was is remembered.
  return !job_->steps.has_value() || !job_->steps->last_decision().has_value() ||
         job_->published_attempt >= job_->applied_attempt;
}

bool NodeJob::Saved() const {
  if (job_ == nullptr || !job_->snapshot.Saved(job_->applied_attempt)) return false;
  // A vote that has no answer may have committed a step that this node does not know of.
  return !job_->steps.has_value() || !job_->steps->voted() ||
         job_->steps->open().attempt == halted_attempt_;
}

int64_t NodeJob::LastCommitted() const {
  if (job_ == nullptr) return 0;
  if (job_->steps.has_value()) return job_->steps->last_committed().value();
  if (job_->wire.has_restore()) return job_->wire.restore().step();
  return job_->resume.has_value() ? job_->resume->step() : 0;
}

std::string NodeJob::TrainerStateOf(int32_t rank) const {
  if (const auto kept = job_->trainer_states.find(rank); kept != job_->trainer_states.end()) {
    return kept->second.bytes;
  }
  if (job_->has_state || !job_->resume.has_value()) return "";
  return SavedTrainerState(*job_->resume, rank);
}

absl::Status NodeJob::WhyNoLanesCome() const {
  if (absl::Status lost = failure(); !lost.ok()) return lost;
  if (job_ == nullptr || !job_->steps.has_value()) return absl::OkStatus();
  const std::optional<Decision>& last = job_->steps->last_decision();
  if (!last.has_value() || !last->lost) return absl::OkStatus();
  // Given up for something else, a rank for instance, the job still has its lanes.
  if (last->outcome.reason != OutcomeReason::kLaneLost) return absl::OkStatus();
  return scheduler::GivenUp(last->outcome.reason, last->outcome.detail);
}

bool NodeJob::Restarted() const {
  return job_->has_state && job_->steps.has_value() &&
         job_->steps->open().attempt.value() > job_->applied_attempt;
}

// A job that goes back opens attempts, and has no state before all ranks have come to it: the only
// decision that is for good then is that somebody will not.
std::optional<std::string> NodeJob::WhyNotRestarted() const {
  if (job_ == nullptr || job_->has_state || !job_->steps.has_value()) return std::nullopt;
  const std::optional<Decision>& decided = job_->steps->last_decision();
  if (!decided.has_value() || decided->verdict != Verdict::kAbort || decided->outcome.retry) {
    return std::nullopt;
  }
  return decided->outcome.detail;
}

}  // namespace dmuond::scheduler
