#include "tests/scheduler/simulated_coordinator.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/refusals.h"
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

void SimulatedCoordinator::Begin() {
  const SimulationOptions& options = group_.options;
  GroupJobOptions made;
  made.nodes = group_.nodes();
  made.lanes_per_node = group_.jobs.front()->world.inputs.lanes_per_node;
  made.step = {.step_timeout = kStepTimeout,
               .session_linger = options.lingers ? options.linger : std::chrono::milliseconds(0),
               .skips_max = 50};
  made.snapshots = options.snapshot_every > 0;
  made.snapshot = {options.snapshot_every, std::chrono::milliseconds(0)};
  machines_.clear();
  for (const Simulation* job : group_.jobs) machines_.emplace(job, made);
}

Connection& SimulatedCoordinator::ConnectNext() {
  Connection& connection = group_.connections.emplace_back();
  connection.node = NodeRank(static_cast<int32_t>(connections_.size()));
  connections_.push_back(&connection);
  return connection;
}

void SimulatedCoordinator::BeginAttached() {
  Begin();
  group_.instant = true;
  for (int32_t node = 0; node < group_.nodes(); ++node) ConnectNext();
  for (Simulation* job : group_.jobs) Perform(*job, Of(*job).OnFormed(Now(), newest_epoch_));
  for (int32_t node = 0; node < group_.nodes(); ++node) {
    for (SimulatedMember* member : group_.MembersOf(NodeRank(node))) {
      member->Formed(*connections_[node], newest_epoch_);
    }
  }
  for (Simulation* job : group_.jobs) {
    for (SimulatedMember* member : job->members) {
      for (const TrainerRank rank : member->ranks()) member->BeginRegistered(rank);
    }
    for (SimulatedMember* member : job->members) {
      for (const TrainerRank rank : member->ranks()) member->BeginAttached(rank);
    }
  }
  group_.instant = false;
}

// ---- what it says, and has done ----

void SimulatedCoordinator::Perform(Simulation& job, GroupActions actions, bool again) {
  newest_epoch_ = std::max(newest_epoch_, Of(job).epoch());
  for (Addressed& addressed : actions.messages) {
    Check(job, addressed, again);
    Send(job, std::move(addressed));
  }
  for (const PlanOrder& order : actions.plans) HaveMade(job, order);
  job.At(Of(job).due(), [this, &job, boot = boot_] {
    if (boot_ == boot) Perform(job, Of(job).OnDue(Now()));
  });
}

void SimulatedCoordinator::Send(Simulation& job, Addressed addressed) {
  const auto message = std::make_shared<const v1::CoordinatorMessage>(std::move(addressed.message));
  // In this very process; and what only people read.
  if (message->has_find_snapshot() || message->has_write_manifest() || message->has_discard()) {
    return job.members[0]->Hear(message);
  }
  if (message->has_waiting()) return;
  if (connections_.empty()) return;  // nobody has joined
  for (SimulatedMember* member : job.members) {
    if (addressed.node.value_or(member->node().value()) != member->node().value()) continue;
    if (group_.instant) {
      member->Hear(message);
      continue;
    }
    group_.network.Down(*connections_[member->node().value()], ReplayPercent(*message),
                        [message, member] { member->Hear(message); });
  }
}

void SimulatedCoordinator::HaveMade(Simulation& job, const PlanOrder& order) {
  const PlannedJob& planned = job.world.planned;
  if (group_.instant) return Perform(job, Of(job).OnPlanMade(Now(), order, planned));
  Chance& chance = group_.chance;
  // What has been planned once can be planned again.
  const bool fails = !order.inputs->has_restore() && chance.Of(5);
  const Microseconds takes = chance.Pick(0, (chance.Of(80) ? 20 : 500) * kMillisecond);
  group_.time.After(takes, [this, fails, order, &job, &planned, boot = boot_] {
    if (boot_ != boot) return;
    absl::StatusOr<PlannedJob> made = planned;
    if (fails) made = absl::ResourceExhaustedError("no plan fits");
    Perform(job, Of(job).OnPlanMade(Now(), order, std::move(made)));
  });
}

void SimulatedCoordinator::Check(Simulation& job, const Addressed& addressed, bool again) {
  StepInvariants& invariants = job.invariants;
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
      return CheckDecision(job, message.decision(), again);
    case Kind::kSave: {
      const SnapshotId id{Attempt(message.save().attempt()), StepId(message.save().step())};
      std::optional<SnapshotId>& saved = seen_[&job].saved;
      if (saved != id) invariants.SaveBegins(id);  // else it is said again
      saved = id;
      return;
    }
    case Kind::kPlan:
      job.Trace("planned from registrations");
      if (!message.plan().has_restore()) return invariants.BeganAnew();
      return CheckWayBack(job, FromProto(message.plan().restore()), /*asked=*/false);
    case Kind::kRollBack:
      return CheckWayBack(job, FromProto(message.roll_back().plan().restore()),
                          message.roll_back().asked());
    case Kind::kReform:
      job.Trace("reform, epoch ", message.reform().epoch());
      ++job.counts.reformations;
      return;
    case Kind::kParked:
      job.Trace("the job is parked: ", message.parked().why());
      ++job.counts.parked;
      return;
    case Kind::kRefused:
      job.Trace("the registration is refused: ", message.refused().message());
      // The job of an older launch has yet to end, or what it was saving as it ended has come to be
      // a snapshot while the ranks of the next one looked for it.
      if (message.refused().has_session() &&
          !(job.launches > 0 &&
            std::set<std::string>{"JOB_IN_USE", "GROUP_NOT_READY", "SNAPSHOTS_DIFFER"}.contains(
                message.refused().reason()))) {
        job.Fail(absl::StrCat("a session is refused: ", message.refused().message()));
      }
      return;
    case Kind::kSnapshotDone:
      if (!addressed.node.has_value() && !message.snapshot_done().error().empty()) {
        ++job.counts.failed_snapshots;
      }
      return;
    case Kind::kJobEnded:
      return CheckEnd(job, message.job_ended());
    default:
      return;
  }
}

void SimulatedCoordinator::CheckDecision(Simulation& job, const v1::Decision& decision,
                                         bool again) {
  job.Trace("decided: attempt ", decision.attempt() >> 32, ".", decision.attempt() & 0xffff,
            " step ", decision.step(), " verdict ", static_cast<int32_t>(decision.verdict()), " ",
            decision.outcome().detail());
  const StepId step(decision.step());
  const bool finite = !job.FateOf(step, "nan", 15) && !job.FateOf(step, "own nan", 5);
  job.invariants.Decided(*FromProto(decision), again, finite);
}

void SimulatedCoordinator::CheckWayBack(Simulation& job, const SnapshotId& to, bool asked) {
  const uint32_t epoch = Of(job).epoch();
  job.Trace("back to step ", to.step.value(), ", epoch ", epoch);
  if (!job.disk.contains(to)) return job.Fail("the job goes back to a snapshot that is not there");
  job.invariants.RolledBack(to, GroupEpoch(epoch), asked);
}

void SimulatedCoordinator::CheckEnd(Simulation& job, const v1::JobEnded& ended) {
  job.Trace("the job ends: ", ended.why());
  if (ended.reason().empty()) return;
  if (ended.reason() == kJobEnded) {
    ++job.counts.ended_jobs;
    // Who has discarded it is started already.
    if (ended.why() != kEndedBySomebody) return;
    return group_.time.After(group_.chance.Pick(0, 300 * kMillisecond),
                             [this, &job] { StartAnew(job, /*discards=*/false); });
  }
  job.disturbed = true;
  if (ended.reason() == "STATE_LOST") job.invariants.StateLost(seen_[&job].found_snapshot);
}

// ---- what it hears ----

bool SimulatedCoordinator::Lost(const Simulation& job) const { return Of(job).lost(); }

bool SimulatedCoordinator::Knows(const Simulation& job) const {
  return !formed_ || !Of(job).Formed() || Of(job).busy();
}

bool SimulatedCoordinator::Has(const Simulation& job) const {
  const auto phase = Of(job).phase();
  return phase.has_value() && phase != GroupJob::Phase::kRegistering;
}

bool SimulatedCoordinator::Observe(Simulation& job, const std::function<void()>& event) {
  const bool was_lost = Lost(job);
  event();
  return !was_lost && Lost(job);
}

void SimulatedCoordinator::Hear(NodeRank from, Simulation& job, const v1::MemberMessage& message) {
  const bool of_node = message.has_member_state() || message.has_leaving();
  if (message.job() != job.name() && !(of_node && message.job().empty())) {
    job.Fail(absl::StrCat("a member's message is of another job: '", message.job(), "'"));
  }
  if (message.has_newest_snapshot()) {
    seen_[&job].found_snapshot = message.newest_snapshot().has_newest();
  }
  const v1::PlanReady& ready = message.plan_ready();
  if (!ready.error().empty() && ready.epoch() == Of(job).epoch()) job.disturbed = true;
  for (const v1::RailReady& ready_to_cross : message.reports().ready()) {
    job.invariants.ToldReady(from, *FromProto(ready_to_cross));
  }
  const bool is_lost = Observe(job, [&] {
    Perform(job, Of(job).OnMessage(Now(), from.value(), message), message.has_plan_ready());
  });
  if (is_lost) job.disturbed = true;
}

void SimulatedCoordinator::Tick() {
  for (Simulation* job : group_.jobs) {
    const bool parked = Of(*job).phase() == GroupJob::Phase::kParked;
    if (!Observe(*job, [&] { Perform(*job, Of(*job).OnTick(Now())); })) continue;
    if (!parked) {
      GaveUpAPlace(*job);
    } else if (job->disk.empty()) {
      job->Fail("a parked job is given up whose state is in memory alone");
    } else {
      job->disturbed = true;
    }
  }
}

// Places wait for longer than anybody here needs to come back to one.
void SimulatedCoordinator::GaveUpAPlace(Simulation& job) {
  const bool will_not_come =
      std::any_of(job.trainers.begin(), job.trainers.end(), [](const SimulatedTrainer* trainer) {
        return (trainer->Rests() && !trainer->finished()) || trainer->comes_late();
      });
  if (!will_not_come) job.Fail("a place was given up, and its replacement asks for it");
  job.disturbed = true;
}

void SimulatedCoordinator::StartAnew(Simulation& job, bool discards) {
  ++job.launches;
  job.disturbed = false;  // whoever was not to come back does now
  for (SimulatedTrainer* trainer : job.trainers) trainer->StartAnew(discards);
}

// ---- the group ----

void SimulatedCoordinator::Die() {
  group_.jobs.front()->Trace("the coordinator dies");
  formed_ = false;
  ++boot_;
  Begin();
  for (Connection* connection : connections_) connection->ended_at_coordinator = true;
  Break("the coordinator died");
}

void SimulatedCoordinator::Break(const std::string& why) {
  group_.jobs.front()->Trace("the group breaks: ", why);
  for (Simulation* job : group_.jobs) {
    if (!formed_) break;
    const bool is_lost = Observe(
        *job, [&] { Perform(*job, Of(*job).OnMemberGone(Now(), group_.nodes() - 1, why)); });
    if (is_lost) job->disturbed = true;
  }
  formed_ = false;
  for (size_t node = 0; node < connections_.size(); ++node) {
    Connection* connection = connections_[node];
    connection->ended_at_coordinator = true;
    group_.time.After(group_.chance.Pick(0, 20 * kMillisecond), [this, connection] {
      if (std::exchange(connection->ended_at_member, true)) return;
      for (SimulatedMember* member : group_.MembersOf(connection->node)) {
        if (member->alive() && member->connected()) member->Broken();
      }
    });
  }
  connections_.clear();
  if (!std::exchange(forming_, true)) {
    group_.time.After(group_.chance.Pick(20, 400) * kMillisecond, [this] { Form(); });
  }
}

// When every daemon is there, and has noticed that the last group is no more.
void SimulatedCoordinator::Form() {
  for (const SimulatedMember* member : group_.jobs.front()->members) {
    if (member->alive() && !member->connected()) continue;
    group_.time.After(group_.chance.Pick(10, 100) * kMillisecond, [this] { Form(); });
    return;
  }
  forming_ = false;
  formed_ = true;
  ++newest_epoch_;
  group_.jobs.front()->Trace("the group forms, epoch ", newest_epoch_);
  const uint32_t epoch = newest_epoch_;
  for (Simulation* job : group_.jobs) Perform(*job, Of(*job).OnFormed(Now(), epoch));
  for (int32_t node = 0; node < group_.nodes(); ++node) {
    Connection& connection = ConnectNext();
    group_.network.Down(connection, 0, [this, &connection, epoch] {
      for (SimulatedMember* member : group_.MembersOf(connection.node)) {
        member->Formed(connection, epoch);
      }
    });
  }
}

// ---- the end ----

void SimulatedCoordinator::CheckTheEnd(Simulation& job) const {
  if (Of(job).saves()) job.Fail("a snapshot is being written for ever");
}

bool SimulatedCoordinator::Settled(const Simulation& job) const {
  if (!formed_ || !Of(job).Formed()) return false;
  // One that registers may wait for ranks.
  return !Has(job) || Lost(job) || Of(job).phase() == GroupJob::Phase::kRunning;
}

std::string SimulatedCoordinator::Describe() const {
  std::string text = absl::StrCat("epoch ", newest_epoch_, formed_ ? " formed" : " broken");
  for (const Simulation* job : group_.jobs) {
    absl::StrAppend(&text, "; ", job->name());
    const GroupJob& machine = Of(*job);
    if (!machine.phase()) {
      text += " is not there";
      continue;
    }
    absl::StrAppend(&text, " phase ", static_cast<int32_t>(*machine.phase()),
                    machine.lost() ? " lost" : "");
  }
  return text;
}

}  // namespace dmuond::scheduler::testing
