#include "tests/scheduler/simulated_lane.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulated_trainer.h"

namespace dmuond::scheduler::testing {

void SimulatedLane::Renew(uint32_t epoch) {
  ++generation_;
  epoch_ = epoch;
  dead_ = hangs_ = false;
  armed_ = {};
  submitted_.clear();
  begun_.clear();
  reported_.clear();
  gone_.clear();
  gathered_ = false;
  publishing_ = Attempt(0);
  published_.clear();
  publish_reported_ = false;
}

void SimulatedLane::ForgetMemory() {
  kept_ = Attempt(0);
  last_applied_ = Attempt(0);
  applied_ = 0;
}

// ---- what its daemon says ----

void SimulatedLane::Arm(const OpenAttempt& open) {
  Tell([this, open] {
    armed_ = open;
    reported_.clear();
    gone_.clear();
    gathered_ = false;
    Progress();
  });
}

void SimulatedLane::Submitted(const Submission& submission) {
  Tell([this, submission] {
    submitted_[submission.attempt][submission.rank] = submission;
    Progress();
  });
}

void SimulatedLane::Begun(const Submission& first) {
  Tell([this, attempt = first.attempt, kind = first.kind] {
    begun_.emplace(attempt, kind);
    Progress();
  });
}

void SimulatedLane::Decide(const Decision& decision) {
  Tell([this, decision] {
    if (decision.verdict == Verdict::kCommit) {
      Apply(decision);
      // A commit of an older epoch is published with the state, anew.
      if (EpochOf(decision.attempt).value() == epoch_) {
        if (publishing()) simulation_.Fail("committed while a lane was still publishing");
        publishing_ = decision.attempt;
        published_.clear();
        publish_reported_ = false;
      }
    }
    armed_ = {};
    Progress();
  });
}

void SimulatedLane::Redo(const Decision& decision) {
  Tell([this, decision] { Apply(decision); });
}

// A commit, once, from the gradients that lie gathered: in the lane's own life or its successor's.
void SimulatedLane::Apply(const Decision& decision) {
  if (last_applied_ >= decision.attempt) return;
  if (kept_ != decision.attempt) simulation_.Fail("applied what was not gathered");
  last_applied_ = decision.attempt;
  applied_ = AfterApplying(applied_, decision.attempt);
  if (EpochOf(decision.attempt).value() != epoch_) ++simulation_.counts.redone;
}

void SimulatedLane::Go(const scheduler::Go& go) {
  Tell([this, go] {
    for (const BucketRun& run : go.buckets) {
      for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
        if (go.operation == RailOperation::kCollect && go.attempt == armed_.attempt) {
          gone_.insert(BucketId(b));
        }
        if (go.operation == RailOperation::kPublish && go.attempt == publishing_) {
          published_.insert(BucketId(b));
        }
      }
    }
    Progress();
  });
}

void SimulatedLane::Publish(Attempt attempt) {
  Tell([this, attempt] {
    if (publishing()) simulation_.Fail("published anew while a lane was still publishing");
    publishing_ = attempt;
    published_.clear();
    publish_reported_ = false;
    Progress();
  });
}

void SimulatedLane::Copy(Attempt attempt) {
  Tell([this, attempt] {
    Report([this, attempt, state = applied_] { member_.Copied(rail_, attempt, state); });
  });
}

// ---- what it does ----

void SimulatedLane::Progress() {
  if (dead_ || hangs_) return;
  if (publishing()) ProgressPublish();
  if (!publishing() && armed_.attempt.value() != 0) ProgressCollect();
}

void SimulatedLane::ReportReady(RailOperation operation, BucketId bucket, Attempt attempt,
                                AttemptKind kind) {
  RailReady ready{.attempt = attempt, .rail = rail_, .operation = operation, .kind = kind};
  Append(ready.buckets, {bucket, 1});
  Report([this, ready = std::move(ready)] { member_.Ready(ready); });
}

void SimulatedLane::ProgressCollect() {
  const SimulatedWorld& world = simulation_.world;
  const Attempt attempt = armed_.attempt;
  const auto& submitted = submitted_[attempt];
  const auto begun = begun_.find(attempt);
  const bool away = member_.ranks().empty();  // it knows what it has been told, and sends nothing
  const bool step = away
                        ? begun == begun_.end() || begun->second == AttemptKind::kStep
                        : submitted.empty() || submitted.begin()->second.kind == AttemptKind::kStep;
  const RailTable& table = step ? world.tables.partials : world.tables.adopts;
  const std::vector<TrainerRank>& ranks = member_.ranks();
  bool complete = away ? begun != begun_.end() : submitted.size() == ranks.size();
  for (int32_t b = 0; b < world.plan.buckets; ++b) {
    const BucketId bucket(b);
    if (!table[rail_.value()][b].contains(node_)) continue;
    const bool only_receives = step && !world.tables.SendsPartials(rail_, bucket, node_);
    const bool ready = std::all_of(ranks.begin(), ranks.end(), [&](TrainerRank rank) {
      return submitted.contains(rank) ||
             (step && simulation_.trainers[rank.value()]->HasSignalled(attempt, bucket));
    });
    if ((ready || only_receives) && reported_.insert(bucket).second) {
      ReportReady(RailOperation::kCollect, bucket, attempt,
                  step ? AttemptKind::kStep : AttemptKind::kPush);
    }
    complete = complete && gone_.contains(bucket);
  }
  if (!complete || gathered_) return;
  gathered_ = true;
  kept_ = attempt;
  simulation_.invariants.Gathered(id(), attempt, applied_);
  const double sum =
      simulation_.FateOf(armed_.step, "nan", 15) ? std::numeric_limits<double>::quiet_NaN() : 1;
  std::vector<UnitNorm> norms;
  for (const Unit& unit : world.plan.units) {
    if (step && unit.owner == id()) norms.push_back({unit.id, 0, {sum}, unit.first_element});
  }
  Report([this, attempt, norms = std::move(norms)] { member_.Gathered(rail_, attempt, norms); });
}

void SimulatedLane::ProgressPublish() {
  std::vector<BucketId> mine;
  for (int32_t b = 0; b < simulation_.world.plan.buckets; ++b) {
    if (simulation_.world.tables.weights[rail_.value()][b].contains(node_)) mine.emplace_back(b);
  }
  if (!publish_reported_) {
    publish_reported_ = true;
    std::vector<BucketId> order = mine;  // updates end in the order of batches
    for (size_t i = 1; i < order.size(); ++i) {
      std::swap(order[i], order[simulation_.chance.Pick(0, static_cast<int64_t>(i))]);
    }
    for (BucketId bucket : order) {
      ReportReady(RailOperation::kPublish, bucket, publishing_, AttemptKind::kStep);
    }
  }
  if (published_.size() == mine.size()) publishing_ = Attempt(0);
}

}  // namespace dmuond::scheduler::testing
