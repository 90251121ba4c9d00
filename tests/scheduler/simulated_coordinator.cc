#include "tests/scheduler/simulated_coordinator.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "tests/scheduler/simulated_trainer.h"

namespace dmuond::scheduler::testing {
namespace {

using Kind = v1::CoordinatorMessage::MessageCase;

constexpr std::chrono::milliseconds kStepTimeout{2'000};

// What belongs to one attempt is repeated now and then, as after a reconnect.
int32_t ReplayPercent(const v1::CoordinatorMessage& message) {
  switch (message.message_case()) {
    case Kind::kOpen:
    case Kind::kGoes:
    case Kind::kDecision:
    case Kind::kSubmitted:
    case Kind::kExpel:
    case Kind::kGatherOverdue:
    case Kind::kRepublish:
      return 5;
    default:
      return 0;
  }
}

}  // namespace

GroupJobOptions SimulatedCoordinator::Options() const {
  const SimulationOptions& options = simulation_.options;
  GroupJobOptions made;
  made.nodes = simulation_.world.inputs.nodes;
  made.lanes_per_node = simulation_.world.inputs.lanes_per_node;
  made.step = {.step_timeout = kStepTimeout,
               .session_linger = options.lingers ? options.linger : std::chrono::milliseconds(0),
               .skips_max = 50};
  made.snapshots = options.snapshot_every > 0;
  made.snapshot = {options.snapshot_every, std::chrono::milliseconds(0)};
  return made;
}

Connection& SimulatedCoordinator::ConnectNext() {
  Connection& connection = simulation_.connections.emplace_back();
  connection.node = NodeRank(static_cast<int32_t>(connections_.size()));
  connections_.push_back(&connection);
  return connection;
}

void SimulatedCoordinator::BeginAttached() {
  job_.emplace(Options());
  simulation_.instant = true;
  for (size_t node = 0; node < nodes(); ++node) ConnectNext();
  Perform(job_->OnFormed(simulation_.Now(), newest_epoch_));
  for (SimulatedMember* member : simulation_.members) {
    member->Formed(*connections_[member->node().value()], newest_epoch_);
  }
  for (SimulatedMember* member : simulation_.members) {
    for (const TrainerRank rank : member->ranks()) member->BeginRegistered(rank);
  }
  for (SimulatedMember* member : simulation_.members) {
    for (const TrainerRank rank : member->ranks()) member->BeginAttached(rank);
  }
  simulation_.instant = false;
}

// ---- what it says, and has done ----

void SimulatedCoordinator::Perform(GroupActions actions, bool again) {
  newest_epoch_ = std::max(newest_epoch_, job_->epoch());
  for (Addressed& addressed : actions.messages) {
    Check(addressed, again);
    const std::optional<int32_t> to = addressed.node;
    const auto message =
        std::make_shared<const v1::CoordinatorMessage>(std::move(addressed.message));
    // In this very process; and what only people read.
    if (message->has_find_snapshot() || message->has_write_manifest()) {
      simulation_.members[0]->Hear(message);
      continue;
    }
    if (message->has_waiting()) continue;
    if (connections_.empty()) continue;  // nobody has joined
    for (size_t node = 0; node < nodes(); ++node) {
      if (to.has_value() && static_cast<size_t>(*to) != node) continue;
      if (simulation_.instant) {
        simulation_.members[node]->Hear(message);
        continue;
      }
      simulation_.network.Down(
          *connections_[node], ReplayPercent(*message),
          [message, member = simulation_.members[node]] { member->Hear(message); });
    }
  }
  if (actions.plan.has_value()) HaveMade(*actions.plan);
  simulation_.At(job_->due(), [this, boot = boot_] {
    if (boot_ == boot) Perform(job_->OnDue(simulation_.Now()));
  });
}

void SimulatedCoordinator::HaveMade(const PlanOrder& order) {
  if (simulation_.instant) {
    return Perform(job_->OnPlanMade(simulation_.Now(), order.number, simulation_.world.planned));
  }
  Chance& chance = simulation_.chance;
  // What has been planned once can be planned again.
  const bool fails = order.inputs->restore_step() == 0 && chance.Of(5);
  const Microseconds takes = chance.Pick(0, (chance.Of(80) ? 20 : 500) * kMillisecond);
  simulation_.time.After(takes, [this, fails, number = order.number, boot = boot_] {
    if (boot_ != boot) return;
    absl::StatusOr<PlannedJob> made = simulation_.world.planned;
    if (fails) made = absl::ResourceExhaustedError("no plan fits");
    Perform(job_->OnPlanMade(simulation_.Now(), number, std::move(made)));
  });
}

void SimulatedCoordinator::Check(const Addressed& addressed, bool again) {
  StepInvariants& invariants = simulation_.invariants;
  const v1::CoordinatorMessage& message = addressed.message;
  switch (message.message_case()) {
    case Kind::kOpen:
      return invariants.Opened(FromProto(message.open()));
    case Kind::kGoes:
      return invariants.Went(addressed.node, message.goes());
    case Kind::kSubmitted:
      return invariants.ToldBegun({NodeRank(*addressed.node), *FromProto(message.submitted())});
    case Kind::kRepublish:
      return invariants.Republished(
          {Attempt(message.republish().attempt()), StepId(message.republish().step())});
    case Kind::kDecision:
      return CheckDecision(message.decision(), again);
    case Kind::kSave: {
      const SnapshotId id{Attempt(message.save().attempt()), StepId(message.save().step())};
      if (saved_ != id) invariants.SaveBegins(id);  // else it is said again
      saved_ = id;
      return;
    }
    case Kind::kPlan:
      simulation_.Trace("planned from registrations");
      if (message.plan().restore_step() == 0) return invariants.BeganAnew();
      return CheckWayBack(message.plan().restore_step(), /*asked=*/false);
    case Kind::kRollBack:
      return CheckWayBack(message.roll_back().plan().restore_step(), message.roll_back().asked());
    case Kind::kReform:
      simulation_.Trace("reform, epoch ", message.reform().epoch());
      ++simulation_.counts.reformations;
      return;
    case Kind::kRefused:
      simulation_.Trace("the registration is refused: ", message.refused().message());
      if (message.refused().has_session()) {
        simulation_.Fail(absl::StrCat("a session is refused: ", message.refused().message()));
      }
      return;
    case Kind::kSnapshotDone:
      if (!addressed.node.has_value() && !message.snapshot_done().error().empty()) {
        ++simulation_.counts.failed_snapshots;
      }
      return;
    case Kind::kJobEnded:
      return CheckEnd(message.job_ended());
    default:
      return;
  }
}

void SimulatedCoordinator::CheckDecision(const v1::Decision& decision, bool again) {
  simulation_.Trace("decided: attempt ", decision.attempt() >> 32, ".", decision.attempt() & 0xffff,
                    " step ", decision.step(), " verdict ",
                    static_cast<int32_t>(decision.verdict()), " ", decision.outcome().detail());
  simulation_.invariants.Decided(*FromProto(decision), again,
                                 !simulation_.FateOf(StepId(decision.step()), "nan", 15));
}

void SimulatedCoordinator::CheckWayBack(int64_t to_step, bool asked) {
  simulation_.Trace("back to step ", to_step, ", epoch ", job_->epoch());
  const std::optional<SnapshotId> to = simulation_.SnapshotOf(StepId(to_step));
  if (!to) return simulation_.Fail("the job goes back to a snapshot that is not there");
  simulation_.invariants.RolledBack(*to, GroupEpoch(job_->epoch()), asked);
}

void SimulatedCoordinator::CheckEnd(const v1::JobEnded& ended) {
  simulation_.Trace("the job ends: ", ended.why());
  if (ended.reason().empty()) return;
  simulation_.disturbed = true;
  if (ended.reason() == "STATE_LOST") simulation_.invariants.StateLost(found_snapshot_);
}

// ---- what it hears ----

void SimulatedCoordinator::Hear(NodeRank from, const v1::MemberMessage& message) {
  if (message.has_newest_snapshot()) found_snapshot_ = message.newest_snapshot().step() > 0;
  const v1::PlanReady& ready = message.plan_ready();
  if (!ready.error().empty() && ready.epoch() == job_->epoch()) simulation_.disturbed = true;
  for (const v1::RailReady& ready_to_cross : message.reports().ready()) {
    simulation_.invariants.ToldReady(from, *FromProto(ready_to_cross));
  }
  const bool lost = job_->lost();
  Perform(job_->OnMessage(simulation_.Now(), from.value(), message), message.has_plan_ready());
  if (!lost && job_->lost()) simulation_.disturbed = true;
}

void SimulatedCoordinator::Tick() {
  const bool lost = job_->lost();
  Perform(job_->OnTick(simulation_.Now()));
  if (!lost && job_->lost()) GaveUpAPlace();
}

// Places wait for longer than anybody here needs to come back to one.
void SimulatedCoordinator::GaveUpAPlace() {
  const auto& trainers = simulation_.trainers;
  const bool will_not_come = std::any_of(
      trainers.begin(), trainers.end(),
      [](const SimulatedTrainer* trainer) { return trainer->Rests() && !trainer->finished(); });
  if (!will_not_come) simulation_.Fail("a place was given up, and its replacement asks for it");
  simulation_.disturbed = true;
}

// ---- the group ----

void SimulatedCoordinator::Die() {
  simulation_.Trace("the coordinator dies");
  formed_ = false;
  ++boot_;
  job_.emplace(Options());
  for (Connection* connection : connections_) connection->ended_at_coordinator = true;
  Break("the coordinator died");
}

void SimulatedCoordinator::Break(const std::string& why) {
  simulation_.Trace("the group breaks: ", why);
  if (formed_) {
    const bool lost = job_->lost();
    Perform(job_->OnMemberGone(simulation_.Now(), static_cast<int32_t>(nodes()) - 1, why));
    if (!lost && job_->lost()) simulation_.disturbed = true;
  }
  formed_ = false;
  for (size_t node = 0; node < connections_.size(); ++node) {
    Connection* connection = connections_[node];
    connection->ended_at_coordinator = true;
    SimulatedMember* member = simulation_.members[node];
    simulation_.time.After(simulation_.chance.Pick(0, 20 * kMillisecond), [connection, member] {
      if (std::exchange(connection->ended_at_member, true)) return;
      if (member->alive() && member->connected()) member->Broken();
    });
  }
  connections_.clear();
  if (!std::exchange(forming_, true)) {
    simulation_.time.After(simulation_.chance.Pick(20, 400) * kMillisecond, [this] { Form(); });
  }
}

// When every daemon is there, and has noticed that the last group is no more.
void SimulatedCoordinator::Form() {
  for (const SimulatedMember* member : simulation_.members) {
    if (member->alive() && !member->connected()) continue;
    simulation_.time.After(simulation_.chance.Pick(10, 100) * kMillisecond, [this] { Form(); });
    return;
  }
  forming_ = false;
  formed_ = true;
  ++newest_epoch_;
  simulation_.Trace("the group forms, epoch ", newest_epoch_);
  Perform(job_->OnFormed(simulation_.Now(), newest_epoch_));
  for (SimulatedMember* member : simulation_.members) {
    Connection& connection = ConnectNext();
    simulation_.network.Down(connection, 0, [member, &connection, epoch = newest_epoch_] {
      member->Formed(connection, epoch);
    });
  }
}

// ---- the end ----

void SimulatedCoordinator::CheckTheEnd() const {
  if (job_->saves()) simulation_.Fail("a snapshot is being written for ever");
}

bool SimulatedCoordinator::Settled() const {
  if (!formed_ || !job_->Formed()) return false;
  // One that registers may wait for ranks.
  const std::optional<GroupJob::Phase> phase = job_->phase();
  return !phase || job_->lost() || phase == GroupJob::Phase::kRegistering ||
         phase == GroupJob::Phase::kRunning;
}

std::string SimulatedCoordinator::Describe() const {
  std::string text = absl::StrCat("epoch ", job_->epoch(), formed_ ? " formed" : " broken");
  if (!job_->phase()) return text + " no job";
  absl::StrAppend(&text, " phase ", static_cast<int32_t>(*job_->phase()),
                  job_->lost() ? " lost" : "");
  return text;
}

}  // namespace dmuond::scheduler::testing
