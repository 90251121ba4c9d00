// A whole group in one thread and one seed: coordinator, members, lanes and trainers over a network
// that delays, repeats and loses, while trainers, lanes, daemons and links die and come back.
// step_invariants.h says what must hold; what each part does is in simulated_*.h.
//
//   const std::string broken = StepSimulator(world, seed).Run();   // empty: every invariant held
#ifndef DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
#define DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_

#include <cstdint>
#include <deque>
#include <string>

#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulated_trainer.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class StepSimulator {
 public:
  StepSimulator(const SimulatedWorld& world, uint64_t seed, bool traced = false);
  // What went wrong; empty: nothing.
  [[nodiscard]] std::string Run();
  [[nodiscard]] const SimulationCounts& counts() const { return simulation_.counts; }

 private:
  // Which faults this schedule has, and when.
  void PlanFaults();
  void PlanTrainerFaults(int64_t until_ms);
  void Later(int64_t until_ms, Event fault);
  void CutLink(NodeRank node);
  void KillDaemon(NodeRank node);
  void RemoveDaemon(NodeRank node);  // and start its successor
  // It is told to leave.
  void StopDaemon(NodeRank node);

  void Tick();
  void CheckTheEnd();
  [[nodiscard]] bool AllRest() const;
  [[nodiscard]] std::string Describe() const;

  Simulation simulation_;
  SimulatedCoordinator coordinator_;
  std::deque<SimulatedMember> members_;
  std::deque<SimulatedTrainer> trainers_;
  int32_t faults_to_come_ = 0;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
