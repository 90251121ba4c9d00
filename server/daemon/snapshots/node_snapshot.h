// A node's work for a snapshot; nothing is decided here. It writes the files of its lanes from
// their host copies while these fill, writes the manifest, and reads a snapshot's state back into
// host copies. It runs on threads that may wait for a disk.
//
//   auto progress = std::make_shared<CopyProgress>(lanes);
//   thread.Post([=] { files = WriteNodeFiles(storage, node, *progress); … });
//   progress->Report(lane, batches, updates);           // as the lanes say
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/v1/snapshot.pb.h"
#include "kernels/device.h"
#include "scheduler/plan.h"
#include "server/storage/host_copy.h"
#include "server/storage/snapshot_store.h"
#include "server/storage/state_file.h"
#include "server/storage/storage.h"
#include "server/storage/trainers_file.h"

namespace dmuond::server {

// How far a node's lanes have copied their state. Threads: any.
class CopyProgress {
 public:
  explicit CopyProgress(size_t lanes) : lanes_(lanes) {}

  // `updates` comes with the lane's first report, and is empty in others.
  void Report(size_t lane, int32_t batches, std::vector<uint64_t> updates);
  // No lane copies any more. What was copied may still be written. The first reason stays.
  void Abandon(const absl::Status& why);
  // The snapshot is not wanted any more: its writer ends as soon as it can.
  void GiveUp(const absl::Status& why);
  // Why it was given up; OK: it was not.
  absl::Status given_up();

  // Waits for the first report of the lane.
  absl::StatusOr<std::vector<uint64_t>> WaitForUpdates(size_t lane);
  // Waits until the lane has copied more than `batches` batches, and returns how many it has.
  absl::StatusOr<int32_t> WaitForMore(size_t lane, int32_t batches);

 private:
  struct Lane {
    bool begun = false;
    int32_t batches = 0;
    std::vector<uint64_t> updates;
  };
  Mutex mutex_;
  CondVar changed_;
  absl::Status abandoned_ DMUOND_GUARDED_BY(mutex_);
  absl::Status given_up_ DMUOND_GUARDED_BY(mutex_);
  std::vector<Lane> lanes_ DMUOND_GUARDED_BY(mutex_);
};

// A lane's state in host memory.
struct HostState {
  scheduler::LaneId lane;
  storage::HostCopy layout;
  std::vector<storage::StateUnit> units;     // in the layout's order
  std::shared_ptr<kernels::Mapping> memory;  // null: the lane owns nothing
};

// A node's part of one snapshot.
struct NodeSnapshot {
  storage::SnapshotId id;
  std::string job;
  scheduler::NodeRank node;
  std::shared_ptr<const std::vector<HostState>> lanes;
  storage::TrainerStates trainers;
};

// Writes the node's files durably. An error names a file. Ends when the progress is abandoned or
// given up.
absl::StatusOr<std::vector<v1::SnapshotFile>> WriteNodeFiles(storage::Storage& storage,
                                                             const NodeSnapshot& snapshot,
                                                             CopyProgress& progress);

// On the coordinator's node alone: writes the manifest, by which the snapshot exists, and removes
// older snapshots beyond `keep`. An error of the removal is appended to `warnings`.
absl::Status CommitSnapshot(storage::Storage& storage, const v1::SnapshotManifest& manifest,
                            int32_t keep, std::vector<absl::Status>& warnings);

// On the same node, after a failure: removes what was written of the snapshot.
void RemoveUnfinished(storage::Storage& storage, const v1::SnapshotManifest& manifest,
                      std::vector<absl::Status>& warnings);

// The largest group epoch of any job's snapshot, whole or not; a new one must be larger. 0: none.
// FAILED_PRECONDITION (EPOCH_EXHAUSTED) names a snapshot whose epoch is beyond kEpochMax.
absl::StatusOr<uint32_t> NewestEpoch(storage::Storage& storage);

// Logs how long the newest snapshot of any job took, by which the time that a daemon gets for
// leaving can be chosen; warns where `drain_timeout` is shorter.
void LogLastSave(storage::Storage& storage, std::chrono::milliseconds drain_timeout);

// A snapshot that a job can go on from.
struct Restorable {
  storage::SnapshotId id;
  v1::SnapshotManifest manifest;
  storage::TrainerStates trainers;  // of all ranks
};
// SnapshotStore::Owners() of the job.
absl::StatusOr<storage::SnapshotOwners> OwnersOf(storage::Storage& storage, const std::string& job);

// The newest snapshot that is whole as far as manifest and sizes tell. Broken ones are passed over,
// and the log names them. An error names the file: all are broken, or what the trainers have
// submitted cannot be read.
absl::StatusOr<std::optional<Restorable>> FindRestorable(storage::Storage& storage,
                                                         const std::string& job);
// The newest snapshot of a step; NOT_FOUND, reason NO_SUCH_SNAPSHOT, names the steps of those that
// exist.
absl::StatusOr<Restorable> FindRestorable(storage::Storage& storage, const std::string& job,
                                          scheduler::StepId step);
// The snapshot of this id; NOT_FOUND names the id.
absl::StatusOr<Restorable> FindRestorable(storage::Storage& storage, const std::string& job,
                                          const storage::SnapshotId& id);

// The newest snapshot that is whole as far as manifest and sizes tell; nullopt: none is.
absl::StatusOr<std::optional<storage::SnapshotId>> NewestOf(storage::Storage& storage,
                                                            const std::string& job);
// The same among those that are older than `id`, and nullopt where they cannot be listed.
std::optional<storage::SnapshotId> NewestBefore(storage::Storage& storage, const std::string& job,
                                                const storage::SnapshotId& id);
// Reads every byte. An error names file and tensor; CANCELLED soon after it is `unwanted`.
absl::Status VerifyWhole(storage::Storage& storage, const Restorable& snapshot,
                         const std::function<bool()>& unwanted);

using GroupConfigs = google::protobuf::RepeatedPtrField<v1::GroupConfig>;

// Reads a snapshot's state into host copies. Returns the units' numbers of updates, by lane of
// `lanes`, in the order of the host copies. DATA_LOSS names file and tensor. FAILED_PRECONDITION
// names the parameter whose state would be wrong in this job. CANCELLED: `go_on`, which is told how
// many bytes are read next, has returned false.
absl::StatusOr<std::vector<std::vector<uint64_t>>> RestoreHostCopies(
    storage::Storage& storage, const v1::SnapshotManifest& manifest,
    const scheduler::PlanInputs& inputs, const GroupConfigs& groups, const scheduler::Plan& plan,
    const std::vector<HostState>& lanes, const std::function<bool(uint64_t bytes)>& go_on);

// Whether the snapshot's state means the same in the job as it is registered.
absl::Status CheckRestorable(const v1::SnapshotManifest& manifest,
                             const scheduler::PlanInputs& inputs, const GroupConfigs& groups);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_
