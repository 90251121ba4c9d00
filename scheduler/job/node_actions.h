// What a NodeJob (node_job.h) wants done. Actions are performed in their order; each only enqueues:
// what takes time is done by a thread of its own, and comes back as the event that is named here.
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
#include "scheduler/types.h"

namespace dmuond::scheduler::node {

// Who waits for something of this job looks again.
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

struct TellCoordinator {
  v1::MemberMessage message;
};

// ---- lanes ----
struct CommandLanes {
  std::vector<LaneIndex> lanes;
  // What it names by number (a rank's memory) is handed to the lane with it.
  v1::LaneCommand command;
  bool may_wait = false;  // for others that come at the same moment, to be one write with them
};
// A process for every place, over the job's memory. Answered by OnLanesStarted().
struct StartLanes {
  uint32_t epoch = 0;
  bool anew = false;           // other lanes have worked in this memory
  bool state_is_void = false;  // what they have left in it counts no more
};
// All processes end: as they are told to, or killed. Nothing that they still say is an event.
struct EndLanes {
  bool kill = false;
};
// One that hangs is killed, and the log says so. Its end is told as any other's.
struct CondemnLane {
  LaneIndex lane;
  std::string why;
  std::string awaited;  // from it
};

// ---- memory ----
// The plan's and the job's memory are made. Answered by OnPrepared().
struct Prepare {
  v1::PlanInputs inputs;
  // Of the snapshot that the job goes on from, where this node has found one: its state must mean
  // the same in the job as it is planned.
  std::optional<v1::SnapshotManifest> resume;
};
// All memory of the job is given back; what is being prepared is not wanted any more. Trainers that
// wait for weights are woken by poison.
struct DropMemory {};
// Trainers that wait for weights are woken by poison.
struct Poison {};

// ---- state that trainers have pushed for units of this node ----
// The load has committed: what came with it goes to the lanes.
struct ApplyLoad {
  uint64_t attempt = 0;
};
// The lanes have published this attempt: what came for it and older ones is not needed any more.
struct DropLoads {
  uint64_t through = 0;
};
// The job goes back: nothing of what came is wanted.
struct ForgetLoads {};

// ---- snapshots ----
// Lanes copy (if they can: `abandoned` says why not), and their files are written. Answered by
// OnWritten().
struct WriteSnapshot {
  v1::SaveState save;
  std::map<TrainerRank, std::string> trainers;  // what they gave with the step
  std::string abandoned;
};
// How far a lane has copied.
struct Copied {
  LaneIndex lane;
  v1::LaneReport::Copied report;
};
// The lanes will not copy any more: what is there may still be written.
struct AbandonCopies {
  std::string why;
};
// The snapshot that is being written is not wanted any more.
struct GiveUpCopies {
  std::string why;
};
// No more is wanted of the snapshot whose copies are kept.
struct ForgetCopies {};
// The snapshot of a step is read into the lanes' host copies. Answered by OnRestored().
struct Restore {
  StepId step;
};
// What is being read is not wanted any more.
struct StopRestoring {};
// Node 0, whose job goes back: newer snapshots count no more.
struct SetSnapshotsAside {
  StepId after;
};

// ---- sessions ----
// A trainer's session has ended. Not OK: what its trainer hears who calls for it, where it ended
// with the job; OK: that it may begin anew.
struct SessionEnded {
  uint64_t id = 0;
  bool with_job = false;
  absl::Status told;
};
// The rank may not begin the job anew, and why.
struct DiscardRefused {
  int32_t rank = 0;
  absl::Status why;
};

using Action =
    std::variant<Wake, Note, TellCoordinator, CommandLanes, StartLanes, EndLanes, CondemnLane,
                 Prepare, DropMemory, Poison, ApplyLoad, DropLoads, ForgetLoads, WriteSnapshot,
                 Copied, AbandonCopies, GiveUpCopies, ForgetCopies, Restore, StopRestoring,
                 SetSnapshotsAside, SessionEnded, DiscardRefused>;
using Actions = std::vector<Action>;

}  // namespace dmuond::scheduler::node

#endif  // DMUOND_SCHEDULER_JOB_NODE_ACTIONS_H_
