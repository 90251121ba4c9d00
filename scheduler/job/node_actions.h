// What a NodeJob (node_job.h) orders. Actions are performed in their order, and each only enqueues:
// another thread does what takes time, and its result comes back as the event that is named here.
#ifndef DMUOND_SCHEDULER_JOB_NODE_ACTIONS_H_
#define DMUOND_SCHEDULER_JOB_NODE_ACTIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/job/dropped.h"
#include "scheduler/types.h"

namespace dmuond::scheduler::node {

// Whoever waits for something about this job looks again.
struct Wake {};

// A line for the log.
struct Note {
  enum class Level : uint8_t { kDebug, kInfo, kWarn, kError };
  struct Field {
    Field(const char* key, std::string value) : key(key), value(std::move(value)) {}
    template <typename Number>
    requires std::is_arithmetic_v<Number> Field(const char* key, Number value)
        : key(key), value(absl::StrCat(value)), number(true) {}

    const char* key;
    std::string value;
    bool number = false;
  };
  Level level = Level::kInfo;
  const char* message = "";
  std::vector<Field> fields;
};

// A message of the coordinator was of another epoch or attempt; to be counted.
struct CountDropped {
  Dropped dropped;
};

struct TellCoordinator {
  v1::MemberMessage message;
};

// ---- lanes ----
struct CommandLanes {
  std::vector<LaneIndex> lanes;
  // Descriptors of the memory that it names by rank go with it.
  v1::LaneCommand command;
  // It may be kept, even after the call that brought it is answered, for others that come at the
  // same moment, to be one write with them.
  bool may_wait = false;
};
// Starts a process in every place, over the job's memory. OnLanesStarted() answers it.
struct StartLanes {
  uint32_t epoch = 0;
  bool anew = false;           // other lanes have worked in this memory
  bool state_is_void = false;  // the state that they have left in it counts no more
};
// Ends what all processes do: they are told to end, or, so that others can follow at once, killed
// or kept without work. No report of theirs is an event any more.
struct EndLanes {
  bool others_follow = false;
};
// Kills a lane that hangs, and says so in the log. OnLaneGone() tells its end, as any other's.
struct CondemnLane {
  LaneIndex lane;
  std::string why;
  std::string awaited;  // what it was waited for
};

// ---- memory ----
// Makes the plan and the job's memory. OnPrepared() answers it.
struct Prepare {
  v1::PlanInputs inputs;
  // The snapshot that the job begins from, where this node has found one: its state must fit the
  // plan.
  std::optional<v1::SnapshotManifest> resume;
};
// Gives all memory of the job back, and drops what is being prepared. Poison wakes trainers that
// wait for weights.
struct DropMemory {};
// Poison wakes trainers that wait for weights.
struct Poison {};
// The job goes back, in this epoch: wakes trainers that wait for weights of an attempt until
// `awaited`, which nobody publishes any more.
struct MarkRollback {
  uint32_t epoch = 0;
  uint64_t awaited = 0;
};

// ---- state that trainers have pushed for units of this node ----
// The load has committed: the lanes get the state that was pushed for it.
struct ApplyLoad {
  uint64_t attempt = 0;
};
// The lanes have published attempt `through`: drops the state that was pushed until then.
struct DropLoads {
  uint64_t through = 0;
};
// The job goes back: drops all pushed state.
struct ForgetLoads {};

// ---- snapshots ----
// Writes the files of what lanes copy. OnWritten() answers it.
struct WriteSnapshot {
  v1::SaveState save;
  std::map<TrainerRank, std::string> trainers;  // what each has submitted with the step
  std::string abandoned;                        // why lanes cannot copy; empty: they do
};
// How far a lane has copied.
struct Copied {
  LaneIndex lane;
  v1::LaneReport::Copied report;
};
// The lanes do not go on copying. What they have copied may still be written.
struct AbandonCopies {
  std::string why;
};
// The snapshot that is being written is not wanted any more.
struct GiveUpCopies {
  std::string why;
};
// Drops the copies of the last snapshot, which is done.
struct ForgetCopies {};
// Reads a snapshot into the lanes' host copies. OnRestored() answers it.
struct Restore {
  SnapshotId from;
};
// What is being read is not wanted any more.
struct StopRestoring {};
// On node 0, when the job goes back: newer snapshots count no more.
struct SetSnapshotsAside {
  SnapshotId after;
};
// The job is no more: what SetSnapshotsAside has not reached yet still counts. It may be a
// successor's, on other nodes.
struct KeepSnapshots {};

// ---- sessions ----
// A trainer's session has ended.
struct SessionEnded {
  uint64_t id = 0;
  // What its trainer's calls are told, which goes on: its job has ended (OK: it may begin anew), or
  // the group refuses the session. Unset: it has closed the session, or has died.
  std::optional<absl::Status> told;
};
// The rank may not begin the job anew.
struct DiscardRefused {
  int32_t rank = 0;
  absl::Status why;
};

using Action = std::variant<Wake, Note, CountDropped, TellCoordinator, CommandLanes, StartLanes,
                            EndLanes, CondemnLane, Prepare, DropMemory, Poison, MarkRollback,
                            ApplyLoad, DropLoads, ForgetLoads, WriteSnapshot, Copied, AbandonCopies,
                            GiveUpCopies, ForgetCopies, Restore, StopRestoring, SetSnapshotsAside,
                            KeepSnapshots, SessionEnded, DiscardRefused>;
using Actions = std::vector<Action>;

}  // namespace dmuond::scheduler::node

#endif  // DMUOND_SCHEDULER_JOB_NODE_ACTIONS_H_
