// The job as one node of the group has it: its phase, its ranks on this node (rank_table.h), its
// lanes (lane_set.h), its steps (step_member.h), its part in snapshots (snapshot_part.h). One event
// at a time in, with the time; what is to be done out (node_actions.h). The coordinator's side of
// the same job is GroupJob. Pure.
//
// The phases, and how each begins:
//
//   None         There is no job here. Begins when a job ends.
//   Registering  Sessions are open, and the group has no plan. Begins with the first session.
//   Preparing    The plan's memory is being made. Begins with the coordinator's plan or rollback.
//   Starting     Lanes are to be started over the memory. Begins when the memory is made, and
//                whenever lanes are given up.
//   Restoring    Lanes take the state of a snapshot. Begins when all are ready and lack it.
//   Mapping      Lanes map what ranks have attached before. Begins when all are ready and have
//                their state.
//   Awaiting     This node is ready, and others may not be. Begins when everything is mapped.
//   Running      Attempts are opened and decided. Begins with the first attempt of the epoch.
//   Parked       Lanes cannot work, and there are none; the state stays in memory. Begins when the
//                coordinator says so, and ends when it wants new lanes.
//   Failed       The job is lost (STATE_LOST, PEER_LOST, ...). Its sessions have yet to hear so,
//                and the last of them ends it.
//
// The next phase, by phase and event:
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
//   Parked       -           x          x             x         (4)       Starting
//   Failed       -           -          -             -         -         Failed
//
// (1) The coordinator decides: Reform and RollBack lead to Starting, and Parked leads to Parked
// from Starting and every later phase. A group that breaks before the
// first attempt leads to Failed. (2) Restoring, Mapping or Awaiting: whatever is left to do.
// (3) Mapping or Awaiting, once lanes have loaded the restored state. (4) The phase stays: the
// coordinator gives a job up by an attempt, and does so while lanes come, too. x: impossible
// (impossible.h); -: ignored. A layout that is refused leads from Preparing, Starting, Mapping and
// Awaiting to Registering. The end of the job leads from every phase to None.
//
// The link to the group is Broken (epoch 0), Formed, or Halted. It is Halted because this node
// leaves: nothing more is decided until the group has formed anew.
//
// The record (job_record.h) has all that a successor of this process needs to go on. It lacks what
// a successor counts or asks anew: deadlines, for how long something has lasted (a broken group,
// silent or condemned lanes, missing resources), whom the coordinator waits for, figures, and
// whether the snapshot directory hangs.
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
#include "scheduler/job/job_ends.h"
#include "scheduler/job/job_figures.h"
#include "scheduler/job/job_record.h"
#include "scheduler/job/job_uids.h"
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
  JobUids job_uids;
};

// A snapshot that a job can go on from.
struct ResumePoint {
  v1::SnapshotManifest manifest;
  std::map<TrainerRank, std::string> trainers;  // what all ranks gave with the step

  [[nodiscard]] int64_t step() const { return manifest.step(); }
  [[nodiscard]] SnapshotId id() const {
    return {Attempt(manifest.attempt()), StepId(manifest.step())};
  }
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
    kFailed,
    kParked
  };

  explicit NodeJob(const NodeJobOptions& options) : options_(options) {}

  // ---- the record; between two events only ----
  // A NodeJob that goes on where the one that wrote `record` has stopped. `planned` is what
  // MakePlannedJob() makes of the recorded plan's inputs; its pointers are null where the record
  // says that the job is not prepared. What lasts counts as begun at `now`. INVALID_ARGUMENT: no
  // NodeJob with these options has written the record.
  [[nodiscard]] static absl::StatusOr<NodeJob> FromRecord(const NodeJobOptions& options,
                                                          const JobRecord& record,
                                                          PlannedJob planned, TimePoint now);
  // Grows whenever a part of the record may have changed.
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
  // A message of the coordinator. One of another job is ignored, unless it begins or ends a job.
  // Orders for a node's snapshot directory (FindSnapshot, WriteManifest, DiscardSnapshots) are not
  // for this machine.
  [[nodiscard]] node::Actions OnMessage(TimePoint now, const v1::CoordinatorMessage& message);
  // What only the caller of OnTick() can see.
  struct Sight {
    bool lanes_end = false;  // lanes that were ended may still be running
    LaneSet::ProcessorTime processor_time;
    std::function<int64_t(LaneIndex)> pid;
    bool planned = false;         // in Preparing: the plan is made
    uint64_t prepared_bytes = 0;  // in Preparing: so much memory is made
    uint64_t read_bytes = 0;      // in Restoring: so much of the snapshot is read
  };
  // Call it every 100 ms. It ends what has waited for too long, watches lanes, and tells the
  // coordinator what a node that is not ready waits for.
  [[nodiscard]] node::Actions OnTick(TimePoint now, const Sight& sight);
  // No lane that was ended is running any more: new ones can start. It may be told repeatedly.
  [[nodiscard]] node::Actions OnPlacesFree();

  // ---- what came of actions ----
  struct Prepared {
    PlannedJob planned;
    bool host_copies = false;  // the memory has room for snapshots' copies
  };
  [[nodiscard]] node::Actions OnPrepared(TimePoint now, absl::StatusOr<Prepared> prepared);
  [[nodiscard]] node::Actions OnLanesStarted(TimePoint now, const absl::Status& started);
  [[nodiscard]] node::Actions OnLaneReport(TimePoint now, LaneIndex lane,
                                           const v1::LaneReport& report);
  [[nodiscard]] node::Actions OnLaneGone(TimePoint now, LaneIndex lane,
                                         const std::string& last_words);
  struct Restored {
    ResumePoint from;
    std::vector<std::vector<uint64_t>> updates;  // by lane, in the order of its host copy
  };
  // `older` is a whole snapshot that the job may go back to instead.
  [[nodiscard]] node::Actions OnRestored(TimePoint now, absl::StatusOr<Restored> restored,
                                         const std::optional<SnapshotId>& older = std::nullopt);
  [[nodiscard]] node::Actions OnWritten(uint64_t attempt,
                                        const absl::StatusOr<std::vector<v1::SnapshotFile>>& files);
  // The directory hangs: the snapshot that is being written counts as failed from now on.
  [[nodiscard]] node::Actions OnDiskHangs(const std::string& how);
  // Snapshots that are ordered from now on fail with `how`; empty: the directory works again.
  void SetDiskHangs(std::string how) { disk_hangs_ = std::move(how); }

  // Lanes that were refused for other bits may work from now on, and start at once. Returns in what
  // they differ. NOT_FOUND: no job runs here. FAILED_PRECONDITION (LANES_NOT_REFUSED).
  [[nodiscard]] absl::StatusOr<std::string> AcceptLanes(TimePoint now, node::Actions& actions);

  // ---- the end ----
  // Somebody ends the job on all nodes. REQUIRES: there is one.
  [[nodiscard]] node::Actions AskForEnd(const std::string& why);
  // The job ends here alone: the coordinator does not know it any more. REQUIRES: Failed.
  [[nodiscard]] node::Actions EndHere(const std::string& why, const absl::Status& told);

  // ---- departures ----
  // Asks the coordinator to halt the job, once the attempt in flight has ended; again in each
  // epoch.
  [[nodiscard]] node::Actions AskToHalt(std::chrono::milliseconds patience);
  [[nodiscard]] bool halted() const { return halted_; }  // for this node
  // This node is about to leave: it takes no new sessions, and hears no more of jobs that end.
  void SetLeaves() {
    leaves_ = true;
    ++progress_version_;
  }
  [[nodiscard]] bool leaves() const { return leaves_; }
  // The daemon leaves: all sessions hear so, and the job ends here.
  [[nodiscard]] node::Actions Leave();

  // ---- sessions ----
  struct Opening {
    uint64_t id = 0;  // of the session
    int32_t rank = 0;
    int32_t world_size = 0;
    std::string job;
    std::string launch;  // of a session with RESUME_DISCARD; else empty
    v1::OpenSessionRequest::Resume resume = v1::OpenSessionRequest::RESUME_NEVER;
    int64_t pid = 0;          // for people; 0: it has none here
    uint32_t uid = 0;         // user that the process is of
    bool end_is_seen = true;  // as RankTable::Session's
    std::string client;
    int32_t home_lane = 0;
    // User that snapshots of the job name, those that it discards, too; unset: they name nobody.
    std::optional<uint32_t> owner_uid;
  };
  // Something has to change before the session can be open: ask again.
  struct Later {
    absl::Status why;  // what the caller is told when it cannot wait any longer
    // A snapshot is being read, the job is parked, or it waits for its group: it may take longer.
    bool long_wait = false;
  };
  // The present job has to end first: call Discard().
  struct MustDiscard {};
  // The caller is to look into the snapshot directory, and to ask again with what it has found:
  // nothing, for a session that discards. It refuses a session whose user the snapshots are not
  // for.
  struct NeedsResume {};
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
  // Why the session cannot be open now; nullopt: it can. `resume` is empty until the directory was
  // looked at for this call, and holds nullopt where that has no snapshot of the job.
  [[nodiscard]] std::optional<OpenAnswer> WhyNotOpen(
      const Opening& opening, const std::optional<std::optional<ResumePoint>>& resume) const;
  // JOB_OF_ANOTHER_USER, which WhyNotOpen() says, too: before a caller waits for anything.
  [[nodiscard]] absl::Status CheckUser(const Opening& opening) const;
  // Opens the session, or says why not, as WhyNotOpen() does.
  [[nodiscard]] OpenAnswer Open(TimePoint now, const Opening& opening,
                                const std::optional<std::optional<ResumePoint>>& resume,
                                node::Actions& actions);
  // What a caller is told that has waited in vain for its session. REQUIRES: there is a job.
  [[nodiscard]] absl::Status NotReadyToOpen(int32_t rank) const;
  // Asks for the end of the present job, which the rank wants to begin anew. REQUIRES: there is
  // one.
  [[nodiscard]] node::Actions Discard(const Opening& opening);

  // Whether a layout may be registered in place of the one that the rank's predecessor had.
  [[nodiscard]] absl::Status CheckReplacement(const RankTable::Session& session,
                                              const v1::Registration& registration) const;
  // REQUIRES: the session is Open or Registered.
  [[nodiscard]] node::Actions Register(uint64_t id, v1::Registration registration,
                                       std::shared_ptr<const Registration> layout);

  // Why a trainer's memory cannot be mapped yet; nullopt: it can.
  [[nodiscard]] std::optional<absl::Status> WhyNotYetMapped(uint64_t id) const;
  [[nodiscard]] node::Actions BeginMapping(uint64_t id, v1::LaneCommand command);
  // Forgets what the rank's dead trainer had attached: its replacement brings other memory.
  void DropAttachment(int32_t rank) { ranks_.DropAttachment(rank); }
  // Every lane has mapped the session's memory. REQUIRES: no lane is being replaced.
  [[nodiscard]] bool AllMapped(uint64_t id) const;
  // Some lane may still have mapped what the last session of the rank had exported. The rank does
  // not come again before, and its trainer may not free that memory.
  [[nodiscard]] bool Unmaps(int32_t rank) const {
    return job_ != nullptr && job_->lanes.unmapping(rank);
  }
  // The same of any rank.
  [[nodiscard]] bool Unmaps() const { return job_ != nullptr && job_->lanes.unmapping(); }
  // The session's trainer can submit. REQUIRES: AllMapped().
  [[nodiscard]] node::Actions Attach(uint64_t id, std::vector<std::string> weight_digests,
                                     bool broadcast);
  // The session's trainer has the weights of attempt `has`. If there are newer ones that no attempt
  // is going to publish, publishes them to it.
  [[nodiscard]] node::Actions PublishSince(uint64_t id, uint64_t has);
  // Its trainer hears that it is attached. REQUIRES: Attach() came before.
  void TellAttached(uint64_t id) { ranks_.Tell(id); }
  // REQUIRES: the session must acknowledge.
  [[nodiscard]] node::Actions Acknowledge(uint64_t id);
  [[nodiscard]] node::Actions Close(uint64_t id);
  [[nodiscard]] node::Actions OnTrainerGone(uint64_t id, const std::string& why);

  // ---- steps ----
  // A session's part in a step or a push. The answer is pending if it was taken.
  // FAILED_PRECONDITION as StepMember::OnSubmission() says, or BUFFERS_MISSING; UNAVAILABLE:
  // DRAINING.
  [[nodiscard]] absl::StatusOr<StepAnswer> Submit(uint64_t id, const Submission& submission,
                                                  const std::string& trainer_state,
                                                  node::Actions& actions);
  // The answer of (step, attempt), if there is one.
  [[nodiscard]] absl::StatusOr<StepAnswer> AnswerOf(uint64_t id, StepId step,
                                                    Attempt attempt) const;
  [[nodiscard]] absl::Status CheckAttached(const RankTable::Session& session) const;
  // RolledBackError(), as long as the session has not acknowledged a rollback.
  [[nodiscard]] static absl::Status CheckNotRolledBack(const RankTable::Session& session);
  [[nodiscard]] static absl::Status RolledBackError(int32_t rank, const Rollback& back);

  // ---- snapshots ----
  [[nodiscard]] node::Actions AskForSnapshot();
  // The directory has this snapshot of the job. News of it may be lost with the link to the
  // coordinator.
  void OnSnapshotSeen(const SnapshotId& id);
  // Asks the group to go back to the snapshot `to`. REQUIRES: there is a job.
  [[nodiscard]] node::Actions AskToGoBack(const SnapshotId& to, const std::string& why);

  // ---- what it shows (node_job_view.cc) ----
  [[nodiscard]] Phase phase() const { return job_ == nullptr ? Phase::kNone : job_->phase; }
  [[nodiscard]] bool exists() const { return job_ != nullptr; }
  [[nodiscard]] uint32_t epoch() const { return epoch_; }  // 0: the group has not formed
  [[nodiscard]] const RankTable& ranks() const { return ranks_; }
  // Why the job cannot go on; OK: it can, or there is none.
  [[nodiscard]] absl::Status failure() const {
    return job_ == nullptr ? absl::OkStatus() : job_->failed;
  }
  // Tells the jobs of this process apart; 0: there is none.
  [[nodiscard]] uint64_t number() const { return job_ == nullptr ? 0 : job_->number; }
  // OK: the job of this number is still there, and can go on. Else JOB_ENDED, or failure().
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
    return !job_->has_state && job_->wire.has_restore();
  }
  // It goes on from a snapshot whose state its lanes do not have yet.
  [[nodiscard]] bool restores() const;
  // The same, here or on a node that this one waits for.
  [[nodiscard]] bool restores_somewhere() const;
  // Lanes are being replaced, prepared for the first time, or tried again later.
  [[nodiscard]] bool lanes_come() const {
    return (job_->phase >= Phase::kStarting && job_->phase <= Phase::kMapping) || parked();
  }
  [[nodiscard]] bool parked() const { return job_->phase == Phase::kParked; }
  // The state is in lanes that work, on every node.
  [[nodiscard]] bool settled() const;
  // Every lane has published the last decided attempt, so that the state in memory is that of
  // LastCommitted().
  [[nodiscard]] bool Published() const;
  // The newest state is in a snapshot, and no commit can follow that this node has not heard of.
  [[nodiscard]] bool Saved() const;
  [[nodiscard]] int64_t LastCommitted() const;  // 0 where there is no job
  [[nodiscard]] uint64_t applied_attempt() const { return job_->applied_attempt; }
  // What the rank gave with the last committed step.
  [[nodiscard]] std::string TrainerStateOf(int32_t rank) const;
  [[nodiscard]] const std::optional<ResumePoint>& resume() const { return job_->resume; }
  [[nodiscard]] const Rollback& back() const { return job_->back; }
  // A job that has gone back goes on: every rank is attached, and the snapshot's weights are being
  // published.
  [[nodiscard]] bool Restarted() const;
  // Why no lane is started any more: the job is lost (failure()), or the coordinator has given its
  // lanes up (UNAVAILABLE, LANE_LOST) and its trainers are about to hear so, each in its step. OK:
  // lanes are at work or will be.
  [[nodiscard]] absl::Status WhyNoLanesCome() const;
  // Why a job that has gone back does not go on: a rank will not come. nullopt: it may go on.
  [[nodiscard]] std::optional<std::string> WhyNotRestarted() const;
  // A rank is missing for good, and the job ends when its state is saved.
  [[nodiscard]] bool ending() const { return job_->ending; }
  [[nodiscard]] const std::optional<TimePoint>& broken_since() const { return job_->broken_since; }
  // Whom the coordinator waits for, as it has said last, and when it has.
  [[nodiscard]] const v1::Waiting& waiting() const { return job_->waiting; }
  [[nodiscard]] TimePoint waiting_told() const { return job_->waiting_told; }
  [[nodiscard]] const JobFigures& figures() const { return job_->figures; }
  // Of all jobs that this one has had; there may be none now.
  [[nodiscard]] const JobEnds& ends() const { return ends_; }

 private:
  // What a rank has submitted with a step, to be kept with it.
  struct TrainerState {
    Attempt attempt;  // that it was submitted under
    std::string bytes;
  };
  // New lanes could not start, and are started again when the pause is over.
  struct LaneRetry {
    TimePoint since;
    TimePoint next;
    std::chrono::milliseconds pause{0};
    std::string why;
  };
  struct Job {
    // The only way from one phase to another. REQUIRES: the table above has it.
    void Enter(Phase next);

    Phase phase = Phase::kRegistering;
    std::string name;
    int32_t world_size = 0;
    uint64_t number = 0;
    std::string launch;  // the launch that began it with RESUME_DISCARD; empty: it began otherwise
    std::optional<uint32_t> owner_uid;  // as Opening's, of the session that began it here
    v1::PlanInputs wire;                // empty in kRegistering
    PlannedJob planned;                 // from kStarting on
    bool host_copies = false;
    absl::Status failed;           // in kFailed
    bool has_state = false;        // a push, load or step has committed
    bool goes_back = false;        // it goes back to a snapshot, and no attempt was opened since
    bool state_is_void = false;    // new lanes are not to use the state in their memory
    bool over_old_memory = false;  // other lanes have worked in the memory before the present ones
    bool lanes_wanted = false;     // in kStarting: lanes are to start as soon as places are free
    bool ending = false;           // a rank is missing for good: it ends when its state is saved
    Rollback back;                 // the last one
    std::optional<ResumePoint> resume;  // what it begins from, where this node has looked for it
    bool restored = false;              // the lanes have that state
    LaneSet lanes;
    std::optional<StepMember> steps;
    SnapshotPart snapshot;
    uint64_t applied_attempt = 0;                      // newest that committed or was skipped
    uint64_t published_attempt = 0;                    // newest that every lane has published
    uint64_t publishing_attempt = 0;                   // newest that any lane has published
    v1::StepTiming publishing;                         // of publishing_attempt: the slowest lane's
    std::vector<UnitUpdate> publishing_updates;        // likewise: of all lanes that have published
    std::map<int32_t, TrainerState> submitted_states;  // by rank: of the open attempt
    std::map<int32_t, TrainerState> trainer_states;    // by rank: of the last committed step
    JobFigures figures;
    std::optional<TimePoint> broken_since;
    std::optional<LaneRetry> lane_retry;  // in kStarting: new lanes could not start
    int32_t progress_tells = 0;           // NodeProgress messages since it was ready last
    TimePoint progress_told;
    v1::Waiting waiting;
    TimePoint waiting_told;
  };

  // Collects what is to be done; Take() hands it out at the end of an event.
  void Do(node::Action action) { actions_.push_back(std::move(action)); }
  // The part of the record that is called progress is written anew. TakeUnrecorded() is for events
  // that have not changed it.
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
  // True where there is a reason, which is counted.
  bool Drops(std::optional<Dropped> why, const char* message);
  void ToLane(LaneIndex lane, v1::LaneCommand command);
  void ToReadyLanes(const v1::LaneCommand& command, bool may_wait = false);

  // The group's messages. Hear() checks for which job and phase each is.
  [[nodiscard]] node::Actions Hear(TimePoint now, const v1::CoordinatorMessage& message);
  // The message that is being handled is about another job than the one that is here.
  [[nodiscard]] bool OfAnotherJob() const;
  void TellMemberState();

  // node_job_plan.cc
  void BeginJob(const std::string& name, int32_t world_size);
  void OnPlan(const v1::PlanInputs& wire);
  // Ends a job that registers here, if the group runs another one.
  void GiveWayTo(const v1::PlanInputs& plan);
  void StartPreparing(const v1::PlanInputs& wire);
  void TellPlanReady();
  void TellPlanFailed(const absl::Status& why,
                      const std::optional<SnapshotId>& older = std::nullopt);
  void OnRefused(const v1::RegistrationRefused& refused);

  // node_job_lanes.cc
  void ReplaceLanes(const std::string& why);
  void OnParked(const v1::Parked& parked);
  // They are of no use any more. Others may follow, over the same memory.
  void GiveUpLanes();
  // All lanes are ready: gives them what they still need before this node is.
  void PrepareLanes();
  // The lanes that were to start cannot, for now or for good.
  void OnLanesNotStarted(TimePoint now, const absl::Status& why);
  // Lanes are wanted again when it is time.
  void RetryLanes(TimePoint now);
  void OnLaneBits(TimePoint now, LaneIndex lane, const v1::LaneBits& bits);
  // Lanes of other nodes may have been told of one that lives here.
  [[nodiscard]] bool LanesKnownElsewhere() const;
  void TellLaneLost(LaneIndex lane, const std::string& detail);
  void OnStateLoaded(LaneIndex lane, const v1::LaneReport::StateLoaded& loaded);

  // node_job_reform.cc
  void OnReform(const v1::Reform& reform);
  void OnRollBack(const v1::RollBack& back);
  void ForgetState();
  // The coordinator believes that this node has the job, and it has not.
  void TellCannotGoOn();

  // node_job_end.cc
  void OnJobEnded(const v1::JobEnded& ended);
  // The job is lost, and the coordinator does not know it any more. It ends with its last session.
  void Abandon(const absl::Status& why);
  // Sessions hear `told`; OK: that the job has ended, and that they may begin anew.
  void EndJob(const std::string& why, const absl::Status& told = absl::OkStatus());
  // What the end of the job counts as. `told`: as EndJob().
  [[nodiscard]] std::string EndReason(const absl::Status& told) const;

  // node_job_leaving.cc
  void OnHalted(const v1::Halted& halted);

  // node_job_opening.cc
  [[nodiscard]] bool KnowsItsStep(int32_t rank) const;
  [[nodiscard]] bool HasClosed(int32_t rank) const;
  [[nodiscard]] bool CannotGoBack() const;
  [[nodiscard]] bool WaitsForGroup() const;
  [[nodiscard]] absl::Status CheckOpen(const Opening& opening, const ResumePoint* found) const;
  [[nodiscard]] std::string WhoseState(int32_t rank, const ResumePoint* found) const;

  // node_job_ranks.cc
  [[nodiscard]] v1::MemberMessage NewsOfSession(const RankTable::Session& session) const;
  [[nodiscard]] v1::MemberMessage NewsOfAttached(const RankTable::Session& session) const;
  void TellRanksAgain();
  // `refused`: why the group has no place for it, which its trainer is told; OK: that has ended.
  void EndSession(uint64_t id, bool closed, const std::string& detail,
                  const absl::Status& refused = absl::OkStatus());
  void OnExpel(const v1::ExpelRank& expel);
  // The trainers of these ranks count as dead; false: none of the ranks has a session.
  bool Expel(const std::vector<int32_t>& ranks, const std::string& why);

  // node_job_steps.cc
  void BeginSteps(StepId last_committed);
  [[nodiscard]] std::vector<TrainerRank> LocalRanks() const;
  void OnOpenAttempt(TimePoint now, const v1::OpenAttempt& open);
  void OnGoes(const v1::Goes& goes);
  void OnDecision(TimePoint now, const v1::Decision& wire);
  void FinishAgain(const v1::Decision& wire, const Decision& decision);
  void OnRepublish(const v1::Republish& republish);
  void OnGathered(LaneIndex lane, const v1::LaneReport::Gathered& gathered);
  void TellVote(Attempt attempt, const std::vector<UnitNorm>& norms);
  void OnPublished(LaneIndex lane, const v1::LaneReport::Published& published);

  // node_job_snapshots.cc
  void OnSave(TimePoint now, const v1::SaveState& save);
  void OnCopied(LaneIndex lane, const v1::LaneReport::Copied& copied);
  void OnSnapshotDone(TimePoint now, const v1::SnapshotDone& done);

  // node_job_watch.cc
  // What lanes have to do that have all that they need for it.
  [[nodiscard]] LaneSet::Owed Owed() const;
  void WatchLanes(TimePoint now, const Sight& sight);
  void OnGatherOverdue(TimePoint now, const v1::GatherOverdue& overdue);
  void Obey(TimePoint now, const std::vector<LaneSet::Order>& orders, const std::string& why,
            const Sight& sight);
  void TellProgress(TimePoint now, const Sight& sight);

  // node_job_record.cc
  // What the rank has submitted to be kept, under the open attempt; null: nothing.
  [[nodiscard]] const std::string* SubmittedState(int32_t rank) const;
  void WriteProgress(v1::RecordedProgress& out) const;
  void WritePlan(v1::RecordedPlan& out) const;

  const NodeJobOptions options_;
  uint32_t epoch_ = 0;  // 0: broken
  bool halted_ = false;
  Attempt halted_attempt_;  // the one that was open when the job was halted: never decided
  bool leaves_ = false;
  JobEnds ends_;
  std::string disk_hangs_;
  uint64_t jobs_ = 0;  // how many there have been
  RankTable ranks_;
  std::unique_ptr<Job> job_;
  node::Actions actions_;  // of the event that is being handled
  std::string about_;      // the job that the message names that is being handled
  // Each grows when its part of the record may have changed.
  uint64_t progress_version_ = 0;
  uint64_t plan_version_ = 0;       // with progress_version_
  uint64_t submitted_version_ = 0;  // submissions under the open attempt
};

[[nodiscard]] const char* Name(NodeJob::Phase phase);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_NODE_JOB_H_
