// A daemon's side of one job in the step simulator, without its coordinator: the NodeJob and
// Departure that ship, and performers that are simulated. Memory, lanes and disks take their time,
// fail, die and hang.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/wire/timeline.h"
#include "scheduler/job/departure.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/outgoing_reports.h"
#include "tests/scheduler/simulated_lane.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

// Why a job ends that somebody has ended.
inline constexpr char kEndedBySomebody[] = "somebody ends it";

class SimulatedMember {
 public:
  SimulatedMember(Simulation& simulation, NodeRank node, std::vector<TrainerRank> ranks);
  // Of a simulation that begins (Simulation::instant): the rank opens its session and registers;
  // and, when lanes are ready, attaches.
  void BeginRegistered(TrainerRank rank);
  void BeginAttached(TrainerRank rank);

  [[nodiscard]] NodeRank node() const { return node_; }
  [[nodiscard]] const std::vector<TrainerRank>& ranks() const { return ranks_; }
  [[nodiscard]] bool alive() const { return alive_; }
  [[nodiscard]] bool connected() const { return connection_ != nullptr; }

  // ---- the group ----
  void Formed(Connection& connection, uint32_t epoch);
  void Broken();
  // What the coordinator says.
  void Hear(const std::shared_ptr<const v1::CoordinatorMessage>& message);
  // Every 100 ms.
  void Tick();

  // ---- faults ----
  void Die();
  void Start();  // a successor, with nothing
  void LaneDies(LaneIndex rail);
  // It does nothing more, for ever.
  void LaneHangs(LaneIndex rail);
  // What it is doing with its disk comes to an end only so much later; that is found out.
  void DiskHangs(Microseconds for_so_long);
  // Its daemon is told to leave; calls `leaves` whenever all that there is is on the disk, or is
  // not going to be.
  void PrepareToLeave(Event leaves);
  [[nodiscard]] bool prepared() const { return departure_.state() == Departure::State::kPrepared; }
  // Somebody asks for it here; nothing comes of it while the job is not going on.
  void GoBackToNewest();
  // Somebody ends the job here. While the group is broken nobody hears that, and it is said again.
  void EndJob();

  // ---- what trainers ask; nullopt: not yet, ask again ----
  struct OpenedSession {
    uint64_t incarnation = 0;
    History at;
  };
  template <typename Reply>
  using Later = std::optional<absl::StatusOr<Reply>>;
  [[nodiscard]] Later<OpenedSession> Open(TrainerRank rank, v1::OpenSessionRequest::Resume resume);
  [[nodiscard]] Later<Attempt> Attach(TrainerRank rank, uint64_t incarnation);
  [[nodiscard]] absl::StatusOr<StepAnswer> Step(const Submission& request, uint64_t incarnation,
                                                bool wait);
  [[nodiscard]] Later<Attempt> Acknowledge(TrainerRank rank, uint64_t incarnation,
                                           const WayBack& back);
  [[nodiscard]] std::optional<WayBack> MustAcknowledge(TrainerRank rank,
                                                       uint64_t incarnation) const;
  // Whether the trainer's stream goes on that waits for the weights after an attempt: they have
  // come, or nobody publishes them any more.
  [[nodiscard]] bool EndsWait(TrainerRank rank, uint64_t incarnation, Attempt attempt);
  // The trainer has died.
  void Leave(TrainerRank rank, uint64_t incarnation, const std::string& why);
  // What a trainer that acknowledges, or attaches, goes on from.
  [[nodiscard]] const History& history() const { return history_; }

  // ---- lanes ----
  void Reported(LaneIndex rail, const v1::LaneReport& report);
  void LaneGone(LaneIndex rail);
  void ProgressLanes();
  // A lane has published. Weights have come where all have.
  void OnPublished();

  // Nothing more comes of it by itself.
  [[nodiscard]] bool Settled() const;
  void CheckTheEnd(bool given_up) const;
  [[nodiscard]] std::string Describe() const;

 private:
  // What a trainer's client, and the calls that it waits in, know of its session.
  struct Client {
    uint64_t id = 0;
    uint64_t incarnation = 0;
    StepId told;  // last committed step, when it was opened
    bool mapping = false;
    bool attached = false;
    bool begins = false;  // waits for the restart of the job in Attach()
  };
  // A snapshot's part of one node, as its thread for writes has it.
  struct Copies {
    Attempt attempt;
    std::vector<std::optional<uint64_t>> states;  // by lane
    uint64_t number = 0;                          // of all of this member
    bool ended = false;                           // nothing more is copied
  };

  [[nodiscard]] NodeJobOptions Options() const;
  // What has changed of the job is written, before anything of it leaves the member.
  void WriteRecord();
  [[nodiscard]] JobRecord WholeRecord() const;
  // Another NodeJob goes on, with all that the record says and nothing else. Sessions, lanes, disks
  // and memory stay.
  void HandOver();
  void Perform(node::Actions actions);
  void Do(const node::Wake& /*order*/) {}
  void Do(const node::Note& order);
  void Do(node::TellCoordinator& order) { Tell(std::move(order.message)); }
  void Do(const node::CommandLanes& order);
  void Do(const node::StartLanes& order);
  void Do(const node::EndLanes& order);
  void Do(const node::CondemnLane& order);
  void Do(const node::Prepare& order);
  void Do(const node::DropMemory& order);
  void Do(const node::Poison& /*order*/) { RaisePublished(wire::kPoison); }
  void Do(const node::MarkRollback& order) {
    if (published_ < order.awaited) RaisePublished(wire::RollbackMark(order.epoch));
  }
  void Do(const node::ApplyLoad& /*order*/) {}
  void Do(const node::DropLoads& /*order*/) {}
  void Do(const node::ForgetLoads& /*order*/) {}
  void Do(const node::WriteSnapshot& order);
  void Do(const node::Copied& order);
  void Do(const node::AbandonCopies& /*order*/) { EndCopy(false); }
  void Do(const node::GiveUpCopies& /*order*/) { EndCopy(false); }
  void Do(const node::ForgetCopies& /*order*/) { copies_.reset(); }
  void Do(const node::Restore& order);
  void Do(const node::StopRestoring& /*order*/) { ++restores_; }
  void Do(const node::SetSnapshotsAside& order);
  void Do(const node::KeepSnapshots& /*order*/) { ++kept_; }
  void Do(const node::SessionEnded& order);
  void Do(const node::DiscardRefused& /*order*/) {}  // its trainer asks again
  void Do(const node::CountDropped& /*order*/) {}

  void Tell(v1::MemberMessage message);
  void Send(OutgoingReports::Messages messages);
  // The coordinator's process is this one.
  void TellHere(const v1::MemberMessage& message);
  void TellManifestWritten(Attempt attempt, bool written);
  void FindNewest(uint32_t epoch);  // of node 0
  void DiscardSnapshots(const v1::DiscardSnapshots& discard);
  void WriteManifest(const v1::SnapshotManifest& manifest);
  void HearDecision(const v1::CoordinatorMessage& message);
  void RaisePublished(uint64_t value) { published_ = std::max(published_, value); }
  void OnDisk(Event event);
  void GiveUpWriting();
  void EndCopy(bool written);
  void BeginDeparture();
  void AdvanceDeparture();
  void LookForSnapshot();
  [[nodiscard]] Client* Find(TrainerRank rank, uint64_t incarnation);
  [[nodiscard]] const RankTable::Session& SessionOf(const Client& client) const {
    return *job_->ranks().Find(client.id);
  }
  [[nodiscard]] absl::Status NoSession(TrainerRank rank, uint64_t incarnation) const;
  [[nodiscard]] std::optional<SnapshotId> Newest() const;
  // Where the job is nowhere here: another group, which has the same directory and has come
  // further, has begun it and saved it again.
  void AnotherGroupSaves();
  [[nodiscard]] Microseconds Soon(int64_t most_ms);  // 0 while the simulation begins

  Simulation& simulation_;
  const NodeRank node_;
  const std::vector<TrainerRank> ranks_;
  bool alive_ = true;
  uint64_t boot_ = 1;
  Connection* connection_ = nullptr;
  Stream disk_;

  std::optional<NodeJob> job_;  // a new one in each of its processes
  Departure departure_;
  bool looks_ = false;              // for the newest snapshot, in a broken group that it leaves
  std::optional<SnapshotId> seen_;  // has the job's state, as was found so
  OutgoingReports reports_;
  std::map<RecordPart, std::string> record_;  // as it was written last
  std::optional<uint64_t> record_version_;
  std::string disk_hangs_;
  uint64_t job_number_ = 0;
  std::optional<uint64_t> to_end_;  // number of the job that somebody wants to end
  History history_;                 // as of the last decision that was heard, or the snapshot
  std::map<TrainerRank, Client> clients_;
  // Incarnations that their job's end or a refusal has found open, and what they are told.
  std::map<TrainerRank, std::pair<uint64_t, absl::Status>> ended_;
  std::optional<TrainerRank> leaving_;  // whose session ends by its own doing
  uint64_t sessions_ = 0;
  std::deque<SimulatedLane> lanes_;
  uint64_t published_ = 0;  // what the trainers' timelines say; of all buckets at once
  uint64_t prepares_ = 0;
  uint64_t restores_ = 0;
  uint64_t kept_ = 0;  // counts orders to keep snapshots that were to be set aside
  uint64_t endings_ = 0;
  bool lanes_end_ = false;
  std::optional<Copies> copies_;
  uint64_t writes_ = 0;
  std::optional<SnapshotId> committing_;  // manifest that is being written
  TimePoint leaves_by_;
  Event leaves_;  // set: its daemon is told to leave
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_MEMBER_H_
