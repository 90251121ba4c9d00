// The coordinator of the step simulator: the StepCoordinator and SnapshotSchedule under test, and
// what server/daemon/coordinator*.cc does around them when lanes, links and daemons are lost.
// Membership is abstracted to its result (membership_simulator.h has the rest): a group breaks as a
// whole, and forms when every daemon lives, under an epoch of its own.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/snapshot_schedule.h"
#include "scheduler/step_coordinator.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

// A snapshot that is being made.
struct SnapshotUnderWay {
  SnapshotId id;
  std::map<NodeRank, std::vector<uint64_t>> states;  // of nodes that have answered
  bool failed = false;
};

// A job from its first session to its end.
struct JobOfCoordinator {
  bool planned = false;
  bool rolled_back = false;  // and not restarted yet
  bool interrupted = false;  // nothing is decided: the group is broken, or lanes are new
  std::optional<SnapshotId> restore;
  uint32_t back_epoch = 0;  // of its last way back
  std::map<TrainerRank, std::pair<NodeRank, uint64_t>> open_ranks;
  std::map<TrainerRank, uint64_t> incarnations;  // newest that has attached
  std::set<TrainerRank> registered;
  std::set<TrainerRank> attached;
  std::set<NodeRank> ready;
  std::unique_ptr<StepCoordinator> steps;
  std::optional<SnapshotSchedule> schedule;
  std::optional<SnapshotUnderWay> writing;
  SnapshotId state;                   // what a snapshot now would be of
  std::optional<SnapshotId> durable;  // made by this coordinator
  bool requested = false;             // another snapshot, as soon as this is written
  StepId deaths_in;
  int32_t deaths = 0;
};

class SimulatedCoordinator {
 public:
  explicit SimulatedCoordinator(Simulation& simulation) : simulation_(simulation) {}
  void BeginAttached();

  // ---- the group ----
  // The link of a node is cut, or its daemon dead; node 0's daemon is this one's.
  void Break(const std::string& why);
  void Die();
  void Tick();
  // Nothing is being repaired.
  [[nodiscard]] bool Settled() const;
  void CheckTheEnd() const;
  // By which a node is joined now; null: there is no group.
  [[nodiscard]] Connection* connection(NodeRank node) const {
    return connections_.empty() ? nullptr : connections_[node.value()];
  }
  [[nodiscard]] bool job_lost() const { return job_ && job_->steps && job_->steps->lost(); }
  [[nodiscard]] bool has_job() const { return job_.has_value() && job_->planned; }
  [[nodiscard]] std::string Describe() const;

  // ---- what members say ----
  void OnState(NodeRank from, const MemberState& state);
  void OnNewest(uint32_t epoch, std::optional<SnapshotId> newest);  // that node 0 has found
  void OnRankSession(NodeRank from, TrainerRank rank, uint64_t incarnation,
                     std::optional<SnapshotId> resume);
  void OnRegistration(NodeRank from, TrainerRank rank);
  void OnRankAttached(TrainerRank rank, uint64_t incarnation);
  void OnRankGone(NodeRank from, TrainerRank rank, uint64_t incarnation, const std::string& why);
  void OnPlanReady(NodeRank from, uint32_t epoch);
  void OnPlanFailed(uint32_t epoch);
  void OnLaneLost(uint32_t epoch);
  void OnSubmission(const Submission& submission);
  void OnRailReady(NodeRank from, LaneIndex rail, RailOperation operation, BucketId bucket,
                   Attempt attempt, AttemptKind kind, bool gradients);
  void OnVote(NodeRank from, Attempt attempt, const std::vector<UnitNorm>& norms);
  void OnSnapshotWritten(NodeRank from, Attempt attempt,
                         const std::vector<uint64_t>& states);  // none: it has failed
  void OnManifestWritten(Attempt attempt, bool written);
  void OnLeaving(NodeRank from);
  void OnSnapshotRequest(NodeRank from);
  // After each message: for those who leave, nothing more is decided.
  void HaltForLeavers();
  // Somebody wants to go back to a snapshot that was found in that epoch.
  void OnLoad(uint32_t epoch, const SnapshotId& to);

 private:
  using Actions = std::vector<CoordinatorAction>;

  Connection& ConnectNext();  // the members' links, in the order of their nodes
  template <typename Heard>
  void ToMembers(const Heard& event, int32_t replay_percent = 0) {
    if (connections_.empty()) return;  // nobody has joined
    for (size_t node = 0; node < nodes(); ++node) {
      simulation_.network.Down(*connections_[node], replay_percent,
                               [event, member = simulation_.members[node]] { event(*member); });
    }
  }
  void Perform(const Actions& actions, bool again = false);
  void Snapshot(const CoordinatorAction& action);
  void BeginSnapshot(const SnapshotId& id);
  void TellDone(const SnapshotId& id, bool written);
  [[nodiscard]] bool Heard(Event event);  // of ranks: false: later, when all states are known
  void Form();
  // `newest`: unset before node 0 has looked for one.
  void FormAnew(std::optional<std::optional<SnapshotId>> newest);
  void GoOn(std::optional<std::optional<SnapshotId>> newest);
  [[nodiscard]] bool Formed() const { return states_.size() == nodes() && !finding_; }
  void Reform();
  void RollBack(const SnapshotId& to, bool asked_for);
  void NextEpoch();
  void RestartWhenAttached();
  void Refuse();
  void GaveUpAPlace();
  void Lost(OutcomeReason reason, const std::string& why);
  void LanesLost(const std::string& why);
  void EndJob(JobEnd why);
  [[nodiscard]] bool MayLoseALane();
  [[nodiscard]] CoordinatorOptions StepOptions() const;
  [[nodiscard]] size_t nodes() const { return simulation_.members.size(); }
  [[nodiscard]] size_t world() const { return simulation_.trainers.size(); }

  Simulation& simulation_;
  uint32_t newest_epoch_ = 1;  // of all that there have been
  bool formed_ = true;
  bool forming_ = false;
  uint32_t epoch_ = 1;
  uint32_t attempts_ = 1;
  std::map<NodeRank, MemberState> states_;
  std::vector<Event> early_;
  bool finding_ = false;                                    // node 0 looks for a snapshot
  std::map<NodeRank, std::pair<TimePoint, bool>> leavers_;  // patience ends; told
  std::vector<Connection*> connections_;                    // by node
  std::optional<JobOfCoordinator> job_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
