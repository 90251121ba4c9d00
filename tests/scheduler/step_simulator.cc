#include "tests/scheduler/step_simulator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/job/impossible.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr Microseconds kGivesUpAfter = 600'000 * kMillisecond;

// Of the simulation that runs: a machine that is told what its state cannot have fails it.
StepInvariants* running = nullptr;

}  // namespace

StepSimulator::StepSimulator(const SimulatedWorld& world, uint64_t seed, bool traced)
    : simulation_(world, seed), coordinator_(simulation_) {
  simulation_.traced = traced;
  simulation_.coordinator = &coordinator_;
  for (int32_t node = 0; node < world.inputs.nodes; ++node) {
    std::vector<TrainerRank> ranks;
    for (const scheduler::Trainer& trainer : world.inputs.layout.trainers) {
      if (trainer.node.value() == node) ranks.push_back(trainer.rank);
    }
    simulation_.members.push_back(
        &members_.emplace_back(simulation_, NodeRank(node), std::move(ranks)));
  }
  for (const scheduler::Trainer& trainer : world.inputs.layout.trainers) {
    simulation_.trainers.push_back(
        &trainers_.emplace_back(simulation_, trainer.rank, members_[trainer.node.value()]));
  }
}

// ---- faults ----

void StepSimulator::Later(int64_t until_ms, Event fault) {
  ++faults_to_come_;
  simulation_.time.After(simulation_.chance.Pick(0, until_ms * kMillisecond),
                         [this, fault = std::move(fault)] {
                           --faults_to_come_;
                           fault();
                         });
}

void StepSimulator::PlanTrainerFaults(int64_t until_ms) {
  Chance& chance = simulation_.chance;
  const SimulationOptions& options = simulation_.options;
  if (chance.Of(10)) {
    simulation_.disturbed = true;
    trainers_[chance.Pick(0, static_cast<int64_t>(trainers_.size()) - 1)].HangAt(
        StepId(chance.Pick(0, options.last_step.value() - 1)));
  }
  for (SimulatedTrainer& trainer : trainers_) {
    trainer.SetReplaced(options.lingers && chance.Of(70));
    if (!options.lingers || !chance.Of(15)) continue;
    const int64_t deaths = chance.Pick(1, 2);
    for (int64_t i = 0; i < deaths; ++i) {
      Later(until_ms, [&trainer] { trainer.Die("it was killed"); });
    }
  }
}

void StepSimulator::PlanFaults() {
  Chance& chance = simulation_.chance;
  SimulationOptions& options = simulation_.options;
  options.lingers = chance.Of(85);
  options.last_step = StepId(chance.Pick(1, 3));
  options.snapshot_every = chance.Of(60) ? chance.Pick(1, 2) : 0;
  const bool group_is_hurt = options.lingers && chance.Of(35);
  if (group_is_hurt) options.linger = std::chrono::milliseconds(20'000);
  // Long enough to befall who comes back from what befalls the group.
  PlanTrainerFaults(group_is_hurt ? 2'000 : 400);
  const int32_t nodes = simulation_.world.inputs.nodes;
  while (chance.Of(15)) {
    SimulatedMember& member = members_[chance.Pick(0, nodes - 1)];
    const LaneIndex rail(
        static_cast<int32_t>(chance.Pick(0, simulation_.world.inputs.lanes_per_node - 1)));
    if (chance.Of(30)) {
      Later(400, [&member, rail] { member.LaneHangs(rail); });
    } else {
      Later(400, [&member, rail] { member.LaneDies(rail); });
    }
  }
  if (options.snapshot_every > 0 && chance.Of(40)) {
    SimulatedMember& member = members_[chance.Pick(0, nodes - 1)];
    Later(400,
          [this, &member] { member.DiskHangs(simulation_.chance.Pick(1, 300) * kMillisecond); });
  }
  if (!group_is_hurt) {
    // Without patience, a group that breaks is the end of its job.
    if (nodes > 1 && chance.Of(8)) Later(200, [this] { coordinator_.Break("a node is gone"); });
    return;
  }
  do {
    const NodeRank node(static_cast<int32_t>(chance.Pick(0, nodes - 1)));
    const int64_t what = chance.Pick(0, 99);
    if (what < 40 && nodes > 1) {
      Later(600, [this, node] { CutLink(node); });
    } else if (what < 70) {
      Later(600, [this, node] { KillDaemon(node); });
    } else if (what < 90) {
      Later(600, [this, node] { StopDaemon(node); });
    } else {
      Later(600, [this, node] { members_[node.value()].GoBackToNewest(); });
    }
  } while (chance.Of(40));
}

// Node 0's is within its daemon.
void StepSimulator::CutLink(NodeRank node) {
  Connection* connection = coordinator_.connection(node);
  if (node.value() == 0 || connection == nullptr || connection->cut) return;
  ++simulation_.counts.broken_links;
  connection->cut = true;
  simulation_.time.After(simulation_.chance.Pick(0, 300 * kMillisecond), [this, node, connection] {
    if (coordinator_.connection(node) == connection) coordinator_.Break("a link was cut");
  });
}

void StepSimulator::KillDaemon(NodeRank node) {
  if (!members_[node.value()].alive()) return;
  ++(node.value() == 0 ? simulation_.counts.coordinator_deaths : simulation_.counts.daemon_deaths);
  RemoveDaemon(node);
}

void StepSimulator::StopDaemon(NodeRank node) {
  ++faults_to_come_;
  members_[node.value()].PrepareToLeave([this, node] {
    --faults_to_come_;
    RemoveDaemon(node);
  });
}

void StepSimulator::RemoveDaemon(NodeRank node) {
  SimulatedMember& member = members_[node.value()];
  if (!member.alive()) return;
  Chance& chance = simulation_.chance;
  member.Die();
  // Nothing that is on its way to it reaches its successor, of a group that is broken neither.
  for (Connection& theirs : simulation_.connections) {
    if (theirs.node == node) theirs.ended_at_member = true;
  }
  if (node.value() == 0) {
    coordinator_.Die();
  } else if (Connection* connection = coordinator_.connection(node); connection != nullptr) {
    // What it has said still arrives, until its end is noticed.
    simulation_.time.After(chance.Pick(0, 300 * kMillisecond), [this, node, connection] {
      if (coordinator_.connection(node) == connection) coordinator_.Break("a daemon died");
    });
  }
  ++faults_to_come_;
  simulation_.time.After(chance.Pick(10, 1'000) * kMillisecond, [this, &member] {
    --faults_to_come_;
    member.Start();
  });
}

// ---- the run ----

bool StepSimulator::AllRest() const {
  return std::all_of(trainers_.begin(), trainers_.end(),
                     [](const SimulatedTrainer& trainer) { return trainer.Rests(); });
}

std::string StepSimulator::Describe() const {
  std::string text = coordinator_.Describe();
  for (const SimulatedMember& member : members_) absl::StrAppend(&text, member.Describe());
  for (const SimulatedTrainer& trainer : trainers_) absl::StrAppend(&text, trainer.Describe());
  return text;
}

void StepSimulator::Tick() {
  coordinator_.Tick();
  bool settled = true;
  for (SimulatedMember& member : members_) {
    member.Tick();
    settled = settled && member.Settled();
  }
  // A job that is given up because its lanes die gets no others, and ends with its last session.
  settled = settled || coordinator_.job_lost();
  // As long as anything else is to happen, time goes on for the machines.
  if (simulation_.time.empty() && faults_to_come_ == 0 && settled && AllRest() &&
      (coordinator_.Settled() || !coordinator_.has_job())) {
    return;
  }
  simulation_.time.After(100 * kMillisecond, [this] { Tick(); });
}

std::string StepSimulator::Run() {
  running = &simulation_.invariants;
  on_impossible.store([](const std::string& what) { running->Fail(what); });
  PlanFaults();
  coordinator_.BeginAttached();
  for (SimulatedTrainer& trainer : trainers_) trainer.BeginAttached(kFirstAttempt);
  simulation_.time.After(100 * kMillisecond, [this] { Tick(); });
  StepInvariants& invariants = simulation_.invariants;
  while (!simulation_.time.empty() && invariants.failure().empty()) {
    simulation_.time.RunNext();
    if (simulation_.time.now() > kGivesUpAfter) simulation_.Fail("somebody waits for ever");
  }
  if (invariants.failure().empty()) CheckTheEnd();
  if (invariants.failure().empty()) return "";
  return absl::StrCat("at ", simulation_.time.now(), " us: ", invariants.failure(), "; ",
                      Describe());
}

// Everything is delivered.
void StepSimulator::CheckTheEnd() {
  if (!AllRest()) return simulation_.Fail("a trainer never got an answer");
  coordinator_.CheckTheEnd();
  // A job that was given up, or that everybody left, has nothing left to compare.
  const bool given_up = !coordinator_.has_job() || coordinator_.job_lost();
  for (const SimulatedMember& member : members_) member.CheckTheEnd(given_up);
  if (simulation_.disturbed) return;
  for (const SimulatedTrainer& trainer : trainers_) {
    if (!trainer.finished()) simulation_.Fail("a trainer stopped before the last step");
  }
}

}  // namespace dmuond::scheduler::testing
