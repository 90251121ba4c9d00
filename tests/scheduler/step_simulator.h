// A whole group in one thread and one seed: the step coordinator, members, lanes and trainers over
// a network that delays, repeats and loses. Streams between daemons keep their order and may be
// replayed in part, as after a reconnect; calls of trainers are unordered, lost and repeated; lanes
// hear their daemon in order. Trainers retry, disagree, withdraw, push, hang; daemons are lost.
//
//   const std::string broken = StepSimulator(world, seed).Run();   // empty: every invariant held
#ifndef DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
#define DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "scheduler/step_coordinator.h"
#include "scheduler/step_member.h"

namespace dmuond::scheduler::testing {

struct SimulatedWorld {
  PlanInputs inputs;
  Plan plan;
  RailTables tables;
};

// What the schedules of many seeds have in them, so that a test sees that it tests something.
struct SimulationCounts {
  int64_t commits = 0;
  int64_t pushes = 0;
  int64_t skips = 0;
  int64_t aborts = 0;
  int64_t refusals = 0;
  int64_t goes = 0;
  int64_t replacements = 0;
  int64_t reformations = 0;      // new epochs, because lanes died
  int64_t redone = 0;            // commits that a lane's successor had to apply
  int64_t begun = 0;             // attempts that nodes without trainers were told of
  int64_t repeated_answers = 0;  // a submission that found its step decided
};

class StepSimulator {
 public:
  StepSimulator(const SimulatedWorld& world, uint64_t seed);
  // What went wrong; empty: nothing.
  [[nodiscard]] std::string Run();
  [[nodiscard]] const SimulationCounts& counts() const { return counts_; }

 private:
  using Microseconds = int64_t;
  using Event = std::function<void()>;
  struct Queued {
    Microseconds at;
    uint64_t sequence;
    Event event;
    bool operator<(const Queued& other) const {
      return std::pair(at, sequence) > std::pair(other.at, other.sequence);  // earliest on top
    }
  };
  struct Stream {
    Microseconds last = 0;
    std::deque<Event> recent;  // what a reconnect may replay
  };
  struct Lane {
    NodeRank node;
    LaneIndex rail;
    OpenAttempt armed;
    std::map<Attempt, std::map<TrainerRank, Submission>> submitted;
    std::map<Attempt, AttemptKind> begun;  // on a node without trainers: what attempts are for
    std::set<BucketId> reported;
    std::set<BucketId> gone;
    bool gathered = false;
    Attempt publishing;  // 0: nothing
    std::set<BucketId> published;
    bool publish_reported = false;
    bool dead = false;
    uint32_t epoch = 1;
    // What outlives a lane, in memory that the daemon holds.
    Attempt kept;     // whose gradients lie gathered
    Attempt applied;  // the last commit that its state shows
    int64_t commits = 0;
    Stream from_member;
    Stream to_member;
  };
  struct Node {
    StepMember member;
    std::vector<TrainerRank> ranks;
    std::vector<Lane> lanes;
    std::vector<Attempt> decisions;
    Attempt armed;
    uint32_t epoch = 1;
    Attempt republished;
    Stream to_coordinator;
    Stream from_coordinator;
  };
  struct Trainer {
    TrainerRank rank;
    Node* node = nullptr;
    StepId committed;
    Attempt attempt;
    Submission request;
    uint64_t call = 0;  // answers to older calls are nobody's
    bool submitted = false;
    int32_t mistakes = 2;
    std::set<BucketId> early;  // signalled under `attempt`
    std::set<int64_t> pushed_at;
    StepId hangs_at{-1};
    uint64_t incarnation = 1;
    Attempt first_attempt;
    bool dead = false;
    bool replaced = false;  // when it dies: somebody takes its place
    bool done = false;
  };

  // Chance.
  uint64_t Random();
  int64_t Pick(int64_t low, int64_t high);
  bool Chance(int32_t percent);
  [[nodiscard]] bool FateOf(StepId step, const char* what, int32_t percent) const;

  // The network.
  void After(Microseconds delay, Event event);
  void Send(Stream& stream, Microseconds delay, int32_t replay_percent, Event event);
  [[nodiscard]] Microseconds Travel();
  void Call(Event event);  // may be lost or repeated

  // Trainers.
  void Begin(Trainer& trainer);
  void Die(Trainer& trainer, const std::string& why);
  void Replace(Trainer& trainer, Attempt vacated);
  void Submit(Trainer& trainer, uint64_t call);
  void Answer(Trainer& trainer, uint64_t call, const absl::StatusOr<StepAnswer>& answer);
  void Finish(Trainer& trainer, const StepAnswer& answer);

  // Daemons.
  void AtMember(Node& node, const CoordinatorAction& action);
  void AtCoordinator(const std::vector<CoordinatorAction>& actions);
  void Check(const Decision& decision);
  void Check(const OpenAttempt& open);
  void Check(const Go& go);
  void Check(const Begun& begun);
  void Check(const Expel& /*expel*/) {}
  void Check(const Republish& republish);

  // New epochs.
  void LaneDies(Lane& lane);
  void AtCoordinatorLaneLost(uint32_t epoch);
  void Reform(Node& node, uint32_t epoch);
  void AtCoordinatorPlanReady(NodeRank node, uint32_t epoch);

  // Lanes.
  // To a lane that lives when it arrives, and is still the same one.
  void Tell(Lane& lane, Event event);
  void Apply(Lane& lane, const Decision& decision);
  void Progress(Lane& lane);
  void Collect(Lane& lane);
  void Publish(Lane& lane);
  void Report(Lane& lane, RailOperation operation, BucketId bucket, Attempt attempt,
              AttemptKind kind, bool gradients);

  void Fail(const std::string& what);
  [[nodiscard]] TimePoint Now() const;
  [[nodiscard]] bool AllDone() const;
  [[nodiscard]] std::string Describe() const;
  void Tick();
  void CheckTheEnd();

  const SimulatedWorld& world_;
  uint64_t state_;
  const uint64_t seed_;
  StepId last_step_;
  const bool lingers_;
  Microseconds now_ = 0;
  uint64_t sequence_ = 0;
  bool ticking_ = true;
  std::priority_queue<Queued> queue_;
  StepCoordinator coordinator_;
  std::deque<Node> nodes_;
  std::deque<Trainer> trainers_;
  bool disturbed_ = false;  // a trainer hangs or somebody is lost: not all can finish

  std::map<Attempt, Decision> decided_;
  Attempt open_;
  StepId consumed_;
  uint32_t epoch_ = 1;
  bool retelling_ = false;
  std::set<NodeRank> ready_;                                    // have new lanes in this epoch
  std::map<Attempt, std::map<TrainerRank, Submission>> asked_;  // what trainers really submitted
  std::map<std::pair<Attempt, RailOperation>, std::map<LaneIndex, BucketId>> last_go_;
  std::set<std::tuple<Attempt, RailOperation, LaneIndex, BucketId, NodeRank>> reports_;
  std::set<std::pair<Attempt, const Node*>> heard_;  // whose ranks the coordinator has heard
  std::set<Attempt> gradients_reported_;             // by nodes before that
  SimulationCounts counts_;
  std::string failure_;
};

// Small worlds of several shapes: nodes, lanes, replicated and sharded.
[[nodiscard]] std::vector<SimulatedWorld> SimulatedWorlds();

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_STEP_SIMULATOR_H_
