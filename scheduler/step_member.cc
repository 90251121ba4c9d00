#include "scheduler/step_member.h"

#include <algorithm>
#include <iterator>
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
  if (a.not_finite != b.not_finite) return "not_finite";
  if (a.pushed != b.pushed) return "pushed";
  return std::nullopt;
}

}  // namespace

StepMember::StepMember(std::vector<TrainerRank> local_ranks, int32_t local_lanes, State state)
    : local_ranks_(local_ranks.begin(), local_ranks.end()),
      local_lanes_(local_lanes),
      state_(std::move(state)) {
  if (!state_.decided.empty()) last_ = state_.decided.back().decision;
}

void StepMember::OnOpen(const OpenAttempt& open) {
  if (open.attempt > state_.open.attempt) Open(open);
}

void StepMember::Open(const OpenAttempt& open) {
  state_.open = open;
  state_.submissions.clear();
  state_.gathered.clear();
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
            Named("last_committed_step", state_.last_committed.value()), ")"));
  }
  return Error(absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER",
               Say("rank ", Named("rank", rank.value()), " is at attempt ",
                   Named("attempt", attempt.value()), " of step ", Named("step", step.value()),
                   ", the job at attempt ", Named("open_attempt", state_.open.attempt.value())));
}

const StepMember::Decided* StepMember::Find(Attempt attempt) const {
  const auto found =
      std::lower_bound(state_.decided.begin(), state_.decided.end(), attempt,
                       [](const Decided& d, Attempt a) { return d.decision.attempt < a; });
  return found != state_.decided.end() && found->decision.attempt == attempt ? &*found : nullptr;
}

absl::StatusOr<StepMember::Accepted> StepMember::OnSubmission(const Submission& submission) {
  if (absl::Status status = CheckLocal(submission.rank); !status.ok()) return status;
  const Decided* decided = Find(submission.attempt);
  if (decided != nullptr &&
      Answers(decided->decision, decided->open_step, submission.kind, submission.step)) {
    return Accepted{AnswerOf(decided->decision), false};
  }
  const StepId expected = Expected(submission.kind, state_.open.step);
  if (submission.attempt != state_.open.attempt || submission.step != expected) {
    return OutOfOrder(submission.rank, submission.step, expected, submission.attempt);
  }
  const auto [before, inserted] = state_.submissions.emplace(submission.rank, submission);
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
  const auto submitted = state_.submissions.find(rank);
  if (submitted != state_.submissions.end() && attempt == state_.open.attempt &&
      step == submitted->second.step) {
    return StepAnswer{};
  }
  if (submitted == state_.submissions.end() && attempt == state_.open.attempt &&
      step == state_.open.step) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
        Say("rank ", Named("rank", rank.value()), " waits for step ", Named("step", step.value()),
            ", attempt ", Named("attempt", attempt.value()), " without having submitted it"));
  }
  return OutOfOrder(rank, step, state_.open.step, attempt);
}

std::optional<std::vector<UnitNorm>> StepMember::OnGathered(Attempt attempt, LaneIndex lane,
                                                            std::vector<UnitNorm> norms) {
  if (attempt != state_.open.attempt || lane.value() < 0 || lane.value() >= local_lanes_) {
    return std::nullopt;
  }
  if (!state_.gathered.emplace(lane, std::move(norms)).second) return std::nullopt;
  if (!voted()) return std::nullopt;
  std::vector<UnitNorm> vote;
  for (auto& [index, part] : state_.gathered) {
    std::move(part.begin(), part.end(), std::back_inserter(vote));
  }
  return vote;
}

void StepMember::OnDecision(const Decision& decision) {
  if (decision.attempt < state_.open.attempt) return;
  if (last_.has_value() && decision.attempt <= last_->attempt) return;
  if (decision.attempt > state_.open.attempt && state_.open.attempt.value() != 0 &&
      !Consumes(decision)) {
    // Attempts have ended unheard, with a link that broke: who waits for this one is told the same.
    Decision missed = decision;
    missed.attempt = state_.open.attempt;
    missed.outcome.attempt = state_.open.attempt;
    Remember(missed);
  }
  Remember(decision);
  const bool step = decision.kind == AttemptKind::kStep;
  if (Consumes(decision) && step) state_.last_committed = decision.step;
  last_ = decision;
  Open({decision.outcome.next_attempt, StepId(state_.last_committed.value() + 1)});
}

// The last decision that consumed something stays whatever follows: nothing can be consumed again
// before every trainer has heard of it, and asked for more.
void StepMember::Remember(const Decision& decision) {
  if (Consumes(decision)) state_.decided.clear();
  const StepId open_step = Consumes(decision) && decision.kind == AttemptKind::kStep
                               ? decision.step
                               : StepId(state_.last_committed.value() + 1);
  if (state_.decided.size() > kDecisionsKept) {
    state_.decided.erase(state_.decided.begin() +
                         (Consumes(state_.decided.front().decision) ? 1 : 0));
  }
  state_.decided.push_back({decision, open_step});
}

OpenAttempt StepMember::open() const { return state_.open; }
StepId StepMember::last_committed() const { return state_.last_committed; }
const std::optional<Decision>& StepMember::last_decision() const { return last_; }
bool StepMember::submitted(TrainerRank rank) const { return state_.submissions.contains(rank); }

}  // namespace dmuond::scheduler
