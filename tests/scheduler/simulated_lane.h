// A lane of the step simulator: collects, applies, publishes and copies in the order in which its
// daemon tells it; what it has in memory is the daemon's, and outlives it.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dmuond/v1/lane.pb.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class SimulatedLane {
 public:
  SimulatedLane(Simulation& simulation, SimulatedMember& member, NodeRank node, LaneIndex rail)
      : simulation_(simulation), member_(member), node_(node), rail_(rail) {}

  // Its daemon's side. Everything takes a while, and is lost if the lane is by then.
  void Told(const v1::LaneCommand& command);

  // The process ends; what it has said still arrives, and then its end.
  void Die();
  // The process is ended: nothing of it arrives any more.
  void End();
  // The process lives and does nothing more, for ever.
  void Hang() { hangs_ = true; }
  // Another one in its place, over the same memory.
  void Renew(uint32_t epoch);
  // It is configured after a while: says its bits, connects its rail where there are other nodes,
  // and is ready.
  void Begin(Microseconds after, const std::string& bits);
  void ForgetMemory();

  // Signals of trainers, which no message tells.
  void Progress();

  [[nodiscard]] bool dead() const { return dead_; }
  [[nodiscard]] bool hangs() const { return hangs_; }
  [[nodiscard]] uint64_t applied() const { return applied_; }
  // Memory of the rank's own process is mapped.
  [[nodiscard]] bool HasOwnMemoryOf(TrainerRank rank) const {
    return !dead_ && own_memory_.contains(rank.value());
  }
  [[nodiscard]] bool publishing() const { return publishing_.value() != 0; }
  [[nodiscard]] Attempt published() const { return published_attempt_; }

 private:
  // By streams that keep the order.
  void Report(v1::LaneReport report);
  void Hear(const v1::LaneCommand& command);
  void Decided(const Decision& decision);
  void Went(const Go& go);
  void Publish(Attempt attempt);
  void Apply(const Decision& decision);
  void ProgressCollect();
  void ProgressPublish();
  void ReportPublished();
  void SayReady();
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
  uint64_t progress_ = 0;
  bool dead_ = true;
  bool hangs_ = false;
  bool connects_ = false;  // its rail awaits the other nodes' lanes
  OpenAttempt armed_;
  std::map<Attempt, std::map<TrainerRank, Submission>> submitted_;
  std::map<Attempt, AttemptKind> begun_;
  std::set<BucketId> reported_;
  std::set<BucketId> gone_;
  bool gathered_ = false;
  Attempt publishing_;         // 0: nothing
  Attempt published_attempt_;  // newest that it has published
  std::set<BucketId> published_;
  bool publish_reported_ = false;
  std::map<int32_t, uint64_t> own_memory_;  // mapped, of trainers' own: incarnation by rank

  // Memory.
  Attempt kept_;          // whose gradients lie gathered
  Attempt last_applied_;  // as the state table has it
  uint64_t applied_ = 0;
  Stream from_member_;
  Stream to_member_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_LANE_H_
