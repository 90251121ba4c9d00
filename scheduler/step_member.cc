#include "scheduler/step_member.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// Outcomes kept for trainers that were away while attempts were aborted. Only a group whose other
// trainers abort this often without the slow one can pass it; the slow one then gets an error.
constexpr size_t kDecisionsKept = 64;

bool Consumes(const Decision& decision) {
  return decision.verdict == Verdict::kCommit || decision.verdict == Verdict::kSkip;
}

// Step number that a submission of this kind carries while `open_step` is open.
StepId Expected(AttemptKind kind, StepId open_step) {
  return kind == AttemptKind::kStep ? open_step : StepId(open_step.value() - 1);
}

// Whether a submission of `kind` at `step` was one of this decided attempt. An attempt that ended
// without effect answers every kind of it: whoever came late has not been asked.
bool Answers(const Decision& decision, StepId open_step, AttemptKind kind, StepId step) {
  if (Consumes(decision)) return kind == decision.kind && step == decision.step;
  return step == Expected(kind, open_step);
}

StepAnswer AnswerOf(const Decision& decision) {
  StepAnswer answer;
  answer.next_attempt = decision.outcome.next_attempt;
  if (decision.verdict == Verdict::kRefuse) {
    answer.refused = Error(absl::StatusCode::kInvalidArgument, decision.refuse_reason,
                           Message{decision.refuse_message, decision.refuse_metadata});
  } else {
    answer.outcome = decision.outcome;
  }
  return answer;
}

// The first field in which a repeated submission differs.
std::optional<std::string> Difference(const Submission& a, const Submission& b) {
  if (a.kind != b.kind) return "kind";
  if (a.step != b.step) return absl::StrCat("step (", a.step.value(), ", ", b.step.value(), ")");
  if (a.withdraw != b.withdraw) return "withdraw";
  if (const auto mismatch = Compare(a.scalars, b.scalars)) {
    return absl::StrCat(mismatch->field, " (", mismatch->first, ", ", mismatch->second, ")");
  }
  if (a.absent != b.absent) return "absent";
  if (a.pushed != b.pushed) return "pushed";
  return std::nullopt;
}

}  // namespace

StepMember::StepMember(std::vector<TrainerRank> local_ranks, int32_t local_lanes,
                       StepId last_committed)
    : local_ranks_(local_ranks.begin(), local_ranks.end()),
      local_lanes_(local_lanes),
      last_committed_(last_committed) {}

void StepMember::OnOpen(const OpenAttempt& open) {
  if (open.attempt > open_.attempt) Open(open);
}

void StepMember::Open(const OpenAttempt& open) {
  open_ = open;
  submissions_.clear();
  gathered_.clear();
}

absl::Status StepMember::CheckLocal(TrainerRank rank) const {
  if (local_ranks_.contains(rank)) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE",
               Say("rank ", Named("rank", rank.value()), " is not a trainer of this node"));
}

absl::Status StepMember::OutOfOrder(TrainerRank rank, StepId step, StepId expected,
                                    Attempt attempt) const {
  if (step != expected) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
        Say("rank ", Named("rank", rank.value()), " is at step ", Named("step", step.value()),
            ", the job at ", Named("next", expected.value()), " (last committed step ",
            Named("last_committed_step", last_committed_.value()), ")"));
  }
  return Error(absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER",
               Say("rank ", Named("rank", rank.value()), " is at attempt ",
                   Named("attempt", attempt.value()), " of step ", Named("step", step.value()),
                   ", the job at attempt ", Named("open_attempt", open_.attempt.value())));
}

const StepMember::Decided* StepMember::Find(Attempt attempt) const {
  const auto found =
      std::lower_bound(decided_.begin(), decided_.end(), attempt,
                       [](const Decided& d, Attempt a) { return d.decision.attempt < a; });
  return found != decided_.end() && found->decision.attempt == attempt ? &*found : nullptr;
}

absl::StatusOr<StepMember::Accepted> StepMember::OnSubmission(const Submission& submission) {
  if (absl::Status status = CheckLocal(submission.rank); !status.ok()) return status;
  const Decided* decided = Find(submission.attempt);
  if (decided != nullptr &&
      Answers(decided->decision, decided->open_step, submission.kind, submission.step)) {
    return Accepted{AnswerOf(decided->decision), false};
  }
  const StepId expected = Expected(submission.kind, open_.step);
  if (submission.attempt != open_.attempt || submission.step != expected) {
    return OutOfOrder(submission.rank, submission.step, expected, submission.attempt);
  }
  const auto [before, inserted] = submissions_.emplace(submission.rank, submission);
  if (inserted) return Accepted{StepAnswer{}, true};
  if (const auto field = Difference(before->second, submission)) {
    return Error(absl::StatusCode::kInvalidArgument, "SUBMISSION_DIFFERS",
                 Say("rank ", Named("rank", submission.rank.value()), " submitted step ",
                     Named("step", submission.step.value()), ", attempt ",
                     Named("attempt", submission.attempt.value()), " twice with different ",
                     Named("field", *field)));
  }
  return Accepted{StepAnswer{}, false};
}

absl::StatusOr<StepAnswer> StepMember::OnWait(TrainerRank rank, StepId step,
                                              Attempt attempt) const {
  if (absl::Status status = CheckLocal(rank); !status.ok()) return status;
  if (const Decided* decided = Find(attempt)) {
    for (AttemptKind kind : {AttemptKind::kStep, AttemptKind::kPush, AttemptKind::kLoad}) {
      if (Answers(decided->decision, decided->open_step, kind, step)) {
        return AnswerOf(decided->decision);
      }
    }
  }
  const auto submitted = submissions_.find(rank);
  if (submitted != submissions_.end() && attempt == open_.attempt &&
      step == submitted->second.step) {
    return StepAnswer{};
  }
  if (submitted == submissions_.end() && attempt == open_.attempt && step == open_.step) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
        Say("rank ", Named("rank", rank.value()), " waits for step ", Named("step", step.value()),
            ", attempt ", Named("attempt", attempt.value()), " without having submitted it"));
  }
  return OutOfOrder(rank, step, open_.step, attempt);
}

std::optional<std::vector<UnitNorm>> StepMember::OnGathered(Attempt attempt, LaneIndex lane,
                                                            std::vector<UnitNorm> norms) {
  if (attempt != open_.attempt || lane.value() < 0 || lane.value() >= local_lanes_) {
    return std::nullopt;
  }
  if (!gathered_.emplace(lane, std::move(norms)).second) return std::nullopt;
  if (!voted()) return std::nullopt;
  std::vector<UnitNorm> vote;
  for (auto& [index, part] : gathered_) {
    std::move(part.begin(), part.end(), std::back_inserter(vote));
  }
  std::sort(vote.begin(), vote.end(), [](const UnitNorm& a, const UnitNorm& b) {
    return std::tie(a.unit, a.first_block, a.first_element) <
           std::tie(b.unit, b.first_block, b.first_element);
  });
  return vote;
}

void StepMember::OnDecision(const Decision& decision) {
  if (decision.attempt < open_.attempt) return;
  if (last_.has_value() && decision.attempt <= last_->attempt) return;
  if (decision.attempt > open_.attempt && open_.attempt.value() != 0 && !Consumes(decision)) {
    // Attempts have ended unheard, with a link that broke: who waits for this one is told the same.
    Decision missed = decision;
    missed.attempt = open_.attempt;
    missed.outcome.attempt = open_.attempt;
    Remember(missed);
  }
  Remember(decision);
  const bool step = decision.kind == AttemptKind::kStep;
  if (Consumes(decision) && step) last_committed_ = decision.step;
  last_ = decision;
  Open({decision.outcome.next_attempt, StepId(last_committed_.value() + 1)});
}

// The last decision that consumed something stays whatever follows: nothing can be consumed again
// before every trainer has heard of it, and asked for more.
void StepMember::Remember(const Decision& decision) {
  if (Consumes(decision)) decided_.clear();
  const StepId open_step = Consumes(decision) && decision.kind == AttemptKind::kStep
                               ? decision.step
                               : StepId(last_committed_.value() + 1);
  if (decided_.size() > kDecisionsKept) {
    decided_.erase(decided_.begin() + (Consumes(decided_.front().decision) ? 1 : 0));
  }
  decided_.push_back({decision, open_step});
}

OpenAttempt StepMember::open() const { return open_; }
StepId StepMember::last_committed() const { return last_committed_; }
const std::optional<Decision>& StepMember::last_decision() const { return last_; }
bool StepMember::submitted(TrainerRank rank) const { return submissions_.contains(rank); }

}  // namespace dmuond::scheduler
