// The job as one node of the group has it: its phase, its ranks on this node (rank_table.h), its
// lanes (lane_set.h), its steps (step_member.h), its part in snapshots (snapshot_part.h). One event
// at a time in, with the time; what is to be done out (node_actions.h). The coordinator's side of
// the same job is GroupJob. Pure.
//
// Phases, and the events that lead from one to another:
//
//   None         nothing of a job is here
//   Registering  sessions are open; the group has no plan      a session opens
//   Preparing    the plan's memory is being made               the coordinator's plan, or a
//   rollback Starting     memory is there, and lanes are to be          memory is made; lanes are
//   given up Restoring    a snapshot's state goes into the lanes        all lanes are ready, and
//   lack it Mapping      lanes map what ranks have attached before     all lanes are ready, with
//   state Awaiting     this node is ready; the coordinator opens     everything is mapped
//                an attempt when all nodes are
//   Running      attempts are opened and decided               the first attempt of the epoch
//   Failed       it cannot go on; its sessions have yet to     lost: STATE_LOST, PEER_LOST, …
//                hear so, and the last of them ends it
//
//                plan        prepared   lanes ready   mapped    attempt   lanes or memory lost (1)
//   None         Preparing   x          x             x         -         -
//   Registering  Preparing   -          x             x         -         None
//   Preparing    -           Starting   x             x         -         Failed
//   Starting     -           x          (2)           x         (4)       Starting
//   Restoring    -           x          x             (3)       (4)       Starting
//   Mapping      -           x          x             Awaiting  (4)       Starting
//   Awaiting     -           x          x             x         Running   Starting
//   Running      -           x          x             x         Running   Starting
//   Failed       -           -          -             -         -         Failed
//
// (1) As the coordinator says: Reform and RollBack lead to Starting; a group that breaks before the
// first attempt leads to Failed. (2) Restoring, Mapping or Awaiting, whatever is left to do.
// (3) When lanes have loaded what was restored: Mapping or Awaiting. (4) The phase stays: a job
// that is given up while its lanes come tells its trainers so in an attempt. x: impossible
// (impossible.h); -: ignored. A layout that is refused leads from Preparing, Starting, Mapping and
// Awaiting to Registering; the job's end from everywhere to None.
//
// The link to the group is Broken (epoch 0), Formed, or Halted: nothing more is decided until it
// has formed anew, because this node leaves.
//
// All that a successor of this process needs to go on is in its record (job_record.h). Not in it,
// because whoever goes on begins anew with it: deadlines and for how long something has lasted (a
// broken group, lanes that are silent or condemned, resources that lack), what the coordinator has
// said of who keeps it waiting, figures, and whether the snapshot directory hangs.
//
// Threads: one at a time. References into a session or the job hold until the next event.
#ifndef DMUOND_SCHEDULER_JOB_NODE_JOB_H_
#define DMUOND_SCHEDULER_JOB_NODE_JOB_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/record.pb.h"
#include "dmuond/v1/snapshot.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "dmuond/v1/types.pb.h"
#include "scheduler/job/job_record.h"
#include "scheduler/job/lane_set.h"
#include "scheduler/job/node_actions.h"
#include "scheduler/job/planned_job.h"
#include "scheduler/job/rank_table.h"
#include "scheduler/job/snapshot_part.h"
#include "scheduler/step_member.h"

namespace dmuond::scheduler {

struct NodeJobOptions {
  int32_t node = 0;
  int32_t nodes = 1;
  int32_t lanes = 1;       // of each node
  bool snapshots = false;  // there is a directory for them
  LaneWatchOptions watch;
  std::chrono::milliseconds register_timeout{120'000};
  std::chrono::milliseconds session_linger{600'000};
};

// A snapshot that a job can go on from.
struct ResumePoint {
  v1::SnapshotManifest manifest;
  std::map<TrainerRank, std::string> trainers;  // what all ranks gave with the step

  [[nodiscard]] int64_t step() const { return manifest.step(); }
};

class NodeJob {
 public:
  enum class Phase : uint8_t {
    kNone,
    kRegistering,
    kPreparing,
    kStarting,
    kRestoring,
    kMapping,
    kAwaiting,
    kRunning,
    kFailed
  };

  explicit NodeJob(const NodeJobOptions& options) : options_(options) {}

  // ---- the record: all of it can be asked between two events ----
  // One that goes on from the record of another one. `planned`: of the recorded plan's inputs, as
  // MakePlannedJob() says; null pointers where the record says that the job is not prepared. `now`:
  // when what lasts is counted to have begun. INVALID_ARGUMENT: no NodeJob with these options has
  // written it.
  [[nodiscard]] static absl::StatusOr<NodeJob> FromRecord(const NodeJobOptions& options,
                                                          const JobRecord& record,
                                                          PlannedJob planned, TimePoint now);
  // Where this has not grown, no part has changed.
  [[nodiscard]] uint64_t record_version() const {
    return progress_version_ + submitted_version_ + ranks_.version();
  }
  // Ascending.
  [[nodiscard]] std::vector<RecordPart> RecordParts() const;
  // Adds the part to the record. REQUIRES: it is one of RecordParts().
  void WritePart(const RecordPart& part, JobRecord& record) const;

  // ---- the group ----
  [[nodiscard]] node::Actions OnFormed(TimePoint now, uint32_t epoch);
  [[nodiscard]] node::Actions OnBroken(TimePoint now, const std::string& why);
  // What the coordinator says of the job; what it says of another one is ignored, unless that is to
  // begin or to end here. Orders for a node's snapshot directory (FindSnapshot, WriteManifest,
  // DiscardSnapshots) are not this machine's.
  [[nodiscard]] node::Actions OnMessage(TimePoint now, const v1::CoordinatorMessage& message);
  // What is only seen from outside, for OnTick().
  struct Sight {
    bool lanes_end = false;  // processes that were ended may still be there
    LaneSet::ProcessorTime processor_time;
    std::function<int64_t(LaneIndex)> pid;
    // While memory is made: bytes that are there, and whether the plan is.
    uint64_t prepared_bytes = 0;
    bool planned = false;
    uint64_t read_bytes = 0;  // of the snapshot that is being read
  };
  // Deadlines, lanes that hang, and what the coordinator is told of a node that is not ready. Every
  // 100 ms.
  [[nodiscard]] node::Actions OnTick(TimePoint now, const Sight& sight);
  // No process that was ended is there any more: every place for a lane is free. Repeated.
  [[nodiscard]] node::Actions OnPlacesFree();

  // ---- what came of actions ----
  struct Prepared {
    PlannedJob planned;
    bool host_copies = false;  // snapshots can be made
  };
  [[nodiscard]] node::Actions OnPrepared(TimePoint now, absl::StatusOr<Prepared> prepared);
  [[nodiscard]] node::Actions OnLanesStarted(TimePoint now, const absl::Status& started);
  [[nodiscard]] node::Actions OnLaneReport(TimePoint now, LaneIndex lane,
                                           const v1::LaneReport& report);
  [[nodiscard]] node::Actions OnLaneGone(TimePoint now, LaneIndex lane,
                                         const std::string& last_words);
  // `updates`: by lane, in the order of its host copy.
  struct Restored {
    ResumePoint from;
    std::vector<std::vector<uint64_t>> updates;
  };
  // `older_snapshot`: the step of a whole one that the job may go back to instead; 0: there is
  // none.
  [[nodiscard]] node::Actions OnRestored(TimePoint now, absl::StatusOr<Restored> restored,
                                         int64_t older_snapshot = 0);
  [[nodiscard]] node::Actions OnWritten(uint64_t attempt,
                                        const absl::StatusOr<std::vector<v1::SnapshotFile>>& files);
  // What is being written of a snapshot has failed here, whatever becomes of it.
  [[nodiscard]] node::Actions OnDiskHangs(const std::string& how);
  // The directory hangs, or does not any more (empty): snapshots are answered accordingly.
  void SetDiskHangs(std::string how) { disk_hangs_ = std::move(how); }

  // ---- sessions ----
  struct Opening {
    uint64_t id = 0;  // of the session
    int32_t rank = 0;
    int32_t world_size = 0;
    std::string job;
    std::string launch;  // of a session that discards; else empty
    v1::OpenSessionRequest::Resume resume = v1::OpenSessionRequest::RESUME_NEVER;
    int64_t pid = 0;
    std::string client;
    int32_t home_lane = 0;
  };
  // What is to happen before the session can be open.
  struct Later {            // something has to change first: ask again
    absl::Status why;       // for who cannot wait any longer
    bool restores = false;  // bytes come: whoever waits may wait longer
  };
  struct MustDiscard {};  // the job that there is has to end first (Discard())
  struct NeedsResume {
  };  // the snapshot directory is to be looked at: SetResume() has what there is
  struct Opened {
    uint64_t incarnation = 0;
    uint64_t job_incarnation = 0;  // 0: the group has not planned the job
    bool has_state = false;
    int64_t last_committed = 0;
    std::optional<int64_t> durable_step;
    std::string trainer_state;
    bool begins_job = false;  // it is the first session of a job
  };
  using OpenAnswer = std::variant<Later, MustDiscard, NeedsResume, absl::Status, Opened>;
  // Why the session cannot be open now; nullopt: it can. `resume`: what the directory has, once it
  // was looked at for this call.
  [[nodiscard]] std::optional<OpenAnswer> WhyNotOpen(
      const Opening& opening, const std::optional<std::optional<ResumePoint>>& resume) const;
  // Opened, or WhyNotOpen().
  [[nodiscard]] OpenAnswer Open(TimePoint now, const Opening& opening,
                                const std::optional<std::optional<ResumePoint>>& resume,
                                node::Actions& actions);
  // Why a session has to wait for longer than its caller can be kept. REQUIRES: there is a job.
  [[nodiscard]] absl::Status NotReadyToOpen(int32_t rank) const;
  // A session that the group does not take is forgotten, with a job that it alone has named.
  [[nodiscard]] node::Actions ForgetDenied(uint64_t id);
  // The rank wants the job that there is to end. REQUIRES: there is one.
  [[nodiscard]] node::Actions Discard(const Opening& opening);
  // Somebody ends the job on all nodes. REQUIRES: there is one.
  [[nodiscard]] node::Actions AskForEnd(const std::string& why);
  // The job ends here alone: the coordinator knows it no longer. REQUIRES: Failed.
  [[nodiscard]] node::Actions EndHere(const std::string& why, const absl::Status& told);

  // Whether a layout may be registered in place of the one that the rank's predecessor had.
  [[nodiscard]] absl::Status CheckReplacement(const RankTable::Session& session,
                                              const v1::Registration& registration) const;
  // REQUIRES: the session is Open or Registered.
  [[nodiscard]] node::Actions Register(uint64_t id, v1::Registration registration,
                                       std::shared_ptr<const Registration> layout);

  // Why a trainer's memory cannot be mapped yet; nullopt: it can.
  [[nodiscard]] std::optional<absl::Status> WhyNotYetMapped(uint64_t id) const;
  [[nodiscard]] node::Actions BeginMapping(uint64_t id, v1::LaneCommand command);
  // What the rank's dead trainer had attached goes; its replacement brings other memory.
  void DropAttachment(int32_t rank) { ranks_.DropAttachment(rank); }
  // Every lane has mapped the session's memory. REQUIRES: no lane is being replaced.
  [[nodiscard]] bool AllMapped(uint64_t id) const;
  // The session's trainer can submit. REQUIRES: AllMapped().
  [[nodiscard]] node::Actions Attach(uint64_t id, std::vector<std::string> weight_digests,
                                     bool broadcast);
  // Weights are published to a rank that has those of attempt `has`, if newer ones are there and
  // no attempt will bring them.
  [[nodiscard]] node::Actions PublishSince(uint64_t id, uint64_t has);
  // Its trainer is told that it is attached. REQUIRES: Attach().
  void TellAttached(uint64_t id) { ranks_.Tell(id); }
  // REQUIRES: the session must acknowledge.
  [[nodiscard]] node::Actions Acknowledge(uint64_t id);
  [[nodiscard]] node::Actions Close(uint64_t id);
  [[nodiscard]] node::Actions OnTrainerGone(uint64_t id, const std::string& why);

  // ---- steps ----
  // A session's part of a step or a push. The answer is pending where it was taken. FAILED_
  // PRECONDITION as StepMember::OnSubmission; BUFFERS_MISSING, DRAINING.
  [[nodiscard]] absl::StatusOr<StepAnswer> Submit(uint64_t id, const Submission& submission,
                                                  const std::string& trainer_state,
                                                  node::Actions& actions);
  // The answer of (step, attempt), if there is one.
  [[nodiscard]] absl::StatusOr<StepAnswer> AnswerOf(uint64_t id, StepId step,
                                                    Attempt attempt) const;
  [[nodiscard]] absl::Status CheckAttached(const RankTable::Session& session) const;
  // What a trainer hears that has not acknowledged a rollback; OK: it has.
  [[nodiscard]] static absl::Status CheckNotRolledBack(const RankTable::Session& session);
  [[nodiscard]] static absl::Status RolledBackError(int32_t rank, const Rollback& back);

  // ---- snapshots ----
  [[nodiscard]] node::Actions AskForSnapshot();
  // Has the group go back to the snapshot of a step, which exists.
  [[nodiscard]] node::Actions AskToGoBack(int64_t step, const std::string& why);

  // ---- departures ----
  // This node is about to leave: it takes no new sessions, and hears no more of jobs that end.
  void SetLeaves() {
    leaves_ = true;
    ++progress_version_;
  }
  [[nodiscard]] bool leaves() const { return leaves_; }
  // Asks the coordinator to halt the job, once the attempt in flight has ended; again in each
  // epoch.
  [[nodiscard]] node::Actions AskToHalt(std::chrono::milliseconds patience);
  [[nodiscard]] bool halted() const { return halted_; }
  // The daemon leaves: everybody hears so, and the job ends here.
  [[nodiscard]] node::Actions Leave();

  // ---- for who watches ----
  [[nodiscard]] Phase phase() const { return job_ == nullptr ? Phase::kNone : job_->phase; }
  [[nodiscard]] bool exists() const { return job_ != nullptr; }
  [[nodiscard]] uint32_t epoch() const { return epoch_; }  // 0: the group has not formed
  [[nodiscard]] const RankTable& ranks() const { return ranks_; }
  // Why the job cannot go on; OK: it can, or there is none.
  [[nodiscard]] absl::Status failure() const {
    return job_ == nullptr ? absl::OkStatus() : job_->failed;
  }
  // No two jobs of this process have the same; 0: there is none.
  [[nodiscard]] uint64_t number() const { return job_ == nullptr ? 0 : job_->number; }
  // Still the same job, and it can go on. JOB_ENDED, or failure().
  [[nodiscard]] absl::Status CheckStill(uint64_t number) const;
  // REQUIRES of the following: there is a job.
  [[nodiscard]] const std::string& name() const { return job_->name; }
  [[nodiscard]] int32_t world_size() const { return job_->world_size; }
  [[nodiscard]] const std::string& launch() const { return job_->launch; }
  [[nodiscard]] const v1::PlanInputs& wire() const { return job_->wire; }
  // Null until the node has prepared it.
  [[nodiscard]] const std::shared_ptr<const Plan>& plan() const { return job_->planned.plan; }
  [[nodiscard]] const std::shared_ptr<const PlanInputs>& inputs() const {
    return job_->planned.inputs;
  }
  // The group has planned it.
  [[nodiscard]] bool planned() const;
  [[nodiscard]] const LaneSet& lanes() const { return job_->lanes; }
  // Null before the first attempt, and while it goes back to a snapshot.
  [[nodiscard]] const StepMember* steps() const { return job_->steps ? &*job_->steps : nullptr; }
  [[nodiscard]] const SnapshotPart& snapshot() const { return job_->snapshot; }
  // A push, load or step has committed.
  [[nodiscard]] bool has_state() const { return job_->has_state; }
  // The job has state, or will have it once its ranks are attached.
  [[nodiscard]] bool HasOrGetsState() const;
  // It goes on from a snapshot, and has not begun.
  [[nodiscard]] bool begins_from_snapshot() const {
    return !job_->has_state && job_->wire.restore_step() > 0;
  }
  // Its lanes do not have the snapshot's state yet.
  [[nodiscard]] bool restores() const;
  // Here, or on a node that this one waits for.
  [[nodiscard]] bool restores_somewhere() const;
  // Lanes are being replaced, or prepared for the first time.
  [[nodiscard]] bool lanes_come() const {
    return job_->phase >= Phase::kStarting && job_->phase <= Phase::kMapping;
  }
  // The state is in lanes that work, on every node.
  [[nodiscard]] bool settled() const;
  // Every lane has published the last decided attempt: the units' state is that of LastCommitted().
  [[nodiscard]] bool Published() const;
  // The newest state is in a snapshot, and no step that this node has yet to hear of can follow.
  [[nodiscard]] bool Saved() const;
  [[nodiscard]] int64_t LastCommitted() const;  // 0 where there is no job
  [[nodiscard]] uint64_t applied_attempt() const { return job_->applied_attempt; }
  // What the rank gave with the last committed step.
  [[nodiscard]] std::string TrainerStateOf(int32_t rank) const;
  [[nodiscard]] const std::optional<ResumePoint>& resume() const { return job_->resume; }
  [[nodiscard]] const Rollback& back() const { return job_->back; }
  // Every rank is attached, and the snapshot's weights are on their way.
  [[nodiscard]] bool Restarted() const;
  // Somebody will not come: the job does not go on from the snapshot, and why.
  [[nodiscard]] std::optional<std::string> WhyNotRestarted() const;
  // The job is lost, or ends when its last state is saved: what a session that opens now waits for.
  [[nodiscard]] bool ending() const { return job_->ending; }
  [[nodiscard]] const std::optional<TimePoint>& broken_since() const { return job_->broken_since; }
  // What the coordinator has said last of who keeps it waiting, and when.
  [[nodiscard]] const v1::Waiting& waiting() const { return job_->waiting; }
  [[nodiscard]] TimePoint waiting_told() const { return job_->waiting_told; }
  struct Figures {
    int64_t skipped_steps = 0;
    int64_t aborted_attempts = 0;
    double gradient_norm = 0;
    v1::StepTiming timing;  // of the newest attempt that every lane has published
  };
  [[nodiscard]] const Figures& figures() const { return job_->figures; }

 private:
  // What a rank gave the job to keep with a step.
  struct TrainerState {
    Attempt attempt;  // that it was submitted with
    std::string bytes;
  };
  struct Job {
    // The only way from one phase to another. REQUIRES: the table above has it.
    void Enter(Phase next);

    Phase phase = Phase::kRegistering;
    std::string name;
    int32_t world_size = 0;
    uint64_t number = 0;
    std::string launch;   // that has begun it with RESUME_DISCARD; empty: it began otherwise
    v1::PlanInputs wire;  // empty in kRegistering
    PlannedJob planned;   // from kStarting on
    bool host_copies = false;
    absl::Status failed;           // in kFailed
    bool has_state = false;        // a push, load or step has committed
    bool goes_back = false;        // to a snapshot, and no attempt has been opened since
    bool state_is_void = false;    // what lies in the lanes' memory: a snapshot follows
    bool over_old_memory = false;  // lanes come after others, which have worked in the same memory
    bool lanes_wanted = false;     // in kStarting: for this epoch, as soon as there is place
    bool ending = false;           // a rank is missing for good: it ends when its state is saved
    Rollback back;                 // its last
    std::optional<ResumePoint> resume;  // what it goes on from, where this node has looked for it
    bool restored = false;              // the lanes have that state
    LaneSet lanes;
    std::optional<StepMember> steps;
    SnapshotPart snapshot;
    uint64_t applied_attempt = 0;                      // newest that committed or was skipped
    uint64_t published_attempt = 0;                    // newest that every lane has published
    uint64_t publishing_attempt = 0;                   // newest that any lane has published
    v1::StepTiming publishing;                         // slowest lane so far of publishing_attempt
    std::map<int32_t, TrainerState> submitted_states;  // by rank: of the open attempt
    std::map<int32_t, TrainerState> trainer_states;    // by rank: of the last committed step
    Figures figures;
    std::optional<TimePoint> broken_since;
    // Since when the machine has had no memory, descriptors or processes for its new lanes.
    std::optional<TimePoint> lanes_lack_resources_since;
    int32_t progress_tells = 0;  // since it was ready last
    TimePoint progress_told;
    v1::Waiting waiting;
    TimePoint waiting_told;
  };

  // Collects what is to be done; Take() hands it out at the end of an event.
  void Do(node::Action action) { actions_.push_back(std::move(action)); }
  // The event may have changed anything; for an event that has changed nothing that is recorded as
  // progress there is TakeUnrecorded().
  [[nodiscard]] node::Actions Take() {
    ++progress_version_;
    return TakeUnrecorded();
  }
  [[nodiscard]] node::Actions TakeUnrecorded() { return std::exchange(actions_, {}); }
  void Wake() { Do(node::Wake{}); }
  // In the job's name.
  void Tell(v1::MemberMessage message);
  void Say(node::Note::Level level, const char* message,
           std::vector<node::Note::Field> fields = {});
  void ToLane(LaneIndex lane, v1::LaneCommand command);
  void ToReadyLanes(const v1::LaneCommand& command, bool may_wait = false);

  // Messages, by kind. Their phases are checked in OnMessage().
  void OnPlan(const v1::PlanInputs& wire);
  void OnRefused(const v1::RegistrationRefused& refused);
  void OnOpenAttempt(const v1::OpenAttempt& open);
  void OnGoes(const v1::Goes& goes);
  void OnDecision(const v1::Decision& wire);
  void OnRepublish(const v1::Republish& republish);
  void OnExpel(const v1::ExpelRank& expel);
  void OnGatherOverdue(TimePoint now, const v1::GatherOverdue& overdue);
  [[nodiscard]] node::Actions Hear(TimePoint now, const v1::CoordinatorMessage& message);
  // The message that is being handled is of a job that this node does not have.
  [[nodiscard]] bool OfAnotherJob() const;
  void OnReform(const v1::Reform& reform);
  void OnRollBack(const v1::RollBack& back);
  void OnSave(const v1::SaveState& save);
  void OnSnapshotDone(const v1::SnapshotDone& done);
  void OnHalted(const v1::Halted& halted);
  void OnJobEnded(const v1::JobEnded& ended);

  void BeginJob(const std::string& name, int32_t world_size);
  // Ends a job that registers here and is not, or is no longer, the one that the group runs.
  void GiveWayTo(const v1::PlanInputs& plan);
  void StartPreparing(const v1::PlanInputs& wire);
  void TellMemberState();
  void TellPlanFailed(const absl::Status& why, int64_t older_snapshot = 0);
  // The coordinator takes this node to have a job that it has not.
  void TellCannotGoOn();
  void TellPlanReady();
  void TellRanksAgain();
  void TellVote(Attempt attempt, const std::vector<UnitNorm>& norms);
  [[nodiscard]] v1::MemberMessage NewsOfSession(const RankTable::Session& session) const;
  [[nodiscard]] v1::MemberMessage NewsOfAttached(const RankTable::Session& session) const;
  void GiveUpLanes();
  void ReplaceLanes(const std::string& why);
  // All lanes are ready: what they still have to do before this node is.
  void PrepareLanes();
  void BeginSteps(StepId last_committed);
  [[nodiscard]] std::vector<TrainerRank> LocalRanks() const;
  // What the rank gave with its submission under the open attempt; null: nothing.
  [[nodiscard]] const std::string* SubmittedState(int32_t rank) const;
  void WriteProgress(v1::RecordedProgress& out) const;
  void WritePlan(v1::RecordedPlan& out) const;
  void FinishAgain(const v1::Decision& wire, const Decision& decision);
  void OnPublished(LaneIndex lane, const v1::LaneReport::Published& published);
  void OnGathered(LaneIndex lane, const v1::LaneReport::Gathered& gathered);
  void OnCopied(LaneIndex lane, const v1::LaneReport::Copied& copied);
  void OnStateLoaded(LaneIndex lane, const v1::LaneReport::StateLoaded& loaded);
  void ForgetState();
  // What lanes are waited for, of which they have all that they need.
  [[nodiscard]] LaneSet::Owed Owed() const;
  void WatchLanes(TimePoint now, const Sight& sight);
  void Obey(TimePoint now, const std::vector<LaneSet::Order>& orders, const std::string& why,
            const Sight& sight);
  // These trainers count as dead; false: there are none.
  bool Expel(const std::vector<int32_t>& ranks, const std::string& why);
  void TellProgress(TimePoint now, const Sight& sight);
  void EndSession(uint64_t id, bool closed, const std::string& detail);
  void DropDenied(uint64_t id);
  // The job cannot go on, and the coordinator knows it no longer. It ends with its last session.
  void Abandon(const absl::Status& why);
  // `told`: what its sessions hear; OK: that it has ended, and that they may begin anew.
  void EndJob(const std::string& why, const absl::Status& told = absl::OkStatus());
  [[nodiscard]] bool KnowsItsStep(int32_t rank) const;
  [[nodiscard]] absl::Status CheckOpen(const Opening& opening, bool has_state,
                                       int64_t last_committed) const;

  const NodeJobOptions options_;
  uint32_t epoch_ = 0;  // 0: broken
  bool halted_ = false;
  Attempt halted_attempt_;  // the one that was open when the job was halted: never decided
  bool leaves_ = false;
  std::string disk_hangs_;
  uint64_t jobs_ = 0;  // that there have been
  RankTable ranks_;
  std::unique_ptr<Job> job_;
  // Of the event that is being handled.
  node::Actions actions_;
  std::string about_;  // the job that a message names
  // These grow when what the record says of them may have changed.
  uint64_t progress_version_ = 0;
  uint64_t plan_version_ = 0;       // with progress_version_
  uint64_t submitted_version_ = 0;  // submissions under the open attempt
};

[[nodiscard]] const char* Name(NodeJob::Phase phase);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_NODE_JOB_H_
