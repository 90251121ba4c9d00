// What one daemon knows of a trainer and of the job that its trainers belong to. Plain data,
// guarded by the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_SESSION_H_
#define DMUOND_SERVER_DAEMON_SESSION_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
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
#include "scheduler/convert/registrations.h"
#include "scheduler/job/lane_set.h"
#include "scheduler/job/snapshot_part.h"
#include "scheduler/layout.h"
#include "scheduler/plan.h"
#include "scheduler/step_member.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/memory/job_memory.h"
#include "server/daemon/memory/pending_state.h"
#include "server/daemon/memory/prepared_job.h"
#include "server/daemon/memory/state_transfer.h"
#include "server/daemon/snapshots/node_snapshot.h"

namespace dmuond::server {

// What one load_state_dict has brought so far: (fragment of the registration, kind) -> the tensor's
// bytes from its first on, as on the wire. Its call's own; what it holds counts for its session.
struct PushedState {
  PushedState() = default;
  ~PushedState() {
    if (held != nullptr) *held -= bytes;
  }
  PushedState(const PushedState&) = delete;
  PushedState& operator=(const PushedState&) = delete;

  std::map<std::pair<int32_t, v1::StateKind>, std::string> tensors;
  int64_t bytes = 0;                           // of all of them
  std::shared_ptr<std::atomic<int64_t>> held;  // Session::pushed_bytes; null: nothing has come yet
  int64_t held_max = 0;
};

// The job's way back to a step, as a trainer hears of it.
struct Rollback {
  int64_t to_step = 0;
  uint32_t epoch = 0;  // that began with it: no two ways back have the same
  // Somebody has loaded a snapshot. Else memory was lost: who stands at this step need not know.
  bool asked = false;

  bool operator==(const Rollback& other) const {
    return to_step == other.to_step && epoch == other.epoch;
  }
};

// A LoadSnapshot: what has come of it, for one that is repeated.
struct LoadCall {
  bool running = false;          // one caller sees to it; others wait for its answer
  std::optional<Rollback> told;  // the group has been told, in this epoch: the next one may be it
  std::optional<absl::StatusOr<int64_t>> answer;
};

// A trainer of this node, from OpenSession until it closes or is gone.
struct Session {
  enum class State : uint8_t { kOpen, kRegistered, kAttached };

  uint64_t id = 0;  // with `secret` and `incarnation`: the key of its calls
  uint64_t secret = 0;
  uint64_t incarnation = 0;
  std::string request;          // OpenSession's, for one that is repeated
  v1::OpenSessionReply opened;  // its answer
  AttachId attach{};
  std::string nonce;  // the attach connection's
  pid_t pid = 0;
  uid_t uid = 0;
  std::shared_ptr<const wire::UniqueFd> process;  // its pidfd, as AttachPeer's
  std::string client;
  int32_t rank = 0;
  int32_t home_lane = 0;
  bool poison = false;
  bool discards = false;  // RESUME_DISCARD
  State state = State::kOpen;
  v1::Registration registration;       // as sent to the coordinator
  scheduler::Registration layout;      // the same, parsed
  absl::Status refused;                // why the whole layout was refused
  int64_t refusals = 0;                // how often
  absl::Status denied;                 // the group does not take this session: a rank twice, say
  std::vector<int32_t> job_parameter;  // parameter of the registration -> of the job's layout
  std::map<uint32_t, int64_t> arenas;  // id -> bytes
  std::set<int32_t> lanes_attached;    // lane indices that have mapped the trainer's memory
  absl::Status attach_error;
  std::string attach_request;  // AttachBuffers', once begun; repeated ones wait for its end
  std::vector<std::string> weight_digests;  // its
  bool broadcast = false;                   // its
  std::optional<v1::AttachBuffersReply> attach_reply;
  uint64_t load_attempt = 0;  // newest whose pushed state is being brought to its owners
  bool loading = false;
  // Of pushed state that is held now, in all of its calls; these may outlive it.
  std::shared_ptr<std::atomic<int64_t>> pushed_bytes = std::make_shared<std::atomic<int64_t>>(0);
  // The job has gone back to this step, and the trainer has not acknowledged it: it gets no other
  // answer, and nothing of its memory is touched.
  std::optional<Rollback> must_acknowledge;
  std::optional<Rollback> acknowledged;  // the last one, for a call that is repeated
  std::optional<v1::AckRollbackReply> acknowledge_reply;  // its answer, once there is one
  std::map<uint64_t, LoadCall> loads;  // by LoadSnapshotRequest.call; the newest alone
  scheduler::Attempt first_attempt;    // open when it had attached

  [[nodiscard]] v1::SessionKey Key() const {
    v1::SessionKey key;
    key.set_session(id);
    key.set_incarnation(incarnation);
    key.set_secret(secret);
    return key;
  }
};

// A rank of this node whose trainer died: what its replacement must wait for.
struct Vacancy {
  pid_t pid = 0;
  std::shared_ptr<const wire::UniqueFd> process;  // of the dead session; it may still run
  scheduler::Attempt attempt;                     // open when it died; ends by that
};

// What a rank gave the job to keep with a step.
struct TrainerState {
  scheduler::Attempt attempt;  // that it was submitted with
  std::string bytes;
};

// The job's snapshots, as this node sees them.
struct JobSnapshots {
  JobSnapshots() = default;
  ~JobSnapshots() {
    Abandon("the job has ended");
    StopRestore();
  }
  JobSnapshots(const JobSnapshots&) = delete;
  JobSnapshots& operator=(const JobSnapshots&) = delete;
  // Ends the wait of who writes for lanes that will not copy any more.
  void Abandon(const std::string& why) {
    if (copying != nullptr) copying->Abandon(absl::UnavailableError(why));
  }
  // The same for who can write no more, or should not: nobody wants what is there.
  void GiveUp(const std::string& why) {
    if (copying != nullptr) copying->GiveUp(absl::UnavailableError(why));
  }

  // Others wait for the thread for disks, and what it reads goes to lanes that are no more.
  void StopRestore() {
    if (restore != nullptr) restore->unwanted = true;
  }

  // Of a snapshot, by the thread for disks.
  struct Restoring {
    std::atomic<uint64_t> read_bytes = 0;
    std::atomic<bool> unwanted = false;
  };
  std::optional<Restorable> resume;  // what the job goes on from, where this node has looked for it
  bool restored = false;             // the lanes have that state
  std::shared_ptr<Restoring> restore;

  std::shared_ptr<const std::vector<HostState>> host;  // per lane; null: no snapshots are made
  std::shared_ptr<CopyProgress> copying;               // of the snapshot that is being written
  scheduler::SnapshotPart part;
};

// The running job, as this node sees it.
struct NodeJob {
  std::string name;
  int32_t world_size = 0;
  int32_t progress_tells = 0;  // since it was ready last
  bool has_state = false;      // a push, load or step has committed
  bool reforming = false;      // its lanes are being replaced
  bool rolled_back = false;    // it goes back to a snapshot, and no attempt has been opened since
  bool forget_state = false;   // what lies in the lanes' memory is void: a snapshot follows
  bool ending = false;         // a rank is missing for good: the job ends when its state is saved
  bool abandoned = false;      // the coordinator has forgotten it: it ends with its last session
  std::string launch;          // that has begun it with RESUME_DISCARD; empty: it began otherwise
  uint64_t number = 0;         // no two jobs of this process have the same
  v1::PlanInputs wire;         // empty until the group has planned it
  std::shared_ptr<PrepareProgress> preparing;           // by the worker; null: it is not
  std::shared_ptr<const scheduler::PlanInputs> inputs;  // shared with work that waits for a disk
  std::shared_ptr<const scheduler::Plan> plan;
  std::shared_ptr<JobMemory> memory;  // also of who allocates in it without the lock
  scheduler::LaneSet lanes;
  std::vector<v1::LaneProgram> programs;       // by lane
  std::optional<scheduler::StepMember> steps;  // set when the first attempt opens
  absl::Status failed;                         // the job cannot go on; all calls answer this
  int64_t skipped_steps = 0;
  int64_t aborted_attempts = 0;
  double gradient_norm = 0;
  uint64_t applied_attempt = 0;     // newest that committed or was skipped
  uint64_t published_attempt = 0;   // newest that every local lane has published
  v1::StepTiming timing;            // of published_attempt
  uint64_t publishing_attempt = 0;  // newest that any lane has published
  v1::StepTiming publishing;        // slowest lane so far of publishing_attempt
  std::shared_ptr<PendingState> pending = std::make_shared<PendingState>();
  std::map<int32_t, Vacancy> vacancies;  // by rank
  // What the lanes have mapped of each rank, for lanes that are new, and the last end of a session
  // that the coordinator was told, for one that may have missed it.
  std::map<int32_t, v1::LaneCommand> attachments;
  std::map<int32_t, v1::RankGone> gone;
  std::chrono::steady_clock::time_point progress_told;
  // Since when the machine has had no memory, descriptors or processes for its new lanes.
  std::optional<std::chrono::steady_clock::time_point> lanes_lack_resources_since;
  Rollback back;  // its last way back; in epoch 0: none
  // What the coordinator has said last of who keeps it waiting, and when.
  v1::Waiting waiting;
  std::chrono::steady_clock::time_point waiting_told;
  // Since when the group is broken.
  std::optional<std::chrono::steady_clock::time_point> broken_since;
  std::map<int32_t, TrainerState> submitted_states;  // by rank: of the open attempt
  std::map<int32_t, TrainerState> trainer_states;    // by rank: of last_committed_step
  JobSnapshots snapshots;

  // The group has planned it: it is being prepared, or is.
  [[nodiscard]] bool planned() const { return WorldSizeOf(wire) > 0; }
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SESSION_H_
