// What the coordinating node decides about the job: gathers registrations, has the plan made,
// connects rails, decides attempts, goes back to snapshots, ends the job. Speaks with members in
// dmuond.v1 messages only; its own node's member reaches it the same way.
//
// It performs nothing and plans nothing. Time and messages come in; GroupActions go out, and
// whoever called sends the messages and has the ordered plan made, in a thread of its choice.
//
// A job is in one of these phases. What is not in the table is ignored in that phase.
//
//   Registering   every rank's registration, and the end of what discards older snapshots, lead to
//                 Planning; the deadline refuses what has been registered
//   Planning      the plan leads to Preparing, and all nodes are told of it; none, to Registering,
//                 or to the end of a job that goes back. Who leaves or registers something else
//                 leads to Registering, and the plan that is being made is of no use
//   Preparing     every node's PlanReady leads to Running. A node that cannot, a lost lane or rank,
//                 and silence for the register timeout, refuse the registrations; of a job that
//                 goes back a lost lane begins the way back anew, the rest ends it
//   Running       attempts are opened and decided. A lane that is lost, or a node, leads to
//                 Interrupted; where the job waits for nobody, it is lost and stays here
//   Interrupted   nothing is decided. Every node's PlanReady leads to Running; lanes that die too
//                 often, and silence, to Running as a lost job
//
// In each but Registering a snapshot that is loaded, or the group forming anew without the job's
// memory on some node, replaces the job by one that goes back to a snapshot and begins in Planning.
// When the group forms anew a job that is not Running or Interrupted is dropped. JobEnded is told
// in any phase.
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
#include "scheduler/job/outgoing_goes.h"
#include "scheduler/job/planned_job.h"
#include "scheduler/job/snapshot_round.h"
#include "scheduler/plan.h"
#include "scheduler/step_coordinator.h"
#include "scheduler/weight_digests.h"

namespace dmuond::scheduler {

// A step in which lanes die this often without it, or a push, committing does not go on for ever.
inline constexpr int32_t kLaneDeathsMax = 3;

struct GroupJobOptions {
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  int64_t lane_memory_bytes = 0;
  int64_t memory_granule_bytes = 1;  // this daemon's devices', as PlanInputs'
  std::optional<CostTable> costs;    // measured; nullopt: estimates
  CostTable estimates;               // analytic, for this daemon's devices
  bool replan = false;               // a job that goes on from a snapshot too
  // Inputs of a plan that is for several nodes; they cross as one message.
  int64_t peer_message_bytes_max = std::numeric_limits<int64_t>::max();
  std::chrono::milliseconds register_timeout{120'000};
  CoordinatorOptions step;
  bool snapshots = false;  // there is a directory for them
  SnapshotOptions snapshot;
};

// A plan is wanted: OnPlanMade() takes it with the order. No two orders are of the same inputs.
struct PlanOrder {
  std::shared_ptr<const v1::PlanInputs> inputs;
};

// What is to be done, in any order but that of the messages.
struct GroupActions {
  AddressedMessages messages;
  std::vector<PlanOrder> plans;
};

class GroupJob {
 public:
  explicit GroupJob(GroupJobOptions options) : options_(std::move(options)) {}

  // The group has formed (anew). What a running job still has its members say next.
  [[nodiscard]] GroupActions OnFormed(TimePoint now, uint32_t epoch);
  [[nodiscard]] GroupActions OnMessage(TimePoint now, int32_t from,
                                       const v1::MemberMessage& message);
  [[nodiscard]] GroupActions OnMemberGone(TimePoint now, int32_t node, const std::string& why);
  // What came of an order. That of an order that is no longer wanted is ignored.
  [[nodiscard]] GroupActions OnPlanMade(TimePoint now, const PlanOrder& order,
                                        absl::StatusOr<PlannedJob> made);
  // The order is its newest.
  [[nodiscard]] bool Awaits(const PlanOrder& order) const;
  // Deadlines; call every 100 ms.
  [[nodiscard]] GroupActions OnTick(TimePoint now);
  // When OnDue() is due: GOs are held back, to be gathered. nullopt: nothing is.
  [[nodiscard]] std::optional<TimePoint> due() const {
    return job_ != nullptr && job_->goes.has_value() ? job_->goes->due() : std::nullopt;
  }
  [[nodiscard]] GroupActions OnDue(TimePoint now) { return Complete(now, {}); }
  // Newest that it has begun; only grows.
  [[nodiscard]] uint32_t epoch() const { return epoch_; }
  // No job that begins from now on has this incarnation, or an older one.
  void KnowIncarnations(uint64_t newest) { incarnations_ = std::max(incarnations_, newest); }
  [[nodiscard]] uint64_t incarnations() const { return incarnations_; }
  // There is a job, or one is being looked for, or was told of too early.
  [[nodiscard]] bool busy() const { return job_ != nullptr || finding_ || !early_.empty(); }

  enum class Phase : uint8_t { kRegistering, kPlanning, kPreparing, kRunning, kInterrupted };
  // ---- for who watches it ----
  // Of the job; nullopt: there is none.
  [[nodiscard]] std::optional<Phase> phase() const {
    return job_ == nullptr ? std::nullopt : std::optional(job_->phase);
  }
  // It is known what the group goes on with.
  [[nodiscard]] bool Formed() const {
    return states_.size() == static_cast<size_t>(options_.nodes) && !finding_;
  }
  // Trainers are told to give up: a rank or a node is gone, and nobody waits for it.
  [[nodiscard]] bool lost() const {
    return job_ != nullptr && job_->has_steps() && job_->steps->lost();
  }
  // A snapshot is being made, or will be as soon as that is.
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
    // There are attempts, of a lost job too.
    [[nodiscard]] bool has_steps() const { return phase >= Phase::kRunning; }
    [[nodiscard]] bool interrupted() const { return phase == Phase::kInterrupted; }

    Phase phase = Phase::kRegistering;
    // It goes back to a snapshot, and has not restarted: ranks come back one by one.
    bool goes_back = false;
    bool back_asked = false;   // somebody has loaded the snapshot; else memory was lost
    bool discarding = false;   // older snapshots still count: there is no plan before they do not
    bool saving_last = false;  // a rank is missing for good, and what there is is being saved
    int32_t world_size = 0;
    uint32_t back_epoch = 0;  // of its last way back
    // How many lanes have died while the step of `deaths_in` was the next one to commit.
    int32_t deaths = 0;
    StepId deaths_in;
    // Everybody has left: why, and the job ends as soon as it is saved, or at the deadline.
    std::optional<std::string> ends;
    std::string name;
    uint64_t incarnation = 0;
    // Sessions that are neither closed nor gone: rank -> node and incarnation.
    std::map<int32_t, std::pair<int32_t, uint64_t>> open_ranks;
    std::map<int32_t, JobLacks::Place> places;  // by rank: for people
    GatheredRegistrations registrations;
    std::optional<TimePoint> register_deadline;
    std::shared_ptr<const v1::PlanInputs> wire;               // from kPlanning on
    PlannedJob planned;                                       // from kPreparing on
    std::map<int32_t, uint64_t> ready;                        // node -> digest of its plan
    std::map<int32_t, std::map<int32_t, std::string>> blobs;  // rail -> node -> blob
    std::unique_ptr<StepCoordinator> steps;                   // from kRunning on
    std::optional<OutgoingGoes> goes;                         // set with `steps`
    std::string back_why;                                     // for people
    Interruption interruption;  // in kInterrupted: the group is broken, or nodes start new lanes
    int64_t restore_step = 0;   // of the snapshot that it goes on from; 0: none
    std::optional<v1::CostTable> restore_costs;  // that it was planned with then
    std::string launch;          // that has begun it with RESUME_DISCARD; empty: it began otherwise
    absl::Status discard_error;  // why they go on to count
    std::set<int32_t> attached;  // ranks that can submit
    WeightDigests first_weights;               // of a job without state
    std::unique_ptr<SnapshotRound> snapshots;  // set with `steps`, where there are any
    SnapshotCounts snapshot_counts;            // from before the job went back
    // What nodes that prepare have said of it, and since when nothing new has been heard.
    std::map<int32_t, v1::NodeProgress> progress;
    struct Heard {
      uint32_t epoch = 0;
      size_t ready = 0;
      uint64_t done = 0;
      bool operator==(const Heard&) const = default;
    };
    Heard heard;
    std::optional<TimePoint> unready_since;
    // A job that goes back: since when ranks are awaited, and none of the others has come.
    std::optional<TimePoint> unattached_since;
    size_t attached_then = 0;
    TimePoint ends_by;
  };

  // Completes what is about to be told: decisions name the durable step, where a snapshot falls due
  // the message that begins it follows, and GOs that were held back go first. Once for all
  // messages.
  [[nodiscard]] GroupActions Complete(TimePoint now, AddressedMessages messages);
  void AddSnapshots(TimePoint now, AddressedMessages& messages);
  // The message is of another job than the one that there is, and of none that is to begin.
  [[nodiscard]] bool OfAnotherJob(const v1::MemberMessage& message) const;
  AddressedMessages Dispatch(TimePoint now, int32_t from, const v1::MemberMessage& message);
  AddressedMessages Advance(TimePoint now);
  AddressedMessages MemberGone(TimePoint now, int32_t node, const std::string& why);
  // Halts the job for those who are leaving, as soon as nothing is in flight, and says so.
  void HaltForLeavers(TimePoint now, AddressedMessages& out);
  AddressedMessages OnRankSession(int32_t from, const v1::RankSession& session);
  AddressedMessages OnRegistration(TimePoint now, int32_t from,
                                   const v1::Registration& registration);
  AddressedMessages OnRankGone(TimePoint now, int32_t from, const v1::RankGone& gone);
  AddressedMessages OnReports(TimePoint now, int32_t from, const v1::Reports& reports);
  AddressedMessages OnPlanReady(TimePoint now, const v1::PlanReady& ready);
  AddressedMessages OnLaneLost(TimePoint now, const v1::LaneLost& lost);
  AddressedMessages OnMemberState(TimePoint now, int32_t from, const v1::MemberState& state);
  AddressedMessages OnNewestSnapshot(TimePoint now, int32_t from, const v1::NewestSnapshot& newest);
  // Every node has said what it still has of the job. `newest`: null as long as it is not known.
  AddressedMessages FormAnew(TimePoint now, const v1::NewestSnapshot* newest);
  AddressedMessages GoOn(const v1::NewestSnapshot* newest);
  // Where the job went with a node's memory: the newest snapshot is all that is left of it.
  AddressedMessages GoBackOrEnd(const v1::MemberState& holder, bool has_state, int32_t without,
                                const v1::NewestSnapshot& newest);
  // New lanes on every node, with the memory that there is, in the present epoch.
  AddressedMessages Reform();
  // The job, as `plan` knows it, goes on from the snapshot of `step`, in an epoch of its own: what
  // ranks have said of themselves before it names an older one. Members hear of it when it is
  // planned. `asked`: somebody has loaded the snapshot; else memory was lost.
  void RollBack(v1::PlanInputs plan, int64_t step, const std::string& why, bool asked = false);
  void OnLoadSnapshot(const v1::LoadSnapshotOf& load);
  // The machine of a job that was rolled back, or begins with a snapshot: what ranks have done
  // meanwhile, and a restart as soon as all are attached.
  AddressedMessages RestartWhenAttached(TimePoint now);
  // With the first attempt after a snapshot. REQUIRES: every rank is attached.
  AddressedMessages Restart(TimePoint now);
  void NextEpoch();
  // Another lane has died while the same step was the next one; false: once too often.
  bool MayLoseALane();
  AddressedMessages LanesLost(TimePoint now, const std::string& detail);
  // Nodes that were told to prepare and get nothing done: the job does not wait for them.
  AddressedMessages GiveUpUnready(TimePoint now);
  // Ranks of a job that goes back which live, and do not come to it.
  AddressedMessages ExpelUnattached(TimePoint now);
  // Who keeps the job waiting, told to all once it has done so for a while
  // (group_job_waiting.cc). REQUIRES of the first: there is a job.
  [[nodiscard]] JobLacks Lacks() const;
  void TellWaiting(TimePoint now, AddressedMessages& out);
  // What a node that is not ready waits for, as it has said.
  [[nodiscard]] std::string AwaitedBy(int32_t node) const;
  AddressedMessages OnRankAttached(TimePoint now, const v1::RankAttached& attached);
  // Ends a job without state when a rank comes whose weights are not those of another one. Nothing
  // has been written to an arena by then: that begins when all ranks have pushed.
  AddressedMessages CompareFirstWeights(const v1::RankAttached& attached);
  // Ends a job in which an update has made weights infinite or NaN, in place of the next decision.
  AddressedMessages EndWhereNotFinite(const v1::Vote& vote);
  AddressedMessages OnSnapshotMessage(TimePoint now, int32_t from,
                                      const v1::MemberMessage& message);
  AddressedMessages OnRendezvous(const v1::Rendezvous& rendezvous);
  // Every rank has registered. REQUIRES: kRegistering, or kPlanning with other registrations.
  AddressedMessages PlanRegistered();
  // REQUIRES: job_->wire.
  void OrderPlan();
  // The plan that is being made is of no use: ranks register again.
  void DropOrder(TimePoint now);
  // RESOURCE_EXHAUSTED (LAYOUT_TOO_LARGE): the other nodes would not take so much.
  [[nodiscard]] absl::Status CheckPlanBytes(const v1::PlanInputs& inputs) const;
  // Measured anew, the same members would make another plan, whose kernels give other bits.
  [[nodiscard]] std::optional<v1::CostTable> CostsOfPlan() const;
  // Every waiting registration fails with `status`; the job can be registered anew.
  AddressedMessages Refuse(const absl::Status& status);
  AddressedMessages Lost(TimePoint now, OutcomeReason reason, const std::string& detail);
  AddressedMessages EndJob(const std::string& why, const std::string& reason = "",
                           const Metadata& metadata = {});
  // Jobs that are ended, or begun anew (group_job_discard.cc).
  AddressedMessages OnEndJob(int32_t from, const v1::EndJob& end);
  AddressedMessages OnSnapshotsDiscarded(const v1::SnapshotsDiscarded& discarded);
  void BeginAnew(const v1::RankSession& session, AddressedMessages& out);
  // Why the job there is stays, though the session discards it; OK: it is of the same launch.
  [[nodiscard]] absl::Status CheckLaunch(const v1::RankSession& session) const;
  // To the session's node.
  static AddressedMessages Deny(int32_t node, const v1::RankSession& session,
                                const absl::Status& why);
  void EndIfDeserted(TimePoint now, AddressedMessages& out);
  void TellSave(std::optional<v1::SaveState> save, AddressedMessages& out) const;
  // A job that has been lost because a rank did not come back: its state, where it can be saved.
  void SaveLast(TimePoint now, AddressedMessages& out);
  AddressedMessages EndWhenSaved(TimePoint now, const std::string& why);
  // What the step machine wants said. GOs are held back instead, and Complete() adds them.
  AddressedMessages Broadcast(TimePoint now, std::vector<CoordinatorAction> actions);

  // A node that is about to leave.
  struct Leaver {
    TimePoint patience_ends;  // for the attempt in flight
    bool told = false;        // that the job is halted
  };

  GroupJobOptions options_;
  uint32_t epoch_ = 0;
  uint32_t attempts_ = 0;  // counter half of the newest attempt of any job of this epoch
  uint64_t incarnations_ = 0;
  std::map<int32_t, v1::MemberState> states_;                 // by node: since the group formed
  bool finding_ = false;                                      // node 0 looks for a snapshot
  std::vector<std::pair<int32_t, v1::MemberMessage>> early_;  // of ranks, before Formed()
  std::map<int32_t, Leaver> leavers_;                         // by node: since the group formed
  std::unique_ptr<Job> job_;
  std::string name_;                // of the job that there is, or was last
  std::optional<PlanOrder> order_;  // that the caller is about to be given
  AwaitedNews waiting_;
  // The last job that ended. Who could not be reached then still holds it when the group forms
  // anew.
  struct Ended {
    uint64_t incarnation = 0;
    v1::CoordinatorMessage message;
  };
  std::optional<Ended> ended_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_GROUP_JOB_H_
