#include "tests/scheduler/simulated_lane.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulated_trainer.h"

namespace dmuond::scheduler::testing {

void SimulatedLane::Renew(uint32_t epoch) {
  ++generation_;
  epoch_ = epoch;
  dead_ = hangs_ = connects_ = false;
  armed_ = {};
  submitted_.clear();
  begun_.clear();
  reported_.clear();
  gone_.clear();
  gathered_ = false;
  publishing_ = published_attempt_ = Attempt(0);
  published_.clear();
  publish_reported_ = false;
  own_memory_.clear();
}

void SimulatedLane::Begin(Microseconds after, const std::string& bits) {
  const auto configured = [this, bits, generation = generation_] {
    if (dead_ || hangs_ || generation_ != generation) return;
    v1::LaneReport told;
    told.mutable_bits()->set_code(bits);
    Report(std::move(told));
    if (simulation_.world.inputs.nodes == 1) return SayReady();
    connects_ = true;
    v1::LaneReport report;
    v1::Rendezvous& rendezvous = *report.mutable_rendezvous();
    rendezvous.set_rail(rail_.value());
    rendezvous.set_node(node_.value());
    rendezvous.set_epoch(epoch_);
    rendezvous.set_blob(absl::StrCat(generation));
    Report(std::move(report));
  };
  if (simulation_.instant) return configured();
  simulation_.time.After(after, configured);
}

void SimulatedLane::SayReady() {
  v1::LaneReport report;
  report.mutable_ready()->set_device("simulated");
  Report(std::move(report));
}

void SimulatedLane::Die() {
  dead_ = true;
  publishing_ = Attempt(0);
  simulation_.network.Send(to_member_, simulation_.chance.Pick(0, 300), 0,
                           [this, generation = generation_] {
                             if (generation_ == generation) member_.LaneGone(rail_);
                           });
}

void SimulatedLane::End() {
  ++generation_;
  dead_ = true;
  hangs_ = false;
  publishing_ = Attempt(0);
}

void SimulatedLane::ForgetMemory() {
  kept_ = Attempt(0);
  last_applied_ = Attempt(0);
  applied_ = 0;
}

// ---- what its daemon says, and hears ----

void SimulatedLane::Told(const v1::LaneCommand& command) {
  if (simulation_.instant) return Hear(command);
  simulation_.group.pings += command.has_ping() ? 1 : 0;
  simulation_.network.Send(from_member_, simulation_.chance.Pick(0, 100), 0,
                           [this, generation = generation_, command] {
                             simulation_.group.pings -= command.has_ping() ? 1 : 0;
                             if (generation_ == generation) Hear(command);
                           });
}

void SimulatedLane::Report(v1::LaneReport report) {
  if (simulation_.instant) return member_.Reported(rail_, report);
  simulation_.group.pings += report.has_pong() ? 1 : 0;
  simulation_.network.Send(to_member_, simulation_.chance.Pick(0, 300), 0,
                           [this, generation = generation_, report = std::move(report)] {
                             simulation_.group.pings -= report.has_pong() ? 1 : 0;
                             if (generation_ == generation) member_.Reported(rail_, report);
                           });
}

void SimulatedLane::Hear(const v1::LaneCommand& command) {
  using Kind = v1::LaneCommand::CommandCase;
  if (dead_ || hangs_) return;
  ++progress_;
  v1::LaneReport report;
  switch (command.command_case()) {
    case Kind::kRendezvous:
      if (!std::exchange(connects_, false)) {
        return simulation_.Fail("a lane meets an unexpected rendezvous");
      }
      if (command.rendezvous().blobs(node_.value()) != absl::StrCat(generation_)) {
        return simulation_.Fail("a lane is to connect with its own predecessor's peers");
      }
      return SayReady();
    case Kind::kArm:
      armed_ = FromProto(command.arm());
      reported_.clear();
      gone_.clear();
      gathered_ = false;
      return Progress();
    case Kind::kSubmitted: {
      const Submission submission = *FromProto(command.submitted());
      if (member_.ranks().empty()) {
        begun_.emplace(submission.attempt, submission.kind);
      } else {
        submitted_[submission.attempt][submission.rank] = submission;
      }
      return Progress();
    }
    case Kind::kDecision:
      return Decided(*FromProto(command.decision()));
    case Kind::kGoes:
      for (const v1::Go& go : command.goes().goes()) Went(*FromProto(go));
      return Progress();
    case Kind::kRepublish:
      // To one rank alone: its weights, and nothing that others see.
      if (!command.republish().ranks().empty()) return;
      return Publish(Attempt(command.republish().attempt()));
    case Kind::kAttach:
      if (command.attach().arenas_size() > 0) {
        own_memory_[command.attach().rank()] = command.attach().incarnation();
      }
      report.mutable_attached()->set_rank(command.attach().rank());
      report.mutable_attached()->set_incarnation(command.attach().incarnation());
      return Report(std::move(report));
    case Kind::kDetach: {
      const auto mapped = own_memory_.find(command.detach().rank());
      if (mapped != own_memory_.end() && mapped->second == command.detach().incarnation()) {
        own_memory_.erase(mapped);
      }
      report.mutable_detached()->set_rank(command.detach().rank());
      report.mutable_detached()->set_incarnation(command.detach().incarnation());
      return Report(std::move(report));
    }
    case Kind::kSnapshot:
      report.mutable_copied()->set_attempt(command.snapshot().attempt());
      report.mutable_copied()->add_updates(applied_);
      report.mutable_copied()->set_complete(true);
      return Report(std::move(report));
    case Kind::kLoadState:
      applied_ = command.load_state().updates(0);
      report.mutable_state_loaded();
      return Report(std::move(report));
    case Kind::kPing:
      report.mutable_pong()->set_number(command.ping().number());
      report.mutable_pong()->set_progress(progress_);
      report.mutable_pong()->set_awaits_rail(connects_ || publishing() ||
                                             armed_.attempt.value() != 0);
      return Report(std::move(report));
    default:
      return;
  }
}

void SimulatedLane::Decided(const Decision& decision) {
  if (decision.verdict == Verdict::kCommit) {
    Apply(decision);
    // A commit of an older epoch is published with the state, anew; one that is known is told
    // again.
    if (EpochOf(decision.attempt).value() == epoch_ && publishing_ < decision.attempt &&
        published_attempt_ < decision.attempt) {
      if (publishing()) simulation_.Fail("committed while a lane was still publishing");
      publishing_ = decision.attempt;
      published_.clear();
      publish_reported_ = false;
    }
  }
  if (decision.verdict == Verdict::kSkip && published_attempt_ < decision.attempt) {
    published_attempt_ = decision.attempt;  // the same weights
    ReportPublished();
  }
  if (armed_.attempt <= decision.attempt) armed_ = {};
  Progress();
}

// A commit, once, from the gradients that lie gathered: in the lane's own life or its successor's.
void SimulatedLane::Apply(const Decision& decision) {
  if (last_applied_ >= decision.attempt) return;
  if (kept_ != decision.attempt) simulation_.Fail("applied what was not gathered");
  last_applied_ = decision.attempt;
  applied_ = AfterApplying(applied_, decision.attempt);
  if (EpochOf(decision.attempt).value() != epoch_) ++simulation_.counts.redone;
}

void SimulatedLane::Went(const Go& go) {
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
}

void SimulatedLane::Publish(Attempt attempt) {
  if (publishing_ >= attempt || published_attempt_ >= attempt) return;  // told again
  if (publishing()) simulation_.Fail("published anew while a lane was still publishing");
  publishing_ = attempt;
  published_.clear();
  publish_reported_ = false;
  Progress();
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
  v1::LaneReport report;
  ToProto(ready, *report.mutable_rail_ready());
  Report(std::move(report));
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
  v1::LaneReport report;
  report.mutable_gathered()->set_attempt(attempt.value());
  std::vector<UnitNorm> norms;
  for (const Unit& unit : world.plan.units) {
    if (step && unit.owner == id()) norms.push_back({unit.id, 0, {sum}, unit.first_element});
  }
  *report.mutable_gathered()->mutable_norms() = ToProto(norms);
  Report(std::move(report));
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
  if (published_.size() < mine.size()) return;
  published_attempt_ = std::exchange(publishing_, Attempt(0));
  ReportPublished();
}

void SimulatedLane::ReportPublished() {
  member_.OnPublished();
  v1::LaneReport report;
  report.mutable_published()->set_attempt(published_attempt_.value());
  Report(std::move(report));
}

}  // namespace dmuond::scheduler::testing
