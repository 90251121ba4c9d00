#include "tests/scheduler/step_simulator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/job/impossible.h"
#include "tests/scheduler/schedules.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr Microseconds kGivesUpAfter = 600'000 * kMillisecond;

// Of the simulation that runs: a machine that is told what its state cannot have fails it.
StepInvariants* running = nullptr;

}  // namespace

StepSimulator::StepSimulator(const std::vector<const SimulatedWorld*>& worlds, uint64_t seed,
                             bool traced)
    : group_(seed), coordinator_(group_) {
  group_.traced = traced;
  group_.coordinator = &coordinator_;
  for (const SimulatedWorld* world : worlds) {
    Simulation& job = jobs_.emplace_back(group_, *world);
    group_.jobs.push_back(&job);
    for (int32_t node = 0; node < world->inputs.nodes; ++node) {
      std::vector<TrainerRank> ranks;
      for (const scheduler::Trainer& trainer : world->inputs.layout.trainers) {
        if (trainer.node.value() == node) ranks.push_back(trainer.rank);
      }
      job.members.push_back(&members_.emplace_back(job, NodeRank(node), std::move(ranks)));
    }
    for (const scheduler::Trainer& trainer : world->inputs.layout.trainers) {
      job.trainers.push_back(
          &trainers_.emplace_back(job, trainer.rank, *job.members[trainer.node.value()]));
    }
  }
}

// ---- faults ----

void StepSimulator::Later(int64_t until_ms, Event fault) {
  ++faults_to_come_;
  group_.time.After(group_.chance.Pick(0, until_ms * kMillisecond),
                    [this, fault = std::move(fault)] {
                      --faults_to_come_;
                      fault();
                    });
}

void StepSimulator::PlanTrainerFaults(Simulation& job, int64_t until_ms) {
  Chance& chance = group_.chance;
  const SimulationOptions& options = group_.options;
  if (chance.Of(10)) {
    job.disturbed = true;
    job.trainers[chance.Pick(0, static_cast<int64_t>(job.trainers.size()) - 1)]->HangAt(
        StepId(chance.Pick(0, options.last_step.value() - 1)));
  }
  for (SimulatedTrainer* trainer : job.trainers) {
    trainer->SetReplaced(options.lingers && chance.Of(70));
    if (!options.lingers || !chance.Of(15)) continue;
    const int64_t deaths = chance.Pick(1, 2);
    for (int64_t i = 0; i < deaths; ++i) {
      Later(until_ms, [trainer] { trainer->Die("it was killed"); });
    }
  }
}

void StepSimulator::PlanFaultsOf(Simulation& job) {
  Chance& chance = group_.chance;
  const auto any_member = [&] { return job.members[chance.Pick(0, group_.nodes() - 1)]; };
  while (chance.Of(15)) {
    SimulatedMember* member = any_member();
    const LaneIndex rail(static_cast<int32_t>(chance.Pick(0, job.world.inputs.lanes_per_node - 1)));
    if (chance.Of(30)) {
      Later(400, [member, rail] { member->LaneHangs(rail); });
    } else {
      Later(400, [member, rail] { member->LaneDies(rail); });
    }
  }
  if (chance.Of(5)) {
    SimulatedMember* member = any_member();
    Later(400, [this, member] {
      const Microseconds for_so_long = group_.chance.Pick(1, 10'000) * kMillisecond;
      group_.lanes_fail_until = std::max(group_.lanes_fail_until, group_.time.now() + for_so_long);
      member->LaneDies(LaneIndex(0));
    });
  }
  if (group_.options.snapshot_every > 0 && chance.Of(40)) {
    SimulatedMember* member = any_member();
    Later(400, [this, member] { member->DiskHangs(group_.chance.Pick(1, 300) * kMillisecond); });
  }
}

void StepSimulator::PlanFaultsOfTheGroup() {
  Chance& chance = group_.chance;
  do {
    const NodeRank node(static_cast<int32_t>(chance.Pick(0, group_.nodes() - 1)));
    const int64_t what = chance.Pick(0, 99);
    if (what < 40 && group_.nodes() > 1) {
      Later(600, [this, node] { CutLink(node); });
    } else if (what < 70) {
      Later(600, [this, node] { KillDaemon(node); });
    } else if (what < 90) {
      Later(600, [this, node] { StopDaemon(node); });
    } else {
      const std::vector<SimulatedMember*> members = group_.MembersOf(node);
      SimulatedMember* member = members[chance.Pick(0, static_cast<int64_t>(members.size()) - 1)];
      Later(600, [member] { member->GoBackToNewest(); });
    }
  } while (chance.Of(40));
}

void StepSimulator::PlanFaults() {
  Chance& chance = group_.chance;
  SimulationOptions& options = group_.options;
  if (HandOversFromEnvironment()) {
    Chance& when = group_.hand_overs;
    options.hand_overs_begin = when.Pick(0, when.Of(60) ? 200 : 5'000) * kMillisecond;
    options.hand_overs_end = options.hand_overs_begin + 300 * kMillisecond;
  }
  options.lingers = chance.Of(85);
  options.last_step = StepId(chance.Pick(1, 3));
  options.snapshot_every = chance.Of(60) ? chance.Pick(1, 2) : 0;
  if (!order_.has_value() && options.lingers && chance.Of(15)) {
    Plan(chance.Of(50) ? Order::kEndJob : Order::kDiscard, chance.Pick(0, 1'500));
  }
  const bool group_is_hurt = options.lingers && chance.Of(35);
  if (group_is_hurt) options.linger = std::chrono::milliseconds(20'000);
  for (Simulation& job : jobs_) {
    // Long enough to befall who comes back from what befalls the group.
    PlanTrainerFaults(job, group_is_hurt ? 2'000 : 400);
    PlanFaultsOf(job);
  }
  if (group_is_hurt) return PlanFaultsOfTheGroup();
  // Without patience, a group that breaks is the end of its jobs.
  if (group_.nodes() > 1 && chance.Of(8))
    Later(200, [this] { coordinator_.Break("a node is gone"); });
}

// Node 0's is within its daemon.
void StepSimulator::CutLink(NodeRank node) {
  Connection* connection = coordinator_.connection(node);
  if (node.value() == 0 || connection == nullptr || connection->cut) return;
  ++group_.counts.broken_links;
  connection->cut = true;
  group_.time.After(group_.chance.Pick(0, 300 * kMillisecond), [this, node, connection] {
    if (coordinator_.connection(node) == connection) coordinator_.Break("a link was cut");
  });
}

void StepSimulator::KillDaemon(NodeRank node) {
  if (!alive(node)) return;
  ++(node.value() == 0 ? group_.counts.coordinator_deaths : group_.counts.daemon_deaths);
  RemoveDaemon(node);
}

// One that is told again goes at once.
void StepSimulator::StopDaemon(NodeRank node) {
  if (!alive(node)) return;
  if (!leaving_.insert(node).second) return RemoveDaemon(node);
  for (SimulatedMember* member : group_.MembersOf(node)) {
    member->PrepareToLeave([this, node] {
      const std::vector<SimulatedMember*> members = group_.MembersOf(node);
      if (std::all_of(members.begin(), members.end(),
                      [](const SimulatedMember* of_job) { return of_job->prepared(); })) {
        RemoveDaemon(node);
      }
    });
  }
}

void StepSimulator::RemoveDaemon(NodeRank node) {
  if (!alive(node)) return;
  leaving_.erase(node);
  Chance& chance = group_.chance;
  for (SimulatedMember* member : group_.MembersOf(node)) member->Die();
  // Nothing that is on its way to it reaches its successor, of a group that is broken neither.
  for (Connection& theirs : group_.connections) {
    if (theirs.node == node) theirs.ended_at_member = true;
  }
  if (node.value() == 0) {
    coordinator_.Die();
  } else if (Connection* connection = coordinator_.connection(node); connection != nullptr) {
    // What it has said still arrives, until its end is noticed.
    group_.time.After(chance.Pick(0, 300 * kMillisecond), [this, node, connection] {
      if (coordinator_.connection(node) == connection) coordinator_.Break("a daemon died");
    });
  }
  ++faults_to_come_;
  group_.time.After(chance.Pick(10, 1'000) * kMillisecond, [this, node] {
    --faults_to_come_;
    for (SimulatedMember* member : group_.MembersOf(node)) member->Start();
  });
}

void StepSimulator::Obey(Order order) {
  BeginTicks();  // all may have come to its end
  Simulation& job = jobs_.front();
  const NodeRank node(static_cast<int32_t>(group_.chance.Pick(0, group_.nodes() - 1)));
  switch (order) {
    case Order::kNone:
      return;
    case Order::kEndJob:
      return job.members[node.value()]->EndJob();
    case Order::kDiscard:
      return coordinator_.StartAnew(job, /*discards=*/true);
    case Order::kDrain:
      return StopDaemon(node);
    case Order::kLoad:
      return job.members[node.value()]->GoBackToNewest();
  }
}

// ---- the run ----

bool StepSimulator::AllRest(const Simulation& job) const {
  return std::all_of(job.trainers.begin(), job.trainers.end(),
                     [](const SimulatedTrainer* trainer) { return trainer->Rests(); });
}

bool StepSimulator::Rests(const Simulation& job) const {
  if (!AllRest(job) || !coordinator_.Settled(job)) return false;
  // One that is given up because its lanes die gets no others, and ends with its last session.
  return coordinator_.Lost(job) ||
         std::all_of(job.members.begin(), job.members.end(),
                     [](const SimulatedMember* member) { return member->Settled(); });
}

std::string StepSimulator::Failure() const {
  for (const Simulation& job : jobs_) {
    if (!job.invariants.failure().empty()) return job.invariants.failure();
  }
  return "";
}

std::string StepSimulator::Describe() const {
  std::string text = coordinator_.Describe();
  for (const SimulatedMember& member : members_) absl::StrAppend(&text, member.Describe());
  for (const SimulatedTrainer& trainer : trainers_) absl::StrAppend(&text, trainer.Describe());
  return text;
}

void StepSimulator::BeginTicks() {
  if (!std::exchange(ticks_, true)) group_.time.After(100 * kMillisecond, [this] { Tick(); });
}

void StepSimulator::Tick() {
  coordinator_.Tick();
  for (SimulatedMember& member : members_) member.Tick();
  // As long as anything else is to happen, time goes on for the machines.
  if (group_.time.size() == group_.pings && faults_to_come_ == 0 && leaving_.empty() &&
      std::all_of(jobs_.begin(), jobs_.end(), [this](const auto& job) { return Rests(job); })) {
    ticks_ = false;
    return;
  }
  group_.time.After(100 * kMillisecond, [this] { Tick(); });
}

std::string StepSimulator::Run() {
  running = &jobs_.front().invariants;
  on_impossible.store([](const std::string& what) { running->Fail(what); });
  PlanFaults();
  coordinator_.BeginAttached();
  for (SimulatedTrainer& trainer : trainers_) trainer.BeginAttached(kFirstAttempt);
  BeginTicks();
  while (!group_.time.empty() && Failure().empty()) {
    if (order_.has_value() && events_++ == order_->second) Obey(order_->first);
    group_.time.RunNext();
    if (group_.time.now() > kGivesUpAfter) jobs_.front().Fail("somebody waits for ever");
  }
  for (Simulation& job : jobs_) {
    if (Failure().empty()) CheckTheEnd(job);
  }
  if (Failure().empty()) return "";
  return absl::StrCat("at ", group_.time.now(), " us: ", Failure(), "; ", Describe());
}

// Everything is delivered.
void StepSimulator::CheckTheEnd(Simulation& job) {
  if (!AllRest(job)) return job.Fail("a trainer never got an answer");
  coordinator_.CheckTheEnd(job);
  // A job that was given up, or that everybody left, has nothing left to compare.
  const bool given_up = !coordinator_.Has(job) || coordinator_.Lost(job);
  for (const SimulatedMember* member : job.members) member->CheckTheEnd(given_up);
  if (job.disturbed) return;
  for (const SimulatedTrainer* trainer : job.trainers) {
    if (!trainer->finished()) job.Fail("a trainer stopped before the last step");
  }
}

}  // namespace dmuond::scheduler::testing
