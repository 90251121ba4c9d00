// A daemon of the step simulator, without its coordinator: the StepMember under test, and what
// server/daemon does around it with sessions, lanes, new epochs, rollbacks and snapshots.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/outgoing_reports.h"
#include "scheduler/step_member.h"
#include "tests/scheduler/simulated_lane.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

// What a coordinator is told again.
struct GoneRank {
  uint64_t incarnation = 0;
  std::string why;
};

// A job on this node; what server/daemon calls NodeJob.
struct JobOfMember {
  [[nodiscard]] bool has_plan() const { return plan != nullptr; }
  std::shared_ptr<const v1::PlanInputs> plan;
  bool has_state = false;
  bool restored = false;
  bool reforming = false;
  bool forget_state = false;
  bool rolled_back = false;  // and no attempt has been opened since
  bool abandoned = false;
  absl::Status failed;
  std::optional<SnapshotId> resume;   // what was found when the job began here
  std::optional<SnapshotId> restore;  // what its plan begins with
  Attempt applied_attempt;
  std::map<TrainerRank, Attempt> vacancies;
  std::map<TrainerRank, GoneRank> gone;
};

// A snapshot's part of one node.
struct CopyOfMember {
  SnapshotId id;
  std::vector<uint64_t> states;  // by lane
  size_t copied = 0;
  uint64_t number = 0;    // of all of this member
  bool ended = false;     // nothing more is copied
  bool answered = false;  // without states: it has failed
};

class SimulatedMember {
 public:
  SimulatedMember(Simulation& simulation, NodeRank node, std::vector<TrainerRank> ranks);
  // The job has been registered with this plan, and every rank is attached.
  void BeginAttached(const v1::PlanInputs& plan);

  [[nodiscard]] NodeRank node() const { return node_; }
  [[nodiscard]] const std::vector<TrainerRank>& ranks() const { return ranks_; }
  [[nodiscard]] bool alive() const { return alive_; }
  [[nodiscard]] bool connected() const { return connection_ != nullptr; }

  // ---- the group ----
  void Formed(Connection& connection, uint32_t epoch);
  void Broken();
  void Die();
  void Start();  // a successor, with nothing
  void LaneDies(LaneIndex rail);
  // It hangs for ever; the daemon finds that out, kills it, and says that it has died.
  void LaneHangs(LaneIndex rail);
  // What it is doing with its disk comes to an end only so much later; that is found out.
  void DiskHangs(Microseconds for_so_long);
  // It is told to leave, and calls `leaves` when all that there is is on the disk, or is not going
  // to be.
  void PrepareToLeave(Event leaves);
  // Somebody asks for it here; nothing comes of it while the job is not going on.
  void GoBackToNewest();

  // What the coordinator says.
  void Hear(const std::shared_ptr<const v1::CoordinatorMessage>& message);

  // ---- what it says to the coordinator ----
  [[nodiscard]] v1::MemberMessage State() const;
  [[nodiscard]] v1::MemberMessage SessionOf(TrainerRank rank) const;
  [[nodiscard]] v1::MemberMessage RegistrationOf(TrainerRank rank) const;
  [[nodiscard]] v1::MemberMessage AttachedOf(TrainerRank rank) const;
  [[nodiscard]] v1::MemberMessage PlanIsReady() const;

  // ---- what trainers ask; nullopt: not yet, ask again ----
  struct Opened {
    uint64_t incarnation = 0;
    History at;
  };
  template <typename Reply>
  using Later = std::optional<absl::StatusOr<Reply>>;
  [[nodiscard]] Later<Opened> Open(TrainerRank rank, bool require);
  [[nodiscard]] Later<Attempt> Attach(TrainerRank rank, uint64_t incarnation);
  [[nodiscard]] absl::StatusOr<StepAnswer> Step(const Submission& request, uint64_t incarnation,
                                                bool wait);
  [[nodiscard]] Later<Attempt> Acknowledge(TrainerRank rank, uint64_t incarnation,
                                           const WayBack& back);
  [[nodiscard]] std::optional<WayBack> MustAcknowledge(TrainerRank rank, uint64_t incarnation) {
    const Session* session = Find(rank, incarnation);
    return session == nullptr ? std::nullopt : session->must_acknowledge;
  }
  // The trainer has died.
  void Leave(TrainerRank rank, uint64_t incarnation, const std::string& why);
  // What a trainer that acknowledges, or attaches, goes on from.
  [[nodiscard]] const History& history() const { return history_; }
  [[nodiscard]] const StepMember* steps() const { return steps_ ? &*steps_ : nullptr; }

  // ---- what lanes report ----
  void Ready(const RailReady& ready);
  void Gathered(LaneIndex rail, Attempt attempt, const std::vector<UnitNorm>& norms);
  void Copied(LaneIndex rail, Attempt attempt, uint64_t state);

  void ProgressLanes();
  void CheckTheEnd(bool given_up) const;
  [[nodiscard]] std::string Describe() const;

 private:
  struct Session {
    uint64_t incarnation = 0;
    bool refused = false;
    bool outdated = false;  // the job has gone back before it was attached
    bool attached = false;
    bool begins = false;  // waits for the restart of the job in Attach()
    bool replied = false;
    StepId told;  // last committed step, when it was opened
    Attempt first_attempt;
    std::optional<WayBack> must_acknowledge;
    std::optional<WayBack> acknowledged;
  };

  void Tell(v1::MemberMessage message);
  void Send(OutgoingReports::Messages messages);
  void PlanReports();  // the lanes' programs are known
  // The coordinator's process is this one.
  void TellHere(const v1::MemberMessage& message);
  void TellManifestWritten(Attempt attempt, bool written);
  void TellGone(TrainerRank rank, const GoneRank& gone);
  void TellRanksAgain();
  void TellLeaving();
  void AskForSnapshot();
  void Goes();
  void OnDisk(Event event);
  void GiveUpSnapshot();
  void HandleAttempt(const CoordinatorAction& action);
  void HandleReform(uint32_t epoch);
  void HandleRollBack(uint32_t epoch, const std::shared_ptr<const v1::PlanInputs>& plan);
  void HandlePlan(const std::shared_ptr<const v1::PlanInputs>& plan);
  void HandleRefused();
  void HandleSave(const SnapshotId& id);
  void FindNewest(uint32_t epoch);  // of node 0
  void HandleWriteManifest(const v1::SnapshotManifest& manifest);
  void HandleSnapshotDone(const v1::SnapshotDone& done);
  void HandleHalted(const v1::Halted& halted);
  void HandleJobEnded(const v1::JobEnded& ended);
  [[nodiscard]] Session* Find(TrainerRank rank, uint64_t incarnation);
  [[nodiscard]] std::optional<SnapshotId> Newest() const;

  void BeginSteps(StepId last_committed);
  void Decide(const Decision& decision);
  void Expelled(const Expel& expel);
  void ReplaceLanes();
  void LanesReady();
  void PlanReady();
  [[nodiscard]] std::optional<SnapshotId> RestoredBy(const v1::PlanInputs& plan) const;
  void TellPlanFailed();
  void ForgetState();
  void EndCopy(bool written);
  void TellWritten();
  void Fail(absl::Status why);
  void Abandon(absl::Status why);
  void EndJob();
  void RemoveSession(TrainerRank rank, const std::string& why);
  [[nodiscard]] absl::Status NoSession(TrainerRank rank, uint64_t incarnation) const;
  [[nodiscard]] bool KnowsItsStep(TrainerRank rank) const;
  [[nodiscard]] bool Restarted() const;

  Simulation& simulation_;
  const NodeRank node_;
  const std::vector<TrainerRank> ranks_;
  bool alive_ = true;
  uint64_t boot_ = 1;
  Connection* connection_ = nullptr;
  uint32_t epoch_ = 0;  // 0: no group
  OutgoingReports reports_;
  Stream disk_;

  std::optional<JobOfMember> job_;
  std::optional<StepMember> steps_;
  History history_;  // as of the last decision that was heard, or the snapshot
  std::map<TrainerRank, Session> sessions_;
  std::map<TrainerRank, uint64_t> incarnations_;
  std::map<TrainerRank, uint64_t> ended_;  // sessions that their job's end has found open
  std::deque<SimulatedLane> lanes_;
  uint64_t generation_ = 0;  // of lanes
  uint32_t lane_epoch_ = 0;
  Attempt armed_;
  Attempt republished_;
  std::optional<CopyOfMember> copying_;
  uint64_t copies_ = 0;
  std::optional<SnapshotId> committing_;  // manifest that is being written
  bool disk_hangs_ = false;
  Event leaves_;         // it is told to leave
  bool halted_ = false;  // nothing is decided any more, for that
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_
