// A whole group in one thread and one seed: coordinator, members, lanes and trainers over a network
// that delays, repeats and loses, while trainers, lanes, daemons and links die and come back. It
// runs a job, or two side by side.
// step_invariants.h says what must hold; what each part does is in simulated_*.h.
//
//   const std::string broken = StepSimulator({&world}, seed).Run();   // empty: every invariant
//   held
#ifndef DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
#define DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulated_trainer.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class StepSimulator {
 public:
  // A job of each of the worlds. REQUIRES: they have as many nodes and lanes, and other names.
  StepSimulator(const std::vector<const SimulatedWorld*>& worlds, uint64_t seed,
                bool traced = false);
  // What people do to the first job, or to a node, beside all that befalls them.
  enum class Order : uint8_t { kNone, kEndJob, kDiscard, kDrain, kLoad };
  // Between two events: so many have come before. Without a plan, chance makes one.
  void Plan(Order order, int64_t after) { order_ = {order, after}; }
  [[nodiscard]] int64_t events() const { return events_; }  // of the run that has ended
  // What went wrong; empty: nothing.
  [[nodiscard]] std::string Run();
  [[nodiscard]] const SimulationCounts& counts() const { return group_.counts; }

 private:
  // Which faults this schedule has, and when.
  void PlanFaults();
  void PlanTrainerFaults(Simulation& job, int64_t until_ms);
  void PlanFaultsOf(Simulation& job);
  void PlanFaultsOfTheGroup();
  void Later(int64_t until_ms, Event fault);
  void CutLink(NodeRank node);
  void KillDaemon(NodeRank node);
  void RemoveDaemon(NodeRank node);  // and start its successor
  // It is told to leave.
  void StopDaemon(NodeRank node);

  void Obey(Order order);
  void BeginTicks();
  void Tick();
  void CheckTheEnd(Simulation& job);
  [[nodiscard]] bool AllRest(const Simulation& job) const;
  // Nothing more comes of it by itself.
  [[nodiscard]] bool Rests(const Simulation& job) const;
  [[nodiscard]] std::string Failure() const;
  [[nodiscard]] std::string Describe() const;
  [[nodiscard]] bool alive(NodeRank node) const { return group_.MembersOf(node).front()->alive(); }

  SimulatedGroup group_;
  SimulatedCoordinator coordinator_;
  std::deque<Simulation> jobs_;
  std::deque<SimulatedMember> members_;
  std::deque<SimulatedTrainer> trainers_;
  int32_t faults_to_come_ = 0;
  bool ticks_ = false;
  std::optional<std::pair<Order, int64_t>> order_;
  int64_t events_ = 0;
  std::set<NodeRank> leaving_;  // daemons that have been told to
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
