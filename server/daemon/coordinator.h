// Node 0's second role: gathers registrations, makes the plan, connects rails, decides attempts,
// ends jobs. Talks to members in dmuond.v1 messages only; its own node's member reaches it the same
// way.
//
// Threads: none of its own; the daemon calls it under its lock and sends what it returns.
#ifndef DMUOND_SERVER_DAEMON_COORDINATOR_H_
#define DMUOND_SERVER_DAEMON_COORDINATOR_H_

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

#include "dmuond/v1/peer.pb.h"
#include "scheduler/awaited.h"
#include "scheduler/plan.h"
#include "scheduler/step_coordinator.h"
#include "scheduler/weight_digests.h"
#include "server/daemon/snapshot_coordinator.h"

namespace dmuond::server {

// A step in which lanes die this often without it, or a push, committing does not go on for ever.
inline constexpr int32_t kLaneDeathsMax = 3;

struct CoordinatorOptions {
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  int64_t lane_memory_bytes = 0;
  std::optional<scheduler::CostTable> costs;  // measured; nullopt: estimates
  scheduler::CostTable estimates;             // analytic, for this daemon's devices
  bool replan = false;                        // a job that goes on from a snapshot too
  // Inputs of a plan that is for several nodes; they cross as one message.
  int64_t peer_message_bytes_max = std::numeric_limits<int64_t>::max();
  std::chrono::milliseconds register_timeout{120'000};
  scheduler::CoordinatorOptions step;
  bool snapshots = false;  // there is a directory for them
  scheduler::SnapshotOptions snapshot;
};

// A message for one member, or for all.
struct Addressed {
  std::optional<int32_t> node;
  v1::CoordinatorMessage message;
};
using AddressedMessages = std::vector<Addressed>;

class Coordinator {
 public:
  explicit Coordinator(CoordinatorOptions options) : options_(std::move(options)) {}

  // The group has formed (anew). What a running job still has its members say next.
  [[nodiscard]] AddressedMessages OnFormed(scheduler::TimePoint now, uint32_t epoch);
  [[nodiscard]] AddressedMessages OnMessage(scheduler::TimePoint now, int32_t from,
                                            const v1::MemberMessage& message);
  [[nodiscard]] AddressedMessages OnMemberGone(scheduler::TimePoint now, int32_t node,
                                               const std::string& why);
  // Completes what is about to be told to members: decisions name the durable step, and where a
  // snapshot falls due, the message that begins it follows. Once for all messages.
  void AddSnapshots(scheduler::TimePoint now, AddressedMessages& messages);
  // Deadlines; call every 100 ms.
  [[nodiscard]] AddressedMessages OnTick(scheduler::TimePoint now);
  // Newest that it has begun; only grows.
  [[nodiscard]] uint32_t epoch() const { return epoch_; }

 private:
  // Why the group forms, or has its lanes made, anew.
  struct Interruption {
    scheduler::OutcomeReason reason = scheduler::OutcomeReason::kNone;
    std::string detail;
  };
  // A job from its first session to its end.
  struct Job {
    std::string name;
    int32_t world_size = 0;
    uint64_t incarnation = 0;
    // Sessions that are neither closed nor gone: rank -> node and incarnation.
    std::map<int32_t, std::pair<int32_t, uint64_t>> open_ranks;
    std::map<int32_t, scheduler::JobLacks::Place> places;  // by rank: for people
    std::map<int32_t, v1::Registration> registrations;     // by rank
    std::optional<scheduler::TimePoint> register_deadline;
    v1::PlanInputs wire;  // set with the plan
    std::unique_ptr<scheduler::PlanInputs> inputs;
    std::unique_ptr<scheduler::Plan> plan;
    std::map<int32_t, uint64_t> ready;                        // node -> digest of its plan
    std::map<int32_t, std::map<int32_t, std::string>> blobs;  // rail -> node -> blob
    std::unique_ptr<scheduler::StepCoordinator> steps;        // set when every node is ready
    bool rolled_back = false;  // and not restarted yet: ranks come back one by one
    uint32_t back_epoch = 0;   // of its last way back
    // Nothing is decided: the group is broken, or its nodes start new lanes.
    std::optional<Interruption> interruption;
    // Lanes that have died while this step was the next one to commit.
    scheduler::StepId deaths_in;
    int32_t deaths = 0;
    int64_t restore_step = 0;                    // of the snapshot that it goes on from; 0: none
    std::optional<v1::CostTable> restore_costs;  // that it was planned with then
    std::string launch;          // that has begun it with RESUME_DISCARD; empty: it began otherwise
    bool discarding = false;     // older snapshots still count: there is no plan before they do not
    absl::Status discard_error;  // why they go on to count
    std::set<int32_t> attached;  // ranks that can submit
    scheduler::WeightDigests first_weights;          // of a job without state
    std::unique_ptr<SnapshotCoordinator> snapshots;  // set with `steps`, where there are any
    // A rank is missing for good, and what there is is being saved. With a reason: everybody has
    // left, and the job ends as soon as that is done, or at the deadline.
    bool saving_last = false;
    std::optional<std::string> ends;
    // What nodes that prepare have said of it, and since when nothing new has been heard.
    std::map<int32_t, v1::NodeProgress> progress;
    struct Heard {
      uint32_t epoch = 0;
      size_t ready = 0;
      uint64_t done = 0;
      bool operator==(const Heard&) const = default;
    };
    Heard heard;
    std::optional<scheduler::TimePoint> unready_since;
    // A job that goes back: since when ranks are awaited, and none of the others has come.
    std::optional<scheduler::TimePoint> unattached_since;
    size_t attached_then = 0;
    scheduler::TimePoint ends_by;
  };

  AddressedMessages Dispatch(scheduler::TimePoint now, int32_t from,
                             const v1::MemberMessage& message);
  AddressedMessages Advance(scheduler::TimePoint now);
  // Halts the job for those who are leaving, as soon as nothing is in flight, and says so.
  void HaltForLeavers(scheduler::TimePoint now, AddressedMessages& out);
  AddressedMessages OnRankSession(int32_t from, const v1::RankSession& session);
  AddressedMessages OnRegistration(scheduler::TimePoint now, int32_t from,
                                   const v1::Registration& registration);
  AddressedMessages OnRankGone(scheduler::TimePoint now, int32_t from, const v1::RankGone& gone);
  AddressedMessages OnPlanReady(scheduler::TimePoint now, const v1::PlanReady& ready);
  AddressedMessages OnLaneLost(scheduler::TimePoint now, const v1::LaneLost& lost);
  AddressedMessages OnMemberState(scheduler::TimePoint now, int32_t from,
                                  const v1::MemberState& state);
  AddressedMessages OnNewestSnapshot(scheduler::TimePoint now, const v1::NewestSnapshot& newest);
  // Every node has said what it still has of the job. `newest`: null as long as it is not known.
  AddressedMessages FormAnew(scheduler::TimePoint now, const v1::NewestSnapshot* newest);
  AddressedMessages GoOn(const v1::NewestSnapshot* newest);
  // Where the job went with a node's memory: the newest snapshot is all that is left of it.
  AddressedMessages GoBackOrEnd(const v1::MemberState& holder, bool has_state, int32_t without,
                                const v1::NewestSnapshot& newest);
  // It is known what the group goes on with.
  [[nodiscard]] bool Formed() const {
    return states_.size() == static_cast<size_t>(options_.nodes) && !finding_;
  }
  // New lanes on every node, with the memory that there is, in the present epoch.
  AddressedMessages Reform();
  // The job, as `plan` knows it, goes on from the snapshot of `step`, in the present epoch.
  // `asked`: somebody has loaded it; else memory was lost.
  AddressedMessages RollBack(v1::PlanInputs plan, int64_t step, const std::string& why,
                             bool asked = false);
  AddressedMessages OnLoadSnapshot(const v1::LoadSnapshotOf& load);
  // The machine of a job that was rolled back, or begins with a snapshot: what ranks have done
  // meanwhile, and a restart as soon as all are attached.
  AddressedMessages RestartWhenAttached(scheduler::TimePoint now);
  // With the first attempt after a snapshot. REQUIRES: every rank is attached.
  AddressedMessages Restart();
  void NextEpoch();
  // Another lane has died while the same step was the next one; false: once too often.
  bool MayLoseALane();
  AddressedMessages LanesLost(scheduler::TimePoint now, const std::string& detail);
  // Nodes that were told to prepare and get nothing done: the job does not wait for them.
  AddressedMessages GiveUpUnready(scheduler::TimePoint now);
  // Ranks of a job that goes back which live, and do not come to it.
  AddressedMessages ExpelUnattached(scheduler::TimePoint now);
  // Who keeps the job waiting, told to all once it has done so for a while
  // (coordinator_waiting.cc). REQUIRES of the first: there is a job.
  [[nodiscard]] scheduler::JobLacks Lacks() const;
  void TellWaiting(scheduler::TimePoint now, AddressedMessages& out);
  // What a node that is not ready waits for, as it has said.
  [[nodiscard]] std::string AwaitedBy(int32_t node) const;
  AddressedMessages OnRankAttached(scheduler::TimePoint now, const v1::RankAttached& attached);
  // Ends a job without state when a rank comes whose weights are not those of another one. Nothing
  // has been written to an arena by then: that begins when all ranks have pushed.
  AddressedMessages CompareFirstWeights(const v1::RankAttached& attached);
  // Ends a job in which an update has made weights infinite or NaN, in place of the next decision.
  AddressedMessages EndWhereNotFinite(const v1::Vote& vote);
  AddressedMessages OnSnapshotMessage(scheduler::TimePoint now, int32_t from,
                                      const v1::MemberMessage& message);
  AddressedMessages OnRendezvous(const v1::Rendezvous& rendezvous);
  AddressedMessages MakePlanAndTell();
  // RESOURCE_EXHAUSTED (LAYOUT_TOO_LARGE): the other nodes would not take so much.
  [[nodiscard]] absl::Status CheckPlanBytes(const v1::PlanInputs& inputs) const;
  // Measured anew, the same members would make another plan, whose kernels give other bits.
  [[nodiscard]] std::optional<v1::CostTable> CostsOfPlan() const;
  // Every waiting registration fails with `status`; the job can be registered anew.
  AddressedMessages Refuse(const absl::Status& status);
  AddressedMessages Lost(scheduler::TimePoint now, scheduler::OutcomeReason reason,
                         const std::string& detail);
  AddressedMessages EndJob(const std::string& why, const std::string& reason = "",
                           const scheduler::Metadata& metadata = {});
  // Jobs that are ended, or begun anew (coordinator_discard.cc).
  AddressedMessages OnEndJob(int32_t from, const v1::EndJob& end);
  AddressedMessages OnSnapshotsDiscarded(const v1::SnapshotsDiscarded& discarded);
  void BeginAnew(const v1::RankSession& session, AddressedMessages& out);
  // Why the job there is stays, though the session discards it; OK: it is of the same launch.
  [[nodiscard]] absl::Status CheckLaunch(const v1::RankSession& session) const;
  // To the session's node.
  static AddressedMessages Deny(int32_t node, const v1::RankSession& session,
                                const absl::Status& why);
  void EndIfDeserted(scheduler::TimePoint now, AddressedMessages& out);
  void TellSave(std::optional<v1::SaveState> save, AddressedMessages& out) const;
  // A job that has been lost because a rank did not come back: its state, where it can be saved.
  void SaveLast(scheduler::TimePoint now, AddressedMessages& out);
  AddressedMessages EndWhenSaved(scheduler::TimePoint now, const std::string& why);
  static AddressedMessages Broadcast(const std::vector<scheduler::CoordinatorAction>& actions);

  // A node that is about to leave.
  struct Leaver {
    scheduler::TimePoint patience_ends;  // for the attempt in flight
    bool told = false;                   // that the job is halted
  };

  CoordinatorOptions options_;
  uint32_t epoch_ = 0;
  uint32_t attempts_ = 0;  // counter half of the newest attempt of any job of this epoch
  uint64_t incarnations_ = 0;
  std::map<int32_t, v1::MemberState> states_;                 // by node: since the group formed
  bool finding_ = false;                                      // node 0 looks for a snapshot
  std::vector<std::pair<int32_t, v1::MemberMessage>> early_;  // of ranks, before Formed()
  std::map<int32_t, Leaver> leavers_;                         // by node: since the group formed
  std::unique_ptr<Job> job_;
  scheduler::AwaitedNews waiting_;
  // The last job that ended. Who could not be reached then still holds it when the group forms
  // anew.
  struct Ended {
    uint64_t incarnation = 0;
    v1::CoordinatorMessage message;
  };
  std::optional<Ended> ended_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_COORDINATOR_H_
