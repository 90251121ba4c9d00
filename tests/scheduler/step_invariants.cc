#include "tests/scheduler/step_invariants.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
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

void StepInvariants::ToldReady(NodeRank node, const RailReady& ready) {
  for (const BucketRun& run : ready.buckets) {
    for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
      const BucketId bucket(b);
      reports_.insert({ready.attempt, ready.operation, ready.rail, bucket, node});
      if (ready.operation == RailOperation::kCollect && ready.kind == AttemptKind::kStep &&
          world_.tables.SendsPartials(ready.rail, bucket, node)) {
        gradients_reported_.insert(ready.attempt);
      }
    }
  }
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

void StepInvariants::Went(std::optional<int32_t> to, const v1::Goes& goes) {
  std::set<AbsentFragment> absent;
  for (const v1::AbsentFragment& fragment : goes.absent()) absent.insert(FromProto(fragment));
  for (const v1::Go& wire : goes.goes()) {
    const Go go = *FromProto(wire);
    for (const AbsentFragment& fragment : absent) {
      if (go.operation == RailOperation::kCollect && !IsAbsent(go.attempt, fragment)) {
        Fail("a go names a fragment that is not absent");
      }
    }
    for (int32_t node = 0; node < world_.inputs.nodes; ++node) {
      if (to.value_or(node) == node) CheckGo(NodeRank(node), go, absent);
    }
  }
}

bool StepInvariants::IsAbsent(Attempt attempt, const AbsentFragment& fragment) const {
  const auto asked = asked_.find(attempt);
  if (asked == asked_.end()) return false;
  const auto submission = asked->second.find(fragment.rank);
  if (submission == asked->second.end()) return false;
  const std::vector<int32_t>& absent = submission->second.absent;
  return std::find(absent.begin(), absent.end(), fragment.parameter) != absent.end();
}

void StepInvariants::CheckGo(NodeRank to, const Go& go, const std::set<AbsentFragment>& absent) {
  const bool collect = go.operation == RailOperation::kCollect;
  const auto& asked = asked_[go.attempt];
  const bool step = !std::any_of(asked.begin(), asked.end(),
                                 [](const auto& a) { return a.second.kind != AttemptKind::kStep; });
  const RailTable& table = !collect                        ? world_.tables.weights
                           : go.kind == AttemptKind::kStep ? world_.tables.partials
                                                           : world_.tables.adopts;
  for (const BucketRun& run : go.buckets) {
    for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
      ++counts_.goes;
      const BucketId bucket(b);
      const auto [before, first] =
          last_go_.emplace(std::tuple(go.attempt, go.operation, go.rail, to), bucket);
      if (!first && !(before->second < bucket)) Fail("buckets went out of order, or twice");
      before->second = bucket;
      if (!table[go.rail.value()][b].contains(to)) Fail("a go came to a node without a part in it");
      // Gradients may go before anybody knows of a push, which then ends the attempt.
      if (collect && !step) continue;
      for (int32_t n = 0; n < world_.inputs.nodes; ++n) {
        const NodeRank node(n);
        if (!table[go.rail.value()][b].contains(node)) continue;
        if (!reports_.contains({go.attempt, go.operation, go.rail, bucket, node})) {
          Fail("a bucket went before all its lanes were ready");
        }
        // A lane that only receives may be ready before its own trainers are: they are in no
        // message.
        if (!collect || !world_.tables.SendsPartials(go.rail, bucket, node)) continue;
        for (const auto& [rank, submission] : asked) {
          if (world_.inputs.layout.trainers[rank.value()].node != node) continue;
          for (const int32_t p : submission.absent) {
            if (world_.plan.parameter_bucket[p] == b && !absent.contains({rank, p})) {
              Fail("a go does not name the absent fragments of its buckets");
            }
          }
        }
      }
    }
  }
}

// ---- snapshots ----

void StepInvariants::SaveBegins(const SnapshotId& id) {
  if (id.step != now_.step) Fail("a snapshot is of another step than the newest");
  if (newest_saved_.has_value() && id < *newest_saved_) Fail("a snapshot counts as older than one");
  saved_[id] = now_;
  newest_saved_ = id;
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

void StepInvariants::Discarded() {
  durable_told_.reset();
  left_with_.reset();
  newest_saved_.reset();
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
