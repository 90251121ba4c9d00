#include "tests/scheduler/step_invariants.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/scheduler/chance.h"

namespace dmuond::scheduler::testing {
namespace {

bool Consumes(const Decision& decision) {
  return decision.verdict == Verdict::kCommit || decision.verdict == Verdict::kSkip;
}

}  // namespace

uint64_t AfterApplying(uint64_t applied, Attempt attempt) {
  return Mix(applied * 31 + attempt.value());
}

// ---- trainers and lanes ----

void StepInvariants::Submitted(const Submission& submission) {
  asked_[submission.attempt][submission.rank] = submission;
}

void StepInvariants::ToldReady(Attempt attempt, RailOperation operation, LaneIndex rail,
                               BucketId bucket, NodeRank node, bool gradients) {
  if (gradients) gradients_reported_.insert(attempt);
  reports_.insert({attempt, operation, rail, bucket, node});
}

void StepInvariants::Gathered(LaneId lane, Attempt attempt, uint64_t applied) {
  gathered_[attempt][lane] = applied;
}

// ---- decisions ----

void StepInvariants::Decided(const Decision& decision, bool again, bool finite) {
  const auto before = decided_.find(decision.attempt);
  if (again && before != decided_.end()) {
    if (before->second.verdict != decision.verdict) Fail("told another decision than before");
    return;
  }
  if (decision.attempt != open_) Fail("decided an attempt that is not open");
  if (!decided_.emplace(decision.attempt, decision).second) Fail("decided an attempt twice");
  switch (decision.verdict) {
    case Verdict::kCommit:
      ++(decision.kind == AttemptKind::kStep ? counts_.commits : counts_.pushes);
      break;
    case Verdict::kSkip:
      ++counts_.skips;
      break;
    case Verdict::kAbort:
      ++counts_.aborts;
      break;
    case Verdict::kRefuse:
      ++counts_.refusals;
      break;
  }
  if (!Consumes(decision)) return;
  CheckCommit(decision);
  const bool step = decision.kind == AttemptKind::kStep;
  if (step && decision.step.value() != now_.step.value() + 1) {
    Fail("a step was consumed out of order");
  }
  if (step && (decision.verdict == Verdict::kSkip) == finite) {
    Fail("skipped a finite step or committed another");
  }
  Consumed& consumed = consumed_[decision.attempt];
  consumed.before = now_.consumed;
  if (step) now_.step = decision.step;
  now_.pushed = !step;
  now_.consumed = AfterApplying(now_.consumed, decision.attempt);
  if (decision.verdict == Verdict::kCommit) {
    now_.applied = AfterApplying(now_.applied, decision.attempt);
  }
  consumed.after = now_;
}

void StepInvariants::CheckCommit(const Decision& decision) {
  const auto& asked = asked_[decision.attempt];
  if (asked.size() != world_.inputs.layout.trainers.size()) Fail("committed without all ranks");
  for (const auto& [rank, submission] : asked) {
    if (submission.kind != decision.kind || submission.step != decision.step) {
      Fail("committed another step than the submitted ones");
    }
    if (submission.withdraw) Fail("committed a withdrawn attempt");
    if (decision.kind == AttemptKind::kStep && decision.verdict == Verdict::kCommit &&
        Compare(submission.scalars, decision.scalars)) {
      Fail("committed with other scalars than a rank's");
    }
  }
  if (decision.kind == AttemptKind::kPush && gradients_reported_.contains(decision.attempt)) {
    Fail("a push was committed where lanes had gradients to send");
  }
  const auto& gathered = gathered_[decision.attempt];
  if (gathered.size() != static_cast<size_t>(world_.inputs.nodes) * world_.inputs.lanes_per_node) {
    Fail("committed ungathered");
  }
  for (const auto& [lane, applied] : gathered) {
    if (applied != now_.applied) {
      Fail(absl::StrCat("committed on lane ", lane.value(), ", whose state is not the newest"));
    }
  }
}

void StepInvariants::Opened(const OpenAttempt& open) {
  if (open.attempt <= open_) Fail("opened an older attempt");
  if (open.step.value() != now_.step.value() + 1) Fail("opened another step than the next");
  open_ = open.attempt;
}

void StepInvariants::ToldBegun(const Begun& begun) {
  ++counts_.begun;
  for (const scheduler::Trainer& trainer : world_.inputs.layout.trainers) {
    if (trainer.node == begun.node) Fail("a node with trainers was told of an attempt");
  }
  const auto& asked = asked_[begun.submission.attempt];
  const auto submission = asked.find(begun.submission.rank);
  if (submission == asked.end() || submission->second.kind != begun.submission.kind) {
    Fail("a node was told of a submission that nobody made");
  }
}

void StepInvariants::Republished(const Republish& republish) {
  if (republish.attempt < open_) Fail("published anew under an older attempt");
  if (republish.step != now_.step) Fail("published anew another step than the last one");
}

void StepInvariants::Went(const Go& go) {
  ++counts_.goes;
  auto& last = last_go_[{go.attempt, go.operation}];
  const auto [before, first] = last.emplace(go.rail, go.bucket);
  if (!first && !(before->second < go.bucket)) Fail("buckets went out of order");
  before->second = go.bucket;
  const bool collect = go.operation == RailOperation::kCollect;
  const auto& asked = asked_[go.attempt];
  const bool step = !std::any_of(asked.begin(), asked.end(),
                                 [](const auto& a) { return a.second.kind != AttemptKind::kStep; });
  const RailTable& table = !collect ? world_.tables.weights
                           : step   ? world_.tables.partials
                                    : world_.tables.adopts;
  const auto& buckets = table[go.rail.value()];
  if (!buckets.contains(go.bucket)) {
    if (step || !collect) Fail("a bucket without messages went");
    return;  // gradients that went before anybody knew of the push, which then ends the attempt
  }
  for (NodeRank node : buckets.at(go.bucket)) {
    if (collect && !step) continue;
    if (!reports_.contains({go.attempt, go.operation, go.rail, go.bucket, node})) {
      Fail("a bucket went before all its lanes were ready");
    }
    // A lane that only receives may be ready before its own trainers are: they are in no message.
    if (!collect || !world_.tables.SendsPartials(go.rail, go.bucket, node)) continue;
    for (const auto& [rank, submission] : asked) {
      if (world_.inputs.layout.trainers[rank.value()].node != node) continue;
      for (int32_t p : submission.absent) {
        const bool told = std::find(go.absent.begin(), go.absent.end(), AbsentFragment{rank, p}) !=
                          go.absent.end();
        if (told != (world_.plan.parameter_bucket[p] == go.bucket.value())) {
          Fail("a go does not name the absent fragments of its bucket");
        }
      }
    }
  }
}

// ---- snapshots ----

void StepInvariants::SaveBegins(const SnapshotId& id) {
  if (id.step != now_.step) Fail("a snapshot is of another step than the newest");
  saved_[id] = now_;
}

void StepInvariants::ManifestExists(const SnapshotId& id, const std::vector<uint64_t>& applied) {
  ++counts_.snapshots;
  for (uint64_t state : applied) {
    if (state != saved_.at(id).applied) Fail("a snapshot is a mixture");
  }
}

void StepInvariants::ToldDurable(Attempt attempt, StepId durable, StepId last_committed) {
  if (durable > last_committed) Fail("a step is durable that is not committed");
  if (EpochOf(attempt) < asked_back_in_) return;
  if (durable_told_.has_value() && durable < *durable_told_) Fail("a step is durable no more");
  durable_told_ = durable;
}

void StepInvariants::RolledBack(const SnapshotId& to, GroupEpoch epoch, bool asked_for) {
  ++counts_.rollbacks;
  if (asked_for) asked_back_in_ = epoch;
  if (!asked_for && durable_told_.has_value() && to.step < *durable_told_) {
    Fail(absl::StrCat("rolled back to step ", to.step.value(), ", and step ",
                      durable_told_->value(), " was durable"));
  }
  if (!asked_for && left_with_ == now_.consumed && saved_.at(to).consumed != now_.consumed) {
    Fail("a planned departure lost something");
  }
  if (durable_told_.has_value() && to.step < *durable_told_) durable_told_ = to.step;
  now_ = saved_.at(to);
}

void StepInvariants::LeavesWith(const SnapshotId& id) {
  ++counts_.departures;
  if (EpochOf(id.attempt) < asked_back_in_) return;
  if (saved_.at(id).consumed != now_.consumed) Fail("a daemon leaves, and its snapshot is old");
  left_with_ = now_.consumed;
}

void StepInvariants::StateLost(bool any_manifest) {
  ++counts_.lost_jobs;
  if (any_manifest) Fail("a job with a snapshot is given up as lost");
}

void StepInvariants::BeganAnew() {
  if (durable_told_.has_value()) Fail("a job with a durable step began anew");
  now_ = {};
}

// ---- what others hear ----

History StepInvariants::Heard(const std::string& who, const History& before, Attempt attempt) {
  const auto consumed = consumed_.find(attempt);
  if (consumed == consumed_.end()) {
    Fail(absl::StrCat(who, " heard of a commit that was not decided"));
    return before;
  }
  if (consumed->second.before != before.consumed) {
    Fail(absl::StrCat(who, " was at step ", before.step.value(), " and heard of step ",
                      consumed->second.after.step.value(),
                      ", which does not follow from what it had heard"));
  }
  return consumed->second.after;
}

const Decision* StepInvariants::DecisionOf(Attempt attempt) const {
  const auto found = decided_.find(attempt);
  return found == decided_.end() ? nullptr : &found->second;
}

}  // namespace dmuond::scheduler::testing
