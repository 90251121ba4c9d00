// What must hold in every schedule of the step simulator, whatever dies. It sees all that is
// decided, told, heard and kept, and knows the one history that there may be.
//
//   * a step is applied at most once by every owner, in one order, and committed only when every
//     rank has submitted it, every lane has gathered it, and every owner's state is the newest;
//   * COMMITTED is never taken back but by ROLLED_BACK: what a trainer hears next follows from
//     what it has heard, or names the step that it goes back to;
//   * durable_step <= last_committed_step; a snapshot that counts is whole and of one state; no
//     rollback goes behind a step that anybody was told to be durable, unless it was asked for;
//   * a planned departure loses nothing: what the job goes back to is what it had come to;
//   * attempts only grow, over aborts, epochs, rollbacks and restarts;
//   * nothing of an older incarnation, epoch or attempt is heard;
//   * every wait ends (StepSimulator).
#ifndef DMUOND_TESTS_SCHEDULER_STEP_INVARIANTS_H_
#define DMUOND_TESTS_SCHEDULER_STEP_INVARIANTS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/snapshot_schedule.h"
#include "scheduler/step.h"
#include "tests/scheduler/simulated_world.h"

namespace dmuond::scheduler::testing {

// What a job has come to.
struct History {
  StepId step;
  uint64_t consumed = 0;  // of all that has been committed or skipped, in its order
  uint64_t applied = 0;   // of all that owners have applied, in its order
  bool pushed = false;    // since that step
};

[[nodiscard]] uint64_t AfterApplying(uint64_t applied, Attempt attempt);

class StepInvariants {
 public:
  StepInvariants(const SimulatedWorld& world, SimulationCounts& counts)
      : world_(world), counts_(counts) {}

  [[nodiscard]] const std::string& failure() const { return failure_; }
  void Fail(const std::string& what) {
    if (failure_.empty()) failure_ = what;
  }

  // ---- what trainers and lanes do ----
  void Submitted(const Submission& submission);
  // At the coordinator, before it acts on it.
  void ToldReady(NodeRank node, const RailReady& ready);
  void Gathered(LaneId lane, Attempt attempt, uint64_t applied);

  // ---- what the coordinator decides ----
  // `again`: a decision that was told before may come.
  void Decided(const Decision& decision, bool again, bool finite);
  void Opened(const OpenAttempt& open);
  // To one node; nullopt: to all.
  void Went(std::optional<int32_t> to, const v1::Goes& goes);
  void ToldBegun(const Begun& begun);
  void Republished(const Republish& republish);
  void SaveBegins(const SnapshotId& id);
  // Another group has read a snapshot and saved the same state under a newer name.
  void SavedElsewhere(const SnapshotId& from, const SnapshotId& id) {
    saved_[id] = saved_.at(from);
    newest_saved_ = id;
  }
  // A manifest names the lanes' files, of these states.
  void ManifestExists(const SnapshotId& id, const std::vector<uint64_t>& applied);
  // By the decision of an attempt.
  void ToldDurable(Attempt attempt, StepId durable, StepId last_committed);
  // In a new epoch. Where somebody asked for it, members may not have heard of it for a while.
  void RolledBack(const SnapshotId& to, GroupEpoch epoch, bool asked_for);
  // A daemon leaves as planned, and takes this snapshot to be the newest state.
  void LeavesWith(const SnapshotId& id);
  void StateLost(bool any_manifest);
  // Whoever begins the job anew gives up what it had.
  void Discarded();
  // The job begins anew, under another machine, because nobody had any state.
  void BeganAnew();

  // ---- what others hear ----
  // Of a decision that consumed something: whoever was at `before` is at what it returns.
  [[nodiscard]] History Heard(const std::string& who, const History& before, Attempt attempt);
  [[nodiscard]] const Decision* DecisionOf(Attempt attempt) const;
  [[nodiscard]] History StateOf(const SnapshotId& id) const { return saved_.at(id); }

  [[nodiscard]] const History& now() const { return now_; }

 private:
  struct Consumed {
    uint64_t before = 0;  // History::consumed
    History after;
  };
  void CheckCommit(const Decision& decision);
  void CheckGo(NodeRank to, const Go& go, const std::set<AbsentFragment>& absent);
  [[nodiscard]] bool IsAbsent(Attempt attempt, const AbsentFragment& fragment) const;

  const SimulatedWorld& world_;
  SimulationCounts& counts_;
  std::string failure_;

  History now_;
  Attempt open_;
  std::optional<StepId> durable_told_;
  GroupEpoch asked_back_in_;           // epoch of the last rollback that somebody asked for
  std::optional<uint64_t> left_with_;  // History::consumed of the last planned departure
  std::map<Attempt, Decision> decided_;
  std::map<Attempt, Consumed> consumed_;
  std::map<SnapshotId, History> saved_;     // states that were to be saved
  std::optional<SnapshotId> newest_saved_;  // of those that count

  std::map<Attempt, std::map<TrainerRank, Submission>> asked_;  // what trainers really submitted
  std::map<Attempt, std::map<LaneId, uint64_t>> gathered_;
  std::map<std::tuple<Attempt, RailOperation, LaneIndex, NodeRank>, BucketId> last_go_;
  std::set<std::tuple<Attempt, RailOperation, LaneIndex, BucketId, NodeRank>> reports_;
  std::set<Attempt> gradients_reported_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_STEP_INVARIANTS_H_
