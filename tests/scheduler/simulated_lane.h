// A lane of the step simulator: collects, applies, publishes and copies in the order in which its
// daemon tells it; what it has in memory is the daemon's, and outlives it.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class SimulatedLane {
 public:
  SimulatedLane(Simulation& simulation, SimulatedMember& member, NodeRank node, LaneIndex rail)
      : simulation_(simulation), member_(member), node_(node), rail_(rail) {}

  // Its daemon's side. Everything takes a while, and is lost if the lane is by then.
  void Arm(const OpenAttempt& open);
  void Submitted(const Submission& submission);
  void Begun(const Submission& first);  // on a node without trainers: what an attempt is for
  void Decide(const Decision& decision);
  void Redo(const Decision& decision);
  void Go(const scheduler::Go& go);
  void Publish(Attempt attempt);
  void Copy(Attempt attempt);

  // The process ends; what it has said and not been heard of is lost.
  void Die() { dead_ = true; }
  // The process lives and does nothing more, for ever.
  void Hang() { hangs_ = true; }
  // Another one in its place, over the same memory.
  void Renew(uint32_t epoch);
  void ForgetMemory();
  void Load(uint64_t applied) { applied_ = applied; }

  // Signals of trainers, which no message tells.
  void Progress();

  [[nodiscard]] bool dead() const { return dead_; }
  [[nodiscard]] bool hangs() const { return hangs_; }
  [[nodiscard]] uint32_t generation() const { return generation_; }
  [[nodiscard]] uint64_t applied() const { return applied_; }
  [[nodiscard]] bool publishing() const { return publishing_.value() != 0; }

 private:
  template <typename F>
  void Tell(F event) {
    simulation_.network.Send(from_member_, simulation_.chance.Pick(0, 100), 0,
                             [this, generation = generation_, event = std::move(event)] {
                               if (!dead_ && !hangs_ && generation_ == generation) event();
                             });
  }
  template <typename F>
  void Report(F event) {
    simulation_.network.Send(to_member_, simulation_.chance.Pick(0, 300), 0,
                             [this, generation = generation_, event = std::move(event)] {
                               if (generation_ == generation) event();
                             });
  }
  void Apply(const Decision& decision);
  void ProgressCollect();
  void ProgressPublish();
  void ReportReady(RailOperation operation, BucketId bucket, Attempt attempt, AttemptKind kind);
  [[nodiscard]] LaneId id() const {
    return LaneId(node_.value() * simulation_.world.inputs.lanes_per_node + rail_.value());
  }

  Simulation& simulation_;
  SimulatedMember& member_;
  const NodeRank node_;
  const LaneIndex rail_;

  uint32_t generation_ = 0;  // of processes in this place
  uint32_t epoch_ = 1;
  bool dead_ = false;
  bool hangs_ = false;
  OpenAttempt armed_;
  std::map<Attempt, std::map<TrainerRank, Submission>> submitted_;
  std::map<Attempt, AttemptKind> begun_;
  std::set<BucketId> reported_;
  std::set<BucketId> gone_;
  bool gathered_ = false;
  Attempt publishing_;  // 0: nothing
  std::set<BucketId> published_;
  bool publish_reported_ = false;

  // Memory.
  Attempt kept_;          // whose gradients lie gathered
  Attempt last_applied_;  // as the state table has it
  uint64_t applied_ = 0;
  Stream from_member_;
  Stream to_member_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_
