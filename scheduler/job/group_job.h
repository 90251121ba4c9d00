// The job on the coordinating node: it gathers registrations, has the plan made, connects rails,
// decides attempts, goes back to snapshots and ends the job. It speaks with members in dmuond.v1
// messages only; the member of its own node reaches it in the same way.
//
// It performs nothing and plans nothing. Time and messages come in, and GroupActions go out: the
// caller sends the messages, and has the ordered plan made in a thread of its choice.
//
// A job is in one of these phases. An event that its phase does not name is ignored.
//
//   Registering   Planning follows when every rank has registered, and older snapshots that are
//                 discarded count no more. The deadline refuses what has been registered.
//   Planning      Preparing follows when the plan is made, and all nodes are told of it. Where no
//                 plan can be made, Registering follows; a job that goes back ends. When a rank
//                 leaves or registers something else, Registering follows, and the plan that is
//                 being made is not used.
//   Preparing     Running follows when every node is PlanReady. A node that cannot prepare, a lane
//                 or rank that is lost, and silence for the register timeout refuse the
//                 registrations. In a job that goes back a lost lane starts the rollback anew, and
//                 everything else ends the job.
//   Running       Attempts are opened and decided. Interrupted follows when a lane or node is lost.
//                 A job that waits for nobody is lost then, and stays here. Parked follows when
//                 lanes have died too often in one step.
//   Interrupted   Nothing is decided. Running follows when every node is PlanReady. When lanes die
//                 too often, or nodes cannot get ready or are silent, Parked follows; Running, as a
//                 lost job, where the job has no state or waits for nobody.
//   Parked        There are no lanes, and the state is in memory. Interrupted follows when it is
//                 time to try again, or the group breaks. Running follows, as a lost job, after
//                 session_linger where a snapshot has all of the state.
//
// Two events replace the job in every phase but Registering by one that goes back to a snapshot and
// begins in Planning: somebody loads a snapshot, or the group forms anew and a node has lost the
// job's memory. When the group forms anew, a job that has not come to Running is dropped.
// JobEnded can be told in any phase.
//
// Threads: one at a time.
#ifndef DMUOND_SCHEDULER_JOB_GROUP_JOB_H_
#define DMUOND_SCHEDULER_JOB_GROUP_JOB_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/awaited.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/addressed.h"
#include "scheduler/job/dropped.h"
#include "scheduler/job/job_uids.h"
#include "scheduler/job/outgoing_goes.h"
#include "scheduler/job/planned_job.h"
#include "scheduler/job/replica_check.h"
#include "scheduler/job/snapshot_round.h"
#include "scheduler/plan.h"
#include "scheduler/step_coordinator.h"
#include "scheduler/weight_digests.h"

namespace dmuond::scheduler {

// So many lanes may die while the same step is the next one to commit; then the job is parked.
inline constexpr int32_t kLaneDeathsMax = 3;
// Lanes that have worked for so long on every node are not what keeps the step from its end, though
// it may still wait for a rank: what lanes have died before counts no more.
inline constexpr std::chrono::milliseconds kLanesWork{300'000};
// A parked job is tried again after the first; each time that it is parked again before a step has
// committed, after twice as long, up to the second.
inline constexpr std::chrono::milliseconds kParkedFirst{1'000};
inline constexpr std::chrono::milliseconds kParkedMax{300'000};

struct GroupJobOptions {
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  // Attempts of an epoch are counted from here, so that those of no two places are the same.
  uint32_t attempts_from = 0;
  int64_t lane_memory_bytes = 0;
  int64_t memory_granule_bytes = 1;  // this daemon's devices', as PlanInputs'
  int64_t landing_bytes_max = 0;     // this daemon's devices', as PlanInputs'
  std::optional<CostTable> costs;    // measured; nullopt: estimates
  CostTable estimates;               // analytic, for this daemon's devices
  bool replan = false;  // measured costs hold for a job that begins from a snapshot, too
  // At most so large are the inputs of a plan for several nodes, which are sent as one message.
  int64_t peer_message_bytes_max = std::numeric_limits<int64_t>::max();
  std::chrono::milliseconds register_timeout{120'000};
  CoordinatorOptions step;
  bool snapshots = false;  // there is a directory for them
  SnapshotOptions snapshot;
  std::chrono::milliseconds check_every{0};  // all copies are compared; 0: when somebody asks
  JobUids job_uids;
};

// Orders a plan. OnPlanMade() takes the plan with its order. No two orders share their inputs.
struct PlanOrder {
  std::shared_ptr<const v1::PlanInputs> inputs;
};

// What is to be done. The messages are sent in their order.
struct GroupActions {
  AddressedMessages messages;
  std::vector<PlanOrder> plans;
  std::vector<Dropped> dropped;  // messages that were of another epoch or attempt; to be counted
};

class GroupJob {
 public:
  explicit GroupJob(GroupJobOptions options) : options_(std::move(options)) {}

  // The group has formed (anew). Members say next what they still have of a running job.
  [[nodiscard]] GroupActions OnFormed(TimePoint now, uint32_t epoch);
  [[nodiscard]] GroupActions OnMessage(TimePoint now, int32_t from,
                                       const v1::MemberMessage& message);
  [[nodiscard]] GroupActions OnMemberGone(TimePoint now, int32_t node, const std::string& why);
  // What came of an order. It is ignored where Awaits() is false.
  [[nodiscard]] GroupActions OnPlanMade(TimePoint now, const PlanOrder& order,
                                        absl::StatusOr<PlannedJob> made);
  // The job still wants the plan of this order.
  [[nodiscard]] bool Awaits(const PlanOrder& order) const;
  // Looks at deadlines. Call it every 100 ms.
  [[nodiscard]] GroupActions OnTick(TimePoint now);
  // When OnDue() is to be called, because GOs are held back to be gathered. nullopt: none are.
  [[nodiscard]] std::optional<TimePoint> due() const {
    return job_ != nullptr && job_->goes.has_value() ? job_->goes->due() : std::nullopt;
  }
  [[nodiscard]] GroupActions OnDue(TimePoint now) { return Complete(now, {}); }
  // The newest epoch that it has begun; it only grows.
  [[nodiscard]] uint32_t epoch() const { return epoch_; }
  // The job's name; empty: there is none.
  [[nodiscard]] std::string name() const { return job_ == nullptr ? "" : job_->name; }
  // There is a job, and no trainer of it lives: it waits for replacements.
  [[nodiscard]] bool dead() const { return job_ != nullptr && job_->open_ranks.empty(); }
  // JOB_OF_ANOTHER_USER: there is a job of this name, and the user of the rank's trainer can have
  // no part in it.
  [[nodiscard]] absl::Status CheckUser(const std::string& job, int32_t rank, uint32_t uid) const;
  // How many jobs have begun; it only grows.
  [[nodiscard]] uint64_t begun() const { return incarnations_; }
  // There is a job, or a snapshot of one is being looked for, or news of ranks wait for Formed().
  [[nodiscard]] bool busy() const { return job_ != nullptr || finding_ || !early_.empty(); }

  enum class Phase : uint8_t {
    kRegistering,
    kPlanning,
    kPreparing,
    kRunning,
    kInterrupted,
    kParked
  };
  // ---- what it shows ----
  // nullopt: there is no job.
  [[nodiscard]] std::optional<Phase> phase() const {
    return job_ == nullptr ? std::nullopt : std::optional(job_->phase);
  }
  // Every node has said what it has, and it is known which job goes on.
  [[nodiscard]] bool Formed() const {
    return states_.size() == static_cast<size_t>(options_.nodes) && !finding_;
  }
  // A rank or a node is gone for good, and trainers are told to give up.
  [[nodiscard]] bool lost() const {
    return job_ != nullptr && job_->has_steps() && job_->steps->lost();
  }
  // A snapshot is being made, or another one is to follow it.
  [[nodiscard]] bool saves() const {
    return job_ != nullptr && job_->snapshots != nullptr && job_->snapshots->busy();
  }

 private:
  // Why the group forms, or has its lanes made, anew.
  struct Interruption {
    OutcomeReason reason = OutcomeReason::kNone;
    std::string detail;
  };
  // A job from its first session to its end.
  struct Job {
    // The only way from one phase to another. REQUIRES: the table above has it.
    void Enter(Phase next);
    // Nodes have been told of the plan.
    [[nodiscard]] bool has_plan() const { return phase >= Phase::kPreparing; }
    // There are attempts. A lost job has them, too.
    [[nodiscard]] bool has_steps() const { return phase >= Phase::kRunning; }
    [[nodiscard]] bool interrupted() const { return phase == Phase::kInterrupted; }
    [[nodiscard]] bool parked() const { return phase == Phase::kParked; }
    // Whatever there is to do waits for lanes.
    [[nodiscard]] bool lacks_lanes() const { return interrupted() || parked(); }
    [[nodiscard]] bool from_snapshot() const { return restore.step > StepId(0); }

    Phase phase = Phase::kRegistering;
    // It goes back to a snapshot, and has not restarted: ranks come back one by one.
    bool goes_back = false;
    bool back_asked = false;   // it goes back because somebody has loaded a snapshot
    bool discarding = false;   // it is not planned before its older snapshots are set aside
    bool saving_last = false;  // a rank is missing for good, and the state is being saved
    int32_t world_size = 0;
    uint32_t back_epoch = 0;  // of its last rollback
    // So many lanes have died while the step of `deaths_in` was the next one to commit, and since
    // lanes have worked for kLanesWork.
    int32_t deaths = 0;
    StepId deaths_in;
    // It was parked so often since the step of `parked_in` has become the next one to commit, or
    // since lanes have worked for kLanesWork.
    int32_t parks = 0;
    StepId parked_in;
    TimePoint parked_since;                // the first time of those
    TimePoint tried_again;                 // in kParked: when Interrupted follows
    TimePoint running_since;               // in kRunning: the present lanes are ready on every node
    std::map<int32_t, v1::LaneBits> bits;  // by node that is ready: what its lanes compute with
    // Everybody has left, and why. The job ends when it is saved, at the latest at `ends_by`.
    std::optional<std::string> ends;
    std::string name;
    uint64_t incarnation = 0;
    // Ranks with a session that is neither closed nor gone, with its node and incarnation.
    std::map<int32_t, std::pair<int32_t, uint64_t>> open_ranks;
    std::map<int32_t, JobLacks::Place> places;  // by rank; for messages to people
    GatheredRegistrations registrations;
    std::optional<TimePoint> register_deadline;
    std::shared_ptr<const v1::PlanInputs> wire;               // from kPlanning on
    PlannedJob planned;                                       // from kPreparing on
    std::map<int32_t, uint64_t> ready;                        // node -> digest of its plan
    std::map<int32_t, std::map<int32_t, std::string>> blobs;  // rail -> node -> blob
    std::unique_ptr<StepCoordinator> steps;                   // from kRunning on
    std::optional<OutgoingGoes> goes;                         // set with `steps`
    std::string back_why;                                     // for messages to people
    Interruption interruption;                                // in kInterrupted and kParked
    SnapshotId restore{};                        // what it begins from; of step 0: no snapshot
    std::optional<v1::CostTable> restore_costs;  // with which the snapshot's job was planned
    uint32_t owner_uid = 0;                      // user whose job it is
    std::string launch;           // the launch that began it with RESUME_DISCARD; empty: none
    absl::Status discard_error;   // why its older snapshots could not be set aside
    std::set<int32_t> attached;   // ranks that can submit
    WeightDigests first_weights;  // of a job without state
    std::unique_ptr<SnapshotRound> snapshots;  // set with `steps`, where there are any
    SnapshotCounts snapshot_counts;            // from before the job went back
    std::unique_ptr<ReplicaCheck> check;       // set with `steps`
    // What nodes that prepare have said of that, and since when none has said anything new.
    std::map<int32_t, v1::NodeProgress> progress;
    struct Heard {
      uint32_t epoch = 0;
      size_t ready = 0;
      uint64_t done = 0;
      bool operator==(const Heard&) const = default;
    };
    Heard heard;
    std::optional<TimePoint> unready_since;
    // In a job that goes back: since when no further rank has attached, and how many had then.
    std::optional<TimePoint> unattached_since;
    size_t attached_then = 0;
    TimePoint ends_by;
  };

  AddressedMessages Dispatch(TimePoint now, int32_t from, const v1::MemberMessage& message);
  // Why the message changes nothing here, if that is for the epoch or attempt that it is about.
  [[nodiscard]] std::optional<Dropped> WhyDropped(const v1::MemberMessage& message) const;
  // True where there is a reason, which Complete() then hands out.
  bool Drops(std::optional<Dropped> why, int32_t from, const std::string& message);
  // The message is about another job than the present one, and about none that is to begin.
  [[nodiscard]] bool OfAnotherJob(const v1::MemberMessage& message) const;
  AddressedMessages MemberGone(TimePoint now, int32_t node, const std::string& why);
  AddressedMessages Lost(TimePoint now, OutcomeReason reason, const std::string& detail);
  AddressedMessages Advance(TimePoint now);
  // Completes the messages of one event: GOs that were held back go first, decisions name the
  // durable step, and the message that begins a snapshot follows the decision at which it is due.
  [[nodiscard]] GroupActions Complete(TimePoint now, AddressedMessages messages);
  // Has members follow into the present epoch when nothing that they have been told, or will be
  // told of the job, says which it is. They and the coordinator are of one epoch whenever a job
  // begins.
  void TellEpoch(AddressedMessages& messages);
  AddressedMessages EndJob(const std::string& why, const std::string& reason = "",
                           const Metadata& metadata = {});

  // group_job_check.cc
  AddressedMessages OnCheckRequest(TimePoint now, int32_t from, const v1::CheckRequest& request);
  // Why copies cannot be compared at present; empty: they can. REQUIRES: the job has steps.
  [[nodiscard]] std::string WhyNotCompared() const;
  void AddChecks(TimePoint now, AddressedMessages& messages);

  // group_job_discard.cc
  AddressedMessages OnEndJob(int32_t from, const v1::EndJob& end);
  // Why the session cannot discard the present job; OK: both are of the same launch.
  [[nodiscard]] absl::Status CheckLaunch(const v1::RankSession& session) const;
  // Whose the job is that the session begins.
  [[nodiscard]] uint32_t OwnerOf(const v1::RankSession& session) const;
  void BeginAnew(const v1::RankSession& session, AddressedMessages& out);
  AddressedMessages OnSnapshotsDiscarded(const v1::SnapshotsDiscarded& discarded);

  // group_job_leaving.cc
  // Halts the job for nodes that are leaving, as soon as nothing is in flight, and tells them so.
  void HaltForLeavers(TimePoint now, AddressedMessages& out);

  // group_job_plan.cc
  // Every rank has registered. REQUIRES: kRegistering, or kPlanning with other registrations.
  AddressedMessages PlanRegistered();
  // The costs to plan with. A job that begins from a snapshot keeps those that it had: with other
  // ones the same members would get another plan, whose kernels give other bits.
  [[nodiscard]] std::optional<v1::CostTable> CostsOfPlan() const;
  // RESOURCE_EXHAUSTED (LAYOUT_TOO_LARGE): other nodes would not take so large a message.
  [[nodiscard]] absl::Status CheckPlanBytes(const v1::PlanInputs& inputs) const;
  // REQUIRES: job_->wire.
  void OrderPlan();
  // Begins an epoch, and tells all nodes of it, if the job's snapshot has attempts ahead of the
  // present one's. Snapshots are ordered by attempt: the job's own would count as older than the
  // one that it began from.
  void PassSnapshot(AddressedMessages& out);
  // The plan that is being made is not used: ranks register again.
  void DropOrder(TimePoint now);
  // Every waiting registration fails with `status`; the job can be registered anew.
  AddressedMessages Refuse(const absl::Status& status);
  AddressedMessages OnRendezvous(const v1::Rendezvous& rendezvous);
  AddressedMessages OnPlanReady(TimePoint now, const v1::PlanReady& ready);
  // In what lanes of the node differ from those of a node that is ready already (LANE_DIFFERS).
  [[nodiscard]] absl::Status CheckBits(const v1::PlanReady& ready) const;

  // group_job_ranks.cc
  AddressedMessages OnRankSession(int32_t from, const v1::RankSession& session);
  // Tells the session's node why the session is refused.
  static AddressedMessages Deny(int32_t node, const v1::RankSession& session,
                                const absl::Status& why);
  AddressedMessages OnRegistration(TimePoint now, int32_t from,
                                   const v1::Registration& registration);
  AddressedMessages OnRankAttached(TimePoint now, int32_t from, const v1::RankAttached& attached);
  AddressedMessages OnRankGone(TimePoint now, int32_t from, const v1::RankGone& gone);
  void EndIfDeserted(TimePoint now, AddressedMessages& out);

  // group_job_reform.cc
  AddressedMessages OnLaneLost(TimePoint now, const v1::LaneLost& lost);
  AddressedMessages OnLanesAccepted();
  // Lanes or a node of a running job are lost: what was lost before no longer counts if lanes have
  // worked for long.
  void ForgetOldLosses(TimePoint now);
  AddressedMessages LanesLost(TimePoint now, const std::string& detail);
  AddressedMessages Park(TimePoint now, const std::string& why);
  // Tries again when that is due, or ends a job that a snapshot has. REQUIRES: kParked.
  AddressedMessages AdvanceParked(TimePoint now);
  // Counts a lane that has died; false: too many have while the same step was the next one.
  bool MayLoseALane();
  void NextEpoch();
  // A parked job gets lanes. REQUIRES: kParked.
  AddressedMessages TryAgain();
  // New lanes on every node, over the memory that there is, in the present epoch.
  AddressedMessages Reform();
  AddressedMessages OnMemberState(TimePoint now, int32_t from, const v1::MemberState& state);
  AddressedMessages OnNewestSnapshot(TimePoint now, int32_t from, const v1::NewestSnapshot& newest);
  // Every node has said what it still has of the job. `newest`: null as long as it is not known.
  AddressedMessages FormAnew(TimePoint now, const v1::NewestSnapshot* newest);
  AddressedMessages GoOn(const v1::NewestSnapshot* newest);
  // A node has lost the job's memory: the job goes back to the newest snapshot, or ends.
  AddressedMessages GoBackOrEnd(const v1::MemberState& holder, bool has_state, int32_t without,
                                const v1::NewestSnapshot& newest);
  // The job of `plan` goes back to the snapshot `to`, in an epoch of its own: what ranks have
  // said before names an older one. Members hear of it when the job is planned. `asked`: somebody
  // has loaded the snapshot; else memory was lost.
  void RollBack(v1::PlanInputs plan, const SnapshotId& to, const std::string& why,
                bool asked = false);
  void OnLoadSnapshot(const v1::LoadSnapshotOf& load);
  // Restarts a job that begins from a snapshot, if every rank is attached.
  AddressedMessages RestartWhenAttached(TimePoint now);
  // Has the snapshot's weights published. REQUIRES: every rank is attached.
  AddressedMessages Restart(TimePoint now);

  // group_job_snapshots.cc
  void AddSnapshots(TimePoint now, AddressedMessages& messages);
  void TellSave(std::optional<v1::SaveState> save, AddressedMessages& out) const;
  AddressedMessages OnSnapshotMessage(TimePoint now, int32_t from,
                                      const v1::MemberMessage& message);
  // A rank did not come back, and the job is lost: saves its state, if snapshots are made.
  void SaveLast(TimePoint now, AddressedMessages& out);
  AddressedMessages EndWhenSaved(TimePoint now, const std::string& why);

  // group_job_steps.cc
  AddressedMessages OnReports(TimePoint now, int32_t from, const v1::Reports& reports);
  AddressedMessages OnVote(TimePoint now, const v1::Vote& vote);
  // The step machine's actions as messages. GOs are held back instead, and Complete() adds them.
  AddressedMessages Broadcast(TimePoint now, std::vector<CoordinatorAction> actions);

  // group_job_waiting.cc
  // Whom the job waits for. REQUIRES: there is one.
  [[nodiscard]] JobLacks Lacks() const;
  // Tells all nodes whom the job has been waiting for, once that has lasted for a while.
  void TellWaiting(TimePoint now, AddressedMessages& out);

  // group_job_watch.cc
  // The job does not wait any longer for nodes that were told to prepare and do not get on.
  AddressedMessages GiveUpUnready(TimePoint now);
  // What a node that is not ready waits for, in its own words.
  [[nodiscard]] std::string AwaitedBy(int32_t node) const;
  // A job that goes back does not wait any longer for ranks that live and do not come to it.
  AddressedMessages ExpelUnattached(TimePoint now);

  // group_job_weights.cc
  // Ends a job without state when a rank attaches with other weights than another one. Nothing has
  // been written to an arena by then: that begins when all ranks have pushed.
  AddressedMessages CompareFirstWeights(const v1::RankAttached& attached);
  // Ends a job in which an update has made weights infinite or NaN, instead of the next decision.
  AddressedMessages EndWhereNotFinite(const v1::Vote& vote);

  // A node that is about to leave.
  struct Leaver {
    TimePoint patience_ends;  // when it stops waiting for the attempt in flight
    bool told = false;        // it has been told that the job is halted
  };

  GroupJobOptions options_;
  uint32_t epoch_ = 0;
  uint32_t told_epoch_ = 0;  // the newest that members have been told of
  uint32_t attempts_ = 0;    // the counter half of this epoch's newest attempt, whatever its job
  uint64_t incarnations_ = 0;
  std::map<int32_t, v1::MemberState> states_;                 // by node: since the group formed
  bool finding_ = false;                                      // node 0 looks for a snapshot
  std::vector<std::pair<int32_t, v1::MemberMessage>> early_;  // news of ranks from before Formed()
  std::map<int32_t, Leaver> leavers_;                         // by node: since the group formed
  std::unique_ptr<Job> job_;
  std::string name_;                // of the present job, or of the last one
  std::optional<PlanOrder> order_;  // Complete() gives it to the caller
  std::vector<Dropped> dropped_;    // likewise
  AwaitedNews waiting_;
  // The last job that ended. A node that did not hear so still holds it when the group forms anew.
  struct Ended {
    uint64_t incarnation = 0;
    v1::CoordinatorMessage message;
  };
  std::optional<Ended> ended_;
  // The last job that a launch has ended to begin it anew, for its user, who has the next one, too.
  struct Discarded {
    std::string job;
    std::string launch;
    uint32_t owner_uid = 0;
  };
  Discarded discarded_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_GROUP_JOB_H_
