// The daemon's heart: sessions, the job, and (on node 0) the coordinator, under one lock. RPC
// handlers, lane readers, the attach server and peer streams call in from their own threads, change
// state, leave messages, and wait on one condition. Nothing under the lock blocks: messages to
// lanes and peers are queued by their owners, and lane processes are ended by Tick()'s thread
// without it.
#ifndef DMUOND_SERVER_DAEMON_DAEMON_H_
#define DMUOND_SERVER_DAEMON_DAEMON_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/device.h"
#include "scheduler/job/group_job.h"
#include "scheduler/job/outgoing_reports.h"
#include "scheduler/reason.h"
#include "server/common/log.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/calls/session_keys.h"
#include "server/daemon/due_timer.h"
#include "server/daemon/lanes/lane_host.h"
#include "server/daemon/memory/prepared_job.h"
#include "server/daemon/memory/state_transfer.h"
#include "server/daemon/planner.h"
#include "server/daemon/session.h"
#include "server/daemon/snapshots/disk.h"
#include "server/daemon/state_mutex.h"
#include "server/daemon/work_thread.h"
#include "server/storage/storage.h"

namespace dmuond::server {

struct DaemonOptions {
  int32_t node = 0;
  int32_t nodes = 1;
  int32_t lanes = 1;
  int32_t threads_per_lane = 1;
  std::string lane_binary;
  std::string rail_address;  // that lanes' peer groups listen on
  std::string socket;
  int lock = -1;                 // SocketDir's, which lanes inherit
  std::string core_type;         // OpenBLAS core type that lanes have; empty: its own choice
  std::string token;             // that OpenSession must carry; empty: none
  int64_t job_memory_bytes = 0;  // 0: no limit
  std::chrono::milliseconds step_timeout{600'000};
  std::chrono::milliseconds lane_timeout{30'000};  // as LaneWatchOptions'
  scheduler::GroupJobOptions coordinator;
  // In the worst case: lanes hang as often as a step bears it, each as long as it may, and are made
  // anew; and the group falls apart in between.
  [[nodiscard]] std::chrono::milliseconds published_timeout() const {
    return scheduler::kLaneDeathsMax *
               (2 * coordinator.step.work_timeout() + coordinator.register_timeout) +
           coordinator.step.session_linger;
  }
  storage::Storage* storage = nullptr;  // of snapshots; null: none are made. Outlives the daemon
  int32_t snapshot_keep = 2;
  int64_t snapshot_staging_bytes = 0;  // per lane; 0: state is copied straight
  // Of one operation in the storage: then it hangs.
  std::chrono::milliseconds snapshot_timeout{300'000};
};

// Why a group has not formed, as one of its daemons sees it.
struct GroupGaps {
  std::vector<int32_t> missing;  // node 0: who has not joined
  std::string not_joined;        // other nodes: why this one has not
};

// The way to the group's other daemons; peers.h implements it. Threads: any.
class PeerLinks {
 public:
  virtual ~PeerLinks() = default;
  // Never blocks.
  virtual GroupGaps Gaps() = 0;
  // To one member or, without a node, to all remote ones. Node 0 only. Never blocks.
  virtual void SendToMembers(std::optional<int32_t> node,
                             const v1::CoordinatorMessage& message) = 0;
  // From the other nodes. Never blocks.
  virtual void SendToCoordinator(const v1::MemberMessage& message) = 0;
  // Blocking calls to a member's Peer service.
  virtual absl::StatusOr<StateTensor> ReadState(int32_t node, const v1::ReadStateRequest& request,
                                                size_t elements) = 0;
  virtual absl::Status WriteState(int32_t node, const v1::WriteStateRequest& request) = 0;
};

// Names the start that a session which discards belongs to; empty: it discards nothing.
[[nodiscard]] std::string LaunchOf(const v1::OpenSessionRequest& request);

class Daemon {
 public:
  // Whether the caller of a waiting RPC has gone; asked now and then.
  using Cancelled = std::function<bool()>;
  Daemon(DaemonOptions options, kernels::MemoryHolder& memory);
  ~Daemon();

  // Before anything else is called; both must outlive the daemon's use of them; `peers` is null in
  // a group of one.
  void Bind(AttachServer* attach, PeerLinks* peers);

  // ---- Trainer service: any thread, blocking ----
  absl::StatusOr<v1::HelloReply> Hello(const v1::HelloRequest& request);
  absl::StatusOr<v1::OpenSessionReply> OpenSession(const v1::OpenSessionRequest& request,
                                                   const Cancelled& cancelled);
  absl::StatusOr<v1::RegisterLayoutReply> RegisterLayout(const v1::RegisterLayoutRequest& request,
                                                         const Cancelled& cancelled);
  absl::StatusOr<v1::AttachBuffersReply> AttachBuffers(const v1::AttachBuffersRequest& request,
                                                       const Cancelled& cancelled);
  // A push of weights, or of the state that KeepStateChunk() has collected, chunk by chunk, after
  // CheckMayPush(): nothing is kept for who has no right to it.
  absl::StatusOr<v1::PushParametersReply> Push(const v1::PushParametersRequest& header,
                                               const PushedState& state,
                                               const Cancelled& cancelled);
  absl::Status CheckMayPush(const v1::SessionKey& key);
  // Before more is read, or kept, for a call: its key is that of an open session, and it comes
  // (null: it is not known from where) from the process that made the session's attach connection:
  // a child of a trainer does not act for it. PERMISSION_DENIED, reason SESSION_NOT_YOURS: from
  // another one.
  absl::Status CheckKey(const v1::SessionKey& key, const Caller* caller);
  absl::Status KeepStateChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                              PushedState& state);
  // `write` returns false when the caller has gone.
  absl::Status PullParameters(const v1::PullParametersRequest& request, const Cancelled& cancelled,
                              const std::function<bool(const v1::PullParametersReply&)>& write);
  absl::StatusOr<v1::SubmitStepReply> SubmitStep(const v1::SubmitStepRequest& request,
                                                 const Cancelled& cancelled);
  absl::StatusOr<v1::WaitStepReply> WaitStep(const v1::WaitStepRequest& request,
                                             const Cancelled& cancelled);
  absl::Status WatchSession(const v1::WatchSessionRequest& request, const Cancelled& cancelled,
                            const std::function<bool(const v1::SessionEvent&)>& write);
  absl::StatusOr<v1::CloseSessionReply> CloseSession(const v1::CloseSessionRequest& request);
  absl::StatusOr<v1::AckRollbackReply> AckRollback(const v1::AckRollbackRequest& request,
                                                   const Cancelled& cancelled);
  absl::StatusOr<v1::LoadSnapshotReply> LoadSnapshot(const v1::LoadSnapshotRequest& request,
                                                     const Cancelled& cancelled);
  absl::StatusOr<v1::SaveSnapshotReply> SaveSnapshot(const v1::SaveSnapshotRequest& request,
                                                     const Cancelled& cancelled);

  // ---- Admin service ----
  v1::GetStatusReply Status();
  // Of this process and its lanes, those that will be started too. Returns the level until now.
  log::Level SetLogLevel(log::Level level);
  absl::StatusOr<v1::GetPlanReply> Plan();
  absl::StatusOr<v1::GetRoutingReply> Routing();
  absl::StatusOr<v1::SaveJobReply> SaveJob(const Cancelled& cancelled);
  // The running job goes back to the snapshot of a step; 0: the newest.
  absl::StatusOr<v1::LoadJobReply> LoadJob(const v1::LoadJobRequest& request,
                                           const Cancelled& cancelled);

  // The job of this name ends on all nodes; returns when nothing of it is left here.
  absl::StatusOr<v1::EndJobReply> EndJobNamed(const v1::EndJobRequest& request,
                                              const Cancelled& cancelled);

  // ---- Peer service: state that is owned here, for another node's trainers ----
  absl::StatusOr<StateTensor> ReadStateForPeer(const v1::ReadStateRequest& request,
                                               const Cancelled& cancelled);
  absl::Status WriteStateForPeer(const v1::WriteStateRequest& part);

  // ---- Events, from their sources' threads ----
  void OnAttachGone(AttachId id);
  void OnLaneReport(uint64_t generation, scheduler::LaneIndex lane, const v1::LaneReport& report);
  void OnLaneGone(uint64_t generation, scheduler::LaneIndex lane, const std::string& last_words);
  void OnFormed(uint32_t epoch);
  void OnMemberMessage(int32_t node, const v1::MemberMessage& message);  // node 0
  void OnMemberGone(int32_t node, const std::string& why);               // node 0
  void OnCoordinatorMessage(const v1::CoordinatorMessage& message);      // other nodes
  void OnCoordinatorGone(const std::string& why);                        // other nodes
  // Deadlines, and the end of lanes that are no longer needed. Every 100 ms, one thread.
  void Tick();

  // A planned departure, in two halves; between them the links to other daemons are given up.
  // The first refuses new sessions, has the step in flight finished, the job halted and its state
  // saved, within `timeout`. An error names what failed, and what is lost by that.
  absl::StatusOr<v1::DrainReply> PrepareToLeave(std::chrono::milliseconds timeout);
  // The second aborts what remains, and ends the lanes. False: a thread hangs in the snapshot
  // directory and goes on to use this object, which must not be destroyed.
  [[nodiscard]] bool Leave();
  // For who has asked for it: what came of PrepareToLeave().
  absl::StatusOr<v1::DrainReply> WaitUntilPrepared(const Cancelled& cancelled);
  [[nodiscard]] bool formed();
  // Newest group epoch that it has been part of; 0: none.
  [[nodiscard]] uint32_t newest_epoch() const { return newest_epoch_.load(); }

 private:
  using Deadline = std::chrono::steady_clock::time_point;

  // Waits for `ready`; CANCELLED when the caller has gone, else false at the deadline.
  absl::StatusOr<bool> Wait(const std::function<bool()>& ready, Deadline deadline,
                            const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  // Until every local lane has published the last decided attempt: then the units' state is that of
  // last_committed_step.
  absl::Status WaitUntilPublished(const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  [[nodiscard]] bool Published() const DMUOND_REQUIRES(mutex_);
  absl::StatusOr<Session*> Find(const v1::SessionKey& key) DMUOND_REQUIRES(mutex_);
  // The same, of a job that goes on.
  absl::StatusOr<Session*> FindGoingOn(const v1::SessionKey& key) DMUOND_REQUIRES(mutex_);
  // The same, with memory that lanes have mapped.
  absl::StatusOr<Session*> FindPusher(const v1::SessionKey& key) DMUOND_REQUIRES(mutex_);
  [[nodiscard]] absl::Status CheckAttached(const Session& session) const DMUOND_REQUIRES(mutex_);
  absl::StatusOr<v1::OpenSessionReply> OpenClaimed(const v1::OpenSessionRequest& request,
                                                   const AttachPeer& peer,
                                                   const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // Descriptors of a trainer's memory, which stay the job's memory's.
  struct TrainerMemory {
    struct Arena {
      int fd = -1;
      bool kept = false;
    };
    std::vector<Arena> arenas;  // as in the request
    int timeline = -1;
  };
  // Made without the lock: the session, and the job, may have ended when it returns. REQUIRES: the
  // session is there, and the job's memory.
  absl::StatusOr<TrainerMemory> AllocateForTrainer(const v1::AttachBuffersRequest& request,
                                                   uint32_t buckets) DMUOND_REQUIRES(mutex_);
  absl::StatusOr<v1::AttachBuffersReply> AttachOnce(const v1::AttachBuffersRequest& request,
                                                    const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // On its attach connection. One that has ended takes its session along: as soon as that has been
  // noticed, what anybody gets who calls for such a session.
  absl::Status SendToTrainer(const v1::SessionKey& key, const v1::AttachFrame& frame, int fd)
      DMUOND_REQUIRES(mutex_);
  // Who is told the open attempt waits for the weights of the attempt before: they are published to
  // it where it has those of attempt `has`, which is older, because an attempt has ended without
  // any since then.
  void PublishSince(const Session& session, uint64_t has) DMUOND_REQUIRES(mutex_);
  // The job cannot go on: everybody who waits, or calls from now on, gets `status`.
  void Fail(absl::Status status) DMUOND_REQUIRES(mutex_);
  [[nodiscard]] absl::Status JobFailure() const DMUOND_REQUIRES(mutex_);

  void Tell(v1::MemberMessage message) DMUOND_REQUIRES(mutex_);
  void Send(scheduler::OutgoingReports::Messages messages) DMUOND_REQUIRES(mutex_);
  // What was held back to be gathered is due. From the timer's thread.
  void OnDue();
  void Perform(scheduler::GroupActions actions) DMUOND_REQUIRES(mutex_);
  void CoordinatorHears(int32_t node, const v1::MemberMessage& message) DMUOND_REQUIRES(mutex_);
  void Pump() DMUOND_REQUIRES(mutex_);
  void Handle(const v1::CoordinatorMessage& message) DMUOND_REQUIRES(mutex_);
  void HandleGoes(const v1::Goes& goes) DMUOND_REQUIRES(mutex_);
  // Where it is; its end is reported by OnLaneGone().
  void ToLane(scheduler::LaneIndex lane, const v1::LaneCommand& command,
              const std::vector<int>& fds = {}) DMUOND_REQUIRES(mutex_);
  void ToLanes(const v1::LaneCommand& command) DMUOND_REQUIRES(mutex_);

  void HandlePlan(const v1::PlanInputs& wire) DMUOND_REQUIRES(mutex_);
  // Ends a job that registers here and is not, or is no longer, the one that the group runs.
  void GiveWayTo(const v1::PlanInputs& plan) DMUOND_REQUIRES(mutex_);
  void BeginJob(const std::string& name, int32_t world_size) DMUOND_REQUIRES(mutex_);
  // A worker makes the plan's memory; OnPrepared() goes on when it is there.
  void StartPreparing(const v1::PlanInputs& wire) DMUOND_REQUIRES(mutex_);
  void OnPrepared(absl::StatusOr<PreparedJob> prepared) DMUOND_REQUIRES(mutex_);
  // Ends the job's use of its memory, which the worker gives back: gigabytes take seconds.
  void DropMemory() DMUOND_REQUIRES(mutex_);
  void LetGo(std::shared_ptr<void> memory) DMUOND_REQUIRES(mutex_);
  absl::Status StartLanes() DMUOND_REQUIRES(mutex_);
  // The first command of a lane, and the descriptors that go with it.
  [[nodiscard]] v1::LaneCommand ConfigureOf(scheduler::LaneIndex lane, std::vector<int>& fds) const
      DMUOND_REQUIRES(mutex_);
  // New epochs (daemon_reform.cc).
  void TellMemberState() DMUOND_REQUIRES(mutex_);
  void HandleFindSnapshot(const v1::FindSnapshot& find) DMUOND_REQUIRES(mutex_);
  // REQUIRES: newest_owed_.
  void TellNewestSnapshot(const absl::StatusOr<int64_t>& step) DMUOND_REQUIRES(mutex_);
  void HandleBroken(const std::string& why) DMUOND_REQUIRES(mutex_);
  void HandleReform(const v1::Reform& reform) DMUOND_REQUIRES(mutex_);
  // The coordinator takes this node to have a job that it has not.
  void TellCannotGoOn() DMUOND_REQUIRES(mutex_);
  void ReplaceLanes(uint32_t epoch, const std::string& why) DMUOND_REQUIRES(mutex_);
  // Jobs that go back to a snapshot (daemon_rollback.cc).
  void HandleRollBack(const v1::RollBack& back) DMUOND_REQUIRES(mutex_);
  void ForgetState() DMUOND_REQUIRES(mutex_);
  // What a trainer hears until it has acknowledged that its job has gone back, as the answer to a
  // step and as an error. REQUIRES of the first: it must acknowledge.
  [[nodiscard]] static scheduler::StepAnswer RolledBack(const Session& session,
                                                        scheduler::StepId step,
                                                        scheduler::Attempt attempt);
  [[nodiscard]] static absl::Status RolledBackError(int32_t rank, const Rollback& back);
  [[nodiscard]] static absl::Status CheckNotRolledBack(const Session& session);
  // Until every rank is attached and the snapshot's weights are on their way; false: not in time.
  [[nodiscard]] std::optional<std::string> WhyNotRestarted() const DMUOND_REQUIRES(mutex_);
  absl::StatusOr<bool> WaitUntilRestarted(const v1::SessionKey& key, Deadline deadline,
                                          const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  // The snapshot that the job can go back to, read whole, when the group is there to do so.
  // ROLLED_BACK where it goes back meanwhile. Gives up the lock.
  absl::StatusOr<int64_t> FindWayBack(int64_t step, const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // Has the group go back, told already or not; returns when this node's trainers are told so, or
  // it is known that they are not. REQUIRES of the first: Settled().
  Rollback TellGoBack(int64_t step, const std::string& why) DMUOND_REQUIRES(mutex_);
  absl::StatusOr<int64_t> WaitUntilBack(const Rollback& told, const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // For who wanted the job to go back, and not to where it is. REQUIRES: it has gone back.
  [[nodiscard]] absl::Status WentElsewhere() const DMUOND_REQUIRES(mutex_);
  // One caller's part in a LoadSnapshot, which may be repeated meanwhile.
  absl::StatusOr<int64_t> LoadOnce(const v1::LoadSnapshotRequest& request,
                                   const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  void HandleJobEnded(const v1::JobEnded& ended) DMUOND_REQUIRES(mutex_);
  void GiveUpLanes() DMUOND_REQUIRES(mutex_);
  void StartNewLanes() DMUOND_REQUIRES(mutex_);
  void OnLanesReady() DMUOND_REQUIRES(mutex_);
  void MapAgain() DMUOND_REQUIRES(mutex_);
  // The job may have ended when it returns.
  void TellPlanReady() DMUOND_REQUIRES(mutex_);
  void QueueRanksAgain() DMUOND_REQUIRES(mutex_);
  // What the coordinator is told of a session, of one whose memory every lane has mapped, and of
  // one that has ended.
  [[nodiscard]] v1::MemberMessage NewsOfSession(const Session& session) const
      DMUOND_REQUIRES(mutex_);
  [[nodiscard]] v1::MemberMessage NewsOfAttached(const Session& session) const
      DMUOND_REQUIRES(mutex_);
  [[nodiscard]] static v1::MemberMessage NewsOfEnd(const Session& session, bool closed,
                                                   const std::string& detail);
  void EndBrokenJob() DMUOND_REQUIRES(mutex_);
  // Lanes that hang (daemon_watch.cc).
  void WatchLanes(Deadline now) DMUOND_REQUIRES(mutex_);
  // What the coordinator is told while this node is not ready.
  void TellProgress(Deadline now) DMUOND_REQUIRES(mutex_);
  // Who keeps the job waiting (daemon_waiting.cc), for some seconds at least.
  void HandleWaiting(const v1::Waiting& waiting) DMUOND_REQUIRES(mutex_);
  void FillAwaited(google::protobuf::RepeatedPtrField<v1::Awaited>& awaited) const
      DMUOND_REQUIRES(mutex_);
  // What lanes are waited for, of which they have all that they need.
  [[nodiscard]] scheduler::LaneSet::Owed OwedByLanes() const DMUOND_REQUIRES(mutex_);
  void Obey(const std::vector<scheduler::LaneSet::Order>& orders, const std::string& why)
      DMUOND_REQUIRES(mutex_);
  void HandlePong(scheduler::LaneIndex lane, const v1::LaneReport::Pong& pong)
      DMUOND_REQUIRES(mutex_);
  void HandleGatherOverdue(const v1::GatherOverdue& overdue) DMUOND_REQUIRES(mutex_);
  void KillLane(const scheduler::LaneSet::Kill& kill) DMUOND_REQUIRES(mutex_);
  // These trainers count as dead; false: there are none. The job may end by that.
  bool Expel(const std::vector<int32_t>& ranks, const std::string& why) DMUOND_REQUIRES(mutex_);
  // The job cannot go on, and the coordinator knows it no longer.
  void Abandon(absl::Status status) DMUOND_REQUIRES(mutex_);
  void HandleRefused(const v1::RegistrationRefused& refused) DMUOND_REQUIRES(mutex_);
  void BeginSteps(scheduler::StepId last_committed) DMUOND_REQUIRES(mutex_);
  void HandleOpen(const v1::OpenAttempt& open) DMUOND_REQUIRES(mutex_);
  void HandleExpel(const v1::ExpelRank& expel) DMUOND_REQUIRES(mutex_);
  void HandleDecision(const v1::Decision& decision) DMUOND_REQUIRES(mutex_);
  void FinishAgain(const v1::Decision& wire, const scheduler::Decision& decision)
      DMUOND_REQUIRES(mutex_);
  void HandleRepublish(const v1::Republish& republish) DMUOND_REQUIRES(mutex_);
  void HandleLanePublished(scheduler::LaneIndex lane, const v1::LaneReport::Published& published)
      DMUOND_REQUIRES(mutex_);
  // `told`: what its sessions hear; OK: that it has ended, and that they may begin anew.
  void EndJob(const std::string& why, const absl::Status& told = absl::OkStatus())
      DMUOND_REQUIRES(mutex_);
  void ForgetDenied(uint64_t id) DMUOND_REQUIRES(mutex_);
  void RemoveSession(uint64_t id, bool closed, const std::string& detail) DMUOND_REQUIRES(mutex_);
  // Jobs that are ended, or begun anew (daemon_discard.cc).
  [[nodiscard]] bool MustDiscard(const v1::OpenSessionRequest& request) const
      DMUOND_REQUIRES(mutex_);
  // Until the job that there is of another launch has ended. Gives up the lock.
  absl::Status DiscardOlder(const v1::OpenSessionRequest& request, const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // REQUIRES: there is a job. `discard`: as EndJob.discard.
  void TellEndJob(const std::string& why, const v1::RankSession* discard = nullptr)
      DMUOND_REQUIRES(mutex_);
  void HandleDiscard(const v1::DiscardSnapshots& discard) DMUOND_REQUIRES(mutex_);
  // REQUIRES: discarding_.
  void TellDiscarded(const absl::Status& done) DMUOND_REQUIRES(mutex_);
  [[nodiscard]] absl::Status NotFormed() const;
  [[nodiscard]] absl::Status NotReadyToOpen(int32_t rank) const DMUOND_REQUIRES(mutex_);
  // Until the rank's last trainer is gone, its process too: it must not write beside its successor.
  [[nodiscard]] bool KnowsItsStep(int32_t rank) const DMUOND_REQUIRES(mutex_);
  absl::Status WaitUntilVacant(const v1::OpenSessionRequest& request, pid_t successor,
                               const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  void KeepRefusal(AttachId attach, const std::string& nonce, const absl::Status& why)
      DMUOND_REQUIRES(mutex_);
  void ForgetRefusedOpens(Deadline now) DMUOND_REQUIRES(mutex_);
  // Why its last registration was refused, and how many have been.
  [[nodiscard]] static absl::Status RefusalOf(const Session& session);
  absl::Status CheckReplacement(const Session& session, const v1::Registration& registration)
      DMUOND_REQUIRES(mutex_);
  absl::Status CheckArenas(const Session& session, const v1::AttachBuffersRequest& request)
      DMUOND_REQUIRES(mutex_);
  absl::StatusOr<scheduler::StepAnswer> Submit(Session& session,
                                               const scheduler::Submission& submission,
                                               const std::string& trainer_state)
      DMUOND_REQUIRES(mutex_);
  // One attempt of a push: submitted, and its answer, which may be pending after step_timeout.
  absl::StatusOr<scheduler::StepAnswer> PushOnce(const v1::SessionKey& key,
                                                 const scheduler::Submission& submission,
                                                 const PushedState& state,
                                                 const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  // Waits until (step, attempt) is answered or the deadline; pending answers are not an error.
  absl::StatusOr<scheduler::StepAnswer> Await(const v1::SessionKey& key, scheduler::StepId step,
                                              scheduler::Attempt attempt, Deadline deadline,
                                              const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  // State of units (daemon_state.cc). The lock is given up while lanes and peers answer: what was
  // found before must be found again after.
  absl::StatusOr<StateTensor> ReadUnit(scheduler::UnitId id, v1::StateKind kind,
                                       const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  absl::StatusOr<double> ReadUpdates(scheduler::UnitId id) DMUOND_REQUIRES(mutex_);
  // Where the chunk's bytes belong, which are counted already.
  absl::StatusOr<std::string*> PlaceOfChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                                            PushedState& state) DMUOND_REQUIRES(mutex_);
  // For a chunk of a session that may hold `bytes_max`, and of a job that has a limit of its own.
  [[nodiscard]] absl::Status CheckRoom(const Session& session, const scheduler::Message& tensor,
                                       int64_t bytes, int64_t bytes_max) const
      DMUOND_REQUIRES(mutex_);
  // Once for each attempt: a repeated push waits for the first.
  absl::Status LoadPushedState(const v1::SessionKey& key, const PushedState& state,
                               const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  absl::Status SpreadPushedState(const v1::SessionKey& key, const PushedState& state,
                                 uint64_t attempt) DMUOND_EXCLUDES(mutex_);
  absl::Status BringToOwner(const scheduler::Unit& unit, const v1::WriteStateRequest& part)
      DMUOND_EXCLUDES(mutex_);
  void ApplyPending(uint64_t attempt) DMUOND_REQUIRES(mutex_);
  // Snapshots (daemon_snapshots.cc): what the coordinator has said, and what came of it.
  void HandleSave(const v1::SaveState& save) DMUOND_REQUIRES(mutex_);
  void HandleWriteManifest(const v1::WriteManifest& write) DMUOND_REQUIRES(mutex_);
  void WriteSnapshot(const v1::SaveState& save, const std::string& abandoned)
      DMUOND_REQUIRES(mutex_);
  void TellWritten(const v1::SnapshotWritten& written) DMUOND_REQUIRES(mutex_);
  void TellManifestWritten(uint64_t attempt, const std::string& error,
                           const std::string& reason = "") DMUOND_REQUIRES(mutex_);
  // The directory, and what becomes of waits when it hangs (daemon_disk.cc).
  void WatchDisks(Deadline now) DMUOND_REQUIRES(mutex_);
  DiskWatch::News WatchDisk(Disk& disk, Deadline now) DMUOND_REQUIRES(mutex_);
  // What is being written of a snapshot has failed here, whatever becomes of it. REQUIRES: it
  // hangs.
  void GiveUpSnapshot() DMUOND_REQUIRES(mutex_);
  // Has `work` done on the thread for reads, without the lock, and waits for it. After an error it
  // may be done yet, or never: what it uses must be its own, and it is told that it is unwanted.
  absl::Status Read(const std::function<void(storage::Storage&, const Cancelled& unwanted)>& work,
                    const Cancelled& cancelled) DMUOND_REQUIRES(mutex_);
  // REQUIRES: it hangs.
  [[nodiscard]] absl::Status DirectoryHangs(const Disk& disk) const DMUOND_REQUIRES(mutex_);
  void HandleSnapshotDone(const v1::SnapshotDone& done) DMUOND_REQUIRES(mutex_);
  void HandleCopied(scheduler::LaneIndex lane, const v1::LaneReport::Copied& copied)
      DMUOND_REQUIRES(mutex_);
  // Until the state as it is now is durable; while lanes are replaced, that of the new ones. Ends
  // as soon as `allowed` says so.
  absl::StatusOr<v1::SnapshotDone> SaveNow(Deadline deadline, const Cancelled& cancelled,
                                           const std::function<absl::Status()>& allowed)
      DMUOND_REQUIRES(mutex_);
  // Still the same job, and it can go on.
  [[nodiscard]] absl::Status CheckStill(const std::string& name, uint64_t incarnation) const
      DMUOND_REQUIRES(mutex_);
  // The job's state is in lanes that work, on every node.
  [[nodiscard]] bool Settled() const DMUOND_REQUIRES(mutex_);
  [[nodiscard]] std::string PathOf(const v1::SnapshotDone& done) const DMUOND_REQUIRES(mutex_);
  // The newest state is in a snapshot.
  [[nodiscard]] bool Saved() const DMUOND_REQUIRES(mutex_);
  // A snapshot of `wanted` or of a later attempt exists, or has failed, since there were `before`
  // of them.
  [[nodiscard]] bool Answered(uint64_t before, uint64_t wanted) const DMUOND_REQUIRES(mutex_);
  // Planned departures (daemon_leaving.cc).
  void TellLeaving() DMUOND_REQUIRES(mutex_);
  void HandleHalted(const v1::Halted& halted) DMUOND_REQUIRES(mutex_);
  absl::Status HaltAndSave(Deadline deadline) DMUOND_REQUIRES(mutex_);
  // Going on from a snapshot (daemon_restore.cc). Gives up the lock.
  absl::StatusOr<std::optional<Restorable>> FindResume(const std::string& job,
                                                       const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex_);
  void StartRestore() DMUOND_REQUIRES(mutex_);
  void OnRestored(const Restorable& from, std::vector<std::vector<uint64_t>> updates)
      DMUOND_REQUIRES(mutex_);
  void HandleStateLoaded(scheduler::LaneIndex lane, const v1::LaneReport::StateLoaded& loaded)
      DMUOND_REQUIRES(mutex_);
  // `older_snapshot`: the step of one that a job that goes back may go back to instead.
  void TellPlanFailed(const absl::Status& why, int64_t older_snapshot = 0) DMUOND_REQUIRES(mutex_);
  // The job goes on from a snapshot, whose state its lanes do not have yet.
  [[nodiscard]] bool IsRestoring() const DMUOND_REQUIRES(mutex_) {
    return job_ != nullptr && job_->failed.ok() && job_->wire.restore_step() > 0 &&
           !job_->snapshots.restored;
  }
  // Here, or on a node that this one waits for: a job that goes on from a snapshot has not begun.
  [[nodiscard]] bool RestoresSomewhere() const DMUOND_REQUIRES(mutex_) {
    return job_ != nullptr && job_->failed.ok() && epoch_ != 0 && job_->wire.restore_step() > 0 &&
           !job_->steps.has_value();
  }
  // Whether the job has state, or will have it once its ranks are attached.
  [[nodiscard]] bool JobHasState() const DMUOND_REQUIRES(mutex_) {
    return job_ != nullptr &&
           (job_->has_state || job_->wire.restore_step() > 0 || job_->snapshots.resume.has_value());
  }
  [[nodiscard]] int64_t LastCommitted() const DMUOND_REQUIRES(mutex_);
  // Of the snapshot that the job goes on from; 0: none.
  [[nodiscard]] int64_t RestoreStep() const DMUOND_REQUIRES(mutex_);
  // What the rank gave with the last committed step.
  [[nodiscard]] std::string TrainerStateOf(int32_t rank) const DMUOND_REQUIRES(mutex_);
  void FillJobStatus(v1::JobStatus& status) DMUOND_REQUIRES(mutex_);

  const DaemonOptions options_;
  kernels::MemoryHolder& memory_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  AttachServer* attach_ = nullptr;
  PeerLinks* peers_ = nullptr;

  StateMutex mutex_;
  std::unique_ptr<scheduler::GroupJob> coordinator_ DMUOND_GUARDED_BY(mutex_);  // node 0
  scheduler::OutgoingReports reports_ DMUOND_GUARDED_BY(mutex_){options_.nodes > 1};
  std::deque<v1::MemberMessage> told_ DMUOND_GUARDED_BY(mutex_);        // to the coordinator
  std::deque<v1::CoordinatorMessage> heard_ DMUOND_GUARDED_BY(mutex_);  // from it
  bool pumping_ DMUOND_GUARDED_BY(mutex_) = false;
  uint32_t epoch_ DMUOND_GUARDED_BY(mutex_) = 0;  // 0: the group has not formed
  std::atomic<uint32_t> newest_epoch_{0};
  bool draining_ DMUOND_GUARDED_BY(mutex_) = false;
  // Set: the group is told that this node leaves, and how long the attempt in flight may take.
  std::optional<std::chrono::milliseconds> leaving_ DMUOND_GUARDED_BY(mutex_);
  bool halted_ DMUOND_GUARDED_BY(mutex_) = false;  // for that, nothing more is decided
  std::optional<absl::StatusOr<v1::DrainReply>> prepared_ DMUOND_GUARDED_BY(mutex_);
  std::map<uint64_t, Session> sessions_ DMUOND_GUARDED_BY(mutex_);
  std::set<std::string> opening_ DMUOND_GUARDED_BY(mutex_);  // nonces of sessions being opened
  std::set<int32_t> allocating_ DMUOND_GUARDED_BY(mutex_);   // ranks whose memory is being made
  // Attach connections whose OpenSession was refused, or whose session gave way to another job, for
  // who has lost the answer.
  struct RefusedOpen {
    std::string nonce;
    absl::Status status;
    Deadline forget_at;
  };
  std::map<AttachId, RefusedOpen> refused_opens_ DMUOND_GUARDED_BY(mutex_);
  // What those hear that a job's end found open (EndJob), and answers for who closes again.
  EndedSessions<absl::Status> ended_sessions_ DMUOND_GUARDED_BY(mutex_);
  EndedSessions<v1::CloseSessionReply> closed_ DMUOND_GUARDED_BY(mutex_);
  std::map<int32_t, uint64_t> incarnations_ DMUOND_GUARDED_BY(mutex_);  // by rank
  // By rank: why the coordinator lets a job stay that the rank wants to begin anew.
  std::map<int32_t, absl::Status> discard_refusals_ DMUOND_GUARDED_BY(mutex_);
  // The coordinator, which is this node's, waits until older snapshots count no more.
  std::optional<v1::DiscardSnapshots> discarding_ DMUOND_GUARDED_BY(mutex_);
  std::unique_ptr<NodeJob> job_ DMUOND_GUARDED_BY(mutex_);
  uint64_t generation_ DMUOND_GUARDED_BY(mutex_) = 0;  // of job_: tells late lane reports apart
  LaneHost lane_host_ DMUOND_GUARDED_BY(mutex_);
  int32_t waiting_for_published_ DMUOND_GUARDED_BY(mutex_) = 0;
  int64_t unit_requests_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::string> unit_answers_ DMUOND_GUARDED_BY(mutex_);  // request -> error or ""
  // The coordinator, which is this node's, waits to hear which snapshot is the newest.
  std::optional<v1::FindSnapshot> newest_owed_ DMUOND_GUARDED_BY(mutex_);
  uint64_t committing_ DMUOND_GUARDED_BY(mutex_) = 0;  // manifest that is being written; 0: none
  Planner planner_;
  // Plans, and a job's memory: made, and given back. As the disks, null when the daemon has left.
  std::unique_ptr<WorkThread> worker_ DMUOND_GUARDED_BY(mutex_) = std::make_unique<WorkThread>();
  // Null: no snapshots, or the daemon has left. Their work takes the lock: it ends first.
  std::unique_ptr<Disk> writes_ DMUOND_GUARDED_BY(mutex_);  // snapshots
  // What is brought back from them, and what somebody waits for: beside one that is being written.
  std::unique_ptr<Disk> reads_ DMUOND_GUARDED_BY(mutex_);
  DueTimer due_timer_{[this] { OnDue(); }};  // takes the lock: it ends first
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_DAEMON_H_
