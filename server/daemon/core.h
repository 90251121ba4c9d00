// The core of one place for a job: its state machines, under one lock, and the turn. A daemon has
// one for each job that it can hold at a time (daemon.h); no core knows of the others.
//
// A turn: an event enters a machine (a call, a lane's report, another daemon's message, a tick).
// The machine returns what is to be done, which is performed at once and in order; messages between
// machines are handled until none is left. Performing only enqueues: what can block has a thread,
// whose result is an event again. No reference into a machine outlives the turn. What a machine has
// decided is in the job's record before anything of it is performed.
//
//   StateLock lock(core.mutex);
//   core.Do(core.job.Close(id));
//
// Its members are public for the files of calls/, which are a part of it: each call checks its
// request, enters an event, waits for the result, and answers.
#ifndef DMUOND_SERVER_DAEMON_CORE_H_
#define DMUOND_SERVER_DAEMON_CORE_H_

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
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/v1/admin.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/addressed.h"
#include "scheduler/job/departure.h"
#include "scheduler/job/group_job.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/outgoing_reports.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/clients.h"
#include "server/daemon/counters.h"
#include "server/daemon/due_timer.h"
#include "server/daemon/group/peer_links.h"
#include "server/daemon/lanes/job_lanes.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/memory/node_memory.h"
#include "server/daemon/memory/record_file.h"
#include "server/daemon/options.h"
#include "server/daemon/planner.h"
#include "server/daemon/snapshots/snapshot_disks.h"
#include "server/daemon/state_mutex.h"

namespace dmuond::server {

struct NodeView;

struct Core {
  using Deadline = std::chrono::steady_clock::time_point;
  // Whether the caller of a waiting RPC has gone; asked now and then.
  using Cancelled = std::function<bool()>;

  // `place`: of its job, from 0 on.
  Core(DaemonOptions options, NodeDevice& node_device, int32_t place = 0);
  ~Core();

  // ---- the turn ----
  void Do(scheduler::node::Actions actions) DMUOND_REQUIRES(mutex);
  void Do(scheduler::GroupActions actions) DMUOND_REQUIRES(mutex);
  // Sends a message to the coordinator that no machine has returned.
  void Tell(v1::MemberMessage message) DMUOND_REQUIRES(mutex);
  // For callers that change `job` and have no actions to perform: call it before anybody can see
  // the change.
  void WriteRecord() DMUOND_REQUIRES(mutex);
  // Runs an event of another thread under the lock, as a turn.
  void Enter(const std::function<void()>& event) DMUOND_EXCLUDES(mutex);

  // ---- events, from their sources' threads ----
  void OnAttachGone(AttachId id);
  void OnLaneReport(uint64_t generation, scheduler::LaneIndex lane, const v1::LaneReport& report);
  void OnLaneGone(uint64_t generation, scheduler::LaneIndex lane, const std::string& last_words);
  void OnFormed(uint32_t epoch);
  void OnMemberMessage(int32_t node, const v1::MemberMessage& message);  // node 0
  void OnMemberGone(int32_t node, const std::string& why);               // node 0
  void OnCoordinatorMessage(const v1::CoordinatorMessage& message);      // other nodes
  void OnCoordinatorGone(const std::string& why);                        // other nodes
  // Looks at deadlines. One thread calls it every 100 ms.
  void Tick();

  // ---- for who only looks ----
  struct Seen {
    std::shared_ptr<const NodeView> view;
    std::chrono::milliseconds age{0};  // 0: it was taken after the call began
  };
  // Has a picture taken, for LookAfter(). It does not wait.
  void AskToLook() { view_timer_.Set(std::chrono::steady_clock::now()); }
  // A picture of the node that has all that happened before the moment `asked`. Where the lock does
  // not come free within a second of it: the last picture there is, which was taken at the last
  // tick or later. REQUIRES: AskToLook() was called since `asked`.
  Seen LookAfter(Deadline asked) DMUOND_EXCLUDES(mutex, view_mutex_);
  Seen Look() DMUOND_EXCLUDES(mutex, view_mutex_) {
    const Deadline asked = std::chrono::steady_clock::now();
    AskToLook();
    return LookAfter(asked);
  }

  // ---- for calls ----
  // Waits for `ready`, which must change nothing in the core: any thread that gives up the lock
  // calls it. False: the deadline has come. CANCELLED: the caller has gone.
  absl::StatusOr<bool> Wait(const std::function<bool()>& ready, Deadline deadline,
                            const Cancelled& cancelled) DMUOND_REQUIRES(mutex);
  // The same for a call that holds no thread: `wait.then` is called when the condition has held, at
  // the deadline, or after mutex.EndLate().
  StateMutex::LateId WaitLate(StateMutex::LateWait wait) DMUOND_REQUIRES(mutex);
  // Waits until every local lane has published the last decided attempt, so that the units' state
  // is that of the last committed step.
  absl::Status WaitUntilPublished(const Cancelled& cancelled) DMUOND_REQUIRES(mutex);
  // The session of a key. The second requires that its job can go on, the third also that lanes
  // have mapped its memory.
  absl::StatusOr<Client*> Find(const v1::SessionKey& key) DMUOND_REQUIRES(mutex);
  absl::StatusOr<Client*> FindGoingOn(const v1::SessionKey& key) DMUOND_REQUIRES(mutex);
  absl::StatusOr<Client*> FindPusher(const v1::SessionKey& key) DMUOND_REQUIRES(mutex);
  // The client's session in the job. REQUIRES: it is open.
  [[nodiscard]] const scheduler::RankTable::Session& SessionOf(const Client& client) const
      DMUOND_REQUIRES(mutex) {
    return *job.ranks().Find(client.id);
  }
  // Has the thread for reads do `work` without the lock, and waits for it. After an error the work
  // may still be done, or never: it must own what it uses, and is told that it is unwanted.
  absl::Status Read(const SnapshotDisks::Work& work, const Cancelled& cancelled)
      DMUOND_REQUIRES(mutex);
  // Saves the present state: it is in a snapshot when this returns. If lanes are replaced
  // meanwhile, it is the state of the new ones. Ends with the error of `allowed` as soon as that
  // has one.
  absl::StatusOr<v1::SnapshotDone> SaveNow(const Cancelled& cancelled,
                                           const std::function<absl::Status()>& allowed)
      DMUOND_REQUIRES(mutex);
  // For callers that keep a reference: the compiler's check of guards does not follow references to
  // members.
  [[nodiscard]] scheduler::NodeJob& held_job() DMUOND_REQUIRES(mutex) { return job; }
  [[nodiscard]] Clients& held_clients() DMUOND_REQUIRES(mutex) { return clients; }
  [[nodiscard]] SnapshotDisks::Job JobForDisks() const DMUOND_REQUIRES(mutex);
  [[nodiscard]] int32_t NodeOf(scheduler::LaneId lane) const {
    return lane.value() / options.lanes;
  }
  [[nodiscard]] scheduler::LaneIndex RailOf(scheduler::LaneId lane) const {
    return scheduler::LaneIndex(lane.value() % options.lanes);
  }

  const DaemonOptions options;
  const int32_t place;
  NodeDevice& device;
  const std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  AttachServer* attach = nullptr;
  PeerLinks* peers = nullptr;             // null in a group of one
  std::atomic<uint32_t> newest_epoch{0};  // the newest of which this daemon was a part; 0: none
  Planner planner;

  StateMutex mutex;
  // ---- machines ----
  std::unique_ptr<scheduler::GroupJob> coordinator DMUOND_GUARDED_BY(mutex);  // node 0
  scheduler::NodeJob job DMUOND_GUARDED_BY(mutex);
  scheduler::Departure departure DMUOND_GUARDED_BY(mutex);
  // All messages of this node to the coordinator pass through it.
  scheduler::OutgoingReports reports DMUOND_GUARDED_BY(mutex);
  // ---- performers ----
  Clients clients DMUOND_GUARDED_BY(mutex);
  JobLanes lanes DMUOND_GUARDED_BY(mutex);
  NodeMemory memory DMUOND_GUARDED_BY(mutex);
  SnapshotDisks disks DMUOND_GUARDED_BY(mutex);
  RecordFile record DMUOND_GUARDED_BY(mutex);
  // ---- what it has counted since it began ----
  Counters counters DMUOND_GUARDED_BY(mutex);
  // ---- what calls wait for ----
  // What lanes did in steps, while a call gathers it.
  std::optional<std::vector<v1::LaneTrace>> traces DMUOND_GUARDED_BY(mutex);
  std::set<int32_t> allocating DMUOND_GUARDED_BY(mutex);  // ranks whose memory is being made
  int32_t waiting_for_published DMUOND_GUARDED_BY(mutex) = 0;
  int64_t unit_requests DMUOND_GUARDED_BY(mutex) = 0;
  std::map<int64_t, std::string> unit_answers DMUOND_GUARDED_BY(mutex);  // request -> error or ""
  // By request, of those that are waited for: the answer, once it has come.
  std::map<int64_t, std::optional<v1::LaneReport::UpdateCopied>> update_copies
      DMUOND_GUARDED_BY(mutex);
  // By CheckRequest.request, of those that are waited for: the answer, once it has come.
  std::map<uint64_t, std::optional<v1::CheckDone>> checks_wanted DMUOND_GUARDED_BY(mutex);
  // The newest check of all copies that this node has heard of, and of which job.
  struct LastCheck {
    uint64_t job = 0;  // NodeJob::number()
    v1::JobCheck check;
  };
  LastCheck last_check DMUOND_GUARDED_BY(mutex);

 private:
  // Performs an action of its kind (perform.cc).
  template <typename Order>
  void Perform(Order& order) DMUOND_REQUIRES(mutex);
  // At most one line a second of the log says so.
  void Count(const scheduler::Dropped& dropped) DMUOND_REQUIRES(mutex);
  void TellReports(const scheduler::Layout& layout) DMUOND_REQUIRES(mutex);
  // Moves messages between this node's machines until both are idle. Messages that follow are
  // queued, not nested: no machine is called while it handles a message.
  void Pump() DMUOND_REQUIRES(mutex);
  void SendToMembers() DMUOND_REQUIRES(mutex);
  void Handle(const v1::CoordinatorMessage& message) DMUOND_REQUIRES(mutex);
  void CoordinatorHears(int32_t node, const v1::MemberMessage& message) DMUOND_REQUIRES(mutex);
  // Has the lanes digest what a check orders; they answer together.
  void BeginCheck(const v1::CheckExtracts& order) DMUOND_REQUIRES(mutex);
  void OnLaneChecked(scheduler::LaneIndex lane, const v1::ExtractsChecked& checked)
      DMUOND_REQUIRES(mutex);
  void OnCheckDone(const v1::CheckDone& done) DMUOND_REQUIRES(mutex);
  // To the coordinator, as soon as the machines are idle.
  void Queue(scheduler::OutgoingReports::Messages messages) DMUOND_REQUIRES(mutex);
  // Messages that were held back to be gathered are due. The timer's thread calls it.
  void OnDue();
  // The deadline of a late wait has come. Its timer's thread calls it.
  void OnOverdue();
  // Waits for lanes that were ended, for a while. Its timer's thread calls it.
  void Reap();
  // While lanes are ending, has Reap() called. Else lanes that wait for places are started, and
  // whoever waits for the end of others looks again.
  void LookForPlaces() DMUOND_REQUIRES(mutex);
  // Takes a picture of the node, for Look().
  void TakeView() DMUOND_REQUIRES(mutex) DMUOND_EXCLUDES(view_mutex_);

  std::deque<v1::MemberMessage> told_ DMUOND_GUARDED_BY(mutex);        // to the coordinator
  std::deque<v1::CoordinatorMessage> heard_ DMUOND_GUARDED_BY(mutex);  // from it
  // From the coordinator on this node to others: they hear it after this node's job.
  std::deque<scheduler::Addressed> for_members_ DMUOND_GUARDED_BY(mutex);
  // What lanes have told to the newest order of a check, and which lanes have. Lanes that are
  // replaced meanwhile never do: the coordinator orders anew when the job runs again.
  v1::ExtractsChecked extracts_ DMUOND_GUARDED_BY(mutex);
  std::set<scheduler::LaneIndex> lanes_checked_ DMUOND_GUARDED_BY(mutex);
  Seldom drops_ DMUOND_GUARDED_BY(mutex);
  bool pumping_ DMUOND_GUARDED_BY(mutex) = false;
  bool decided_ DMUOND_GUARDED_BY(mutex) = false;  // news for lanes: fault points come behind it
  std::optional<uint64_t> recorded_ DMUOND_GUARDED_BY(mutex);  // NodeJob::record_version()
  bool record_lacks_ DMUOND_GUARDED_BY(mutex) = false;  // it could not be written: none is kept
  bool record_waits_ DMUOND_GUARDED_BY(mutex) = false;  // it is not written before the next tick
  Mutex view_mutex_;                                    // nobody who holds it waits for `mutex`
  CondVar view_taken_;
  std::shared_ptr<const NodeView> view_ DMUOND_GUARDED_BY(view_mutex_);  // never null
  // These are the last members and so end first: they take the lock.
  DueTimer due_timer_{[this] { OnDue(); }};
  DueTimer late_timer_{[this] { OnOverdue(); }};
  DueTimer reap_timer_{[this] { Reap(); }};  // is set while lanes end
  // Takes a picture as soon as the lock is free. Those who look wait for the picture, not for the
  // lock.
  DueTimer view_timer_{[this] {
    StateLock lock(mutex);
    TakeView();
  }};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CORE_H_
