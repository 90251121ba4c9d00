// What one node does for a snapshot, apart from deciding anything: writes the files of its lanes
// from their host copies while these fill, writes the manifest, and brings a snapshot's state back
// into host copies. Runs on threads that may wait for a disk.
//
//   auto progress = std::make_shared<CopyProgress>(lanes);
//   thread.Post([=] { files = WriteNodeFiles(storage, node, *progress); … });
//   progress->Report(lane, batches, updates);           // as the lanes say
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "kernels/device.h"
#include "kernels/mutex.h"
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

  // `updates`: of the first report, else empty.
  void Report(size_t lane, int32_t batches, std::vector<uint64_t> updates);
  // Nothing more will come; the first reason stays. What is there may still be written.
  void Abandon(const absl::Status& why);
  // Nothing more is wanted: who writes ends as soon as it can.
  void GiveUp(const absl::Status& why);
  // Why it was given up; OK: it was not.
  absl::Status given_up();

  // Waits for the first report of the lane.
  absl::StatusOr<std::vector<uint64_t>> WaitForUpdates(size_t lane);
  // Waits until more than `batches` of the lane's are there; how many are.
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

// Durable files; an error names one. Ends when the progress is abandoned, or given up.
absl::StatusOr<std::vector<v1::SnapshotFile>> WriteNodeFiles(storage::Storage& storage,
                                                             const NodeSnapshot& snapshot,
                                                             CopyProgress& progress);

// The coordinator's node alone: makes the snapshot exist, and removes what it replaces. An error of
// the removal is appended to `warnings`.
absl::Status CommitSnapshot(storage::Storage& storage, const v1::SnapshotManifest& manifest,
                            int32_t keep, std::vector<absl::Status>& warnings);

// The same node, after a failure: removes what was written of it.
void RemoveUnfinished(storage::Storage& storage, const v1::SnapshotManifest& manifest,
                      std::vector<absl::Status>& warnings);

// The largest group epoch of any job's snapshot, whole or not; a new one must be larger. 0: none.
// FAILED_PRECONDITION (EPOCH_EXHAUSTED) names a snapshot whose epoch is beyond kEpochMax.
absl::StatusOr<uint32_t> NewestEpoch(storage::Storage& storage);

// A snapshot that a job can go on from.
struct Restorable {
  storage::SnapshotId id;
  v1::SnapshotManifest manifest;
  storage::TrainerStates trainers;  // of all ranks
};
// The newest one that is whole as far as manifest and sizes tell; broken ones are passed over and
// logged by name. An error names the file: there are broken ones only, or what the trainers gave
// cannot be read.
absl::StatusOr<std::optional<Restorable>> FindRestorable(storage::Storage& storage,
                                                         const std::string& job);
// The one of a step; NOT_FOUND names those that there are.
absl::StatusOr<Restorable> FindRestorable(storage::Storage& storage, const std::string& job,
                                          scheduler::StepId step);

// The step of the newest that is whole as far as manifest and sizes tell; 0: there is none.
absl::StatusOr<int64_t> NewestStep(storage::Storage& storage, const std::string& job);
// The same among those that are older than the one of `step`.
absl::StatusOr<int64_t> NewestStepBefore(storage::Storage& storage, const std::string& job,
                                         scheduler::StepId step);
// Reads every byte. An error names file and tensor; CANCELLED soon after it is `unwanted`.
absl::Status VerifyWhole(storage::Storage& storage, const Restorable& snapshot,
                         const std::function<bool()>& unwanted);

using GroupConfigs = google::protobuf::RepeatedPtrField<v1::GroupConfig>;

// The units' numbers of updates, by lane of `lanes`, in the order of their host copies, which hold
// the state when OK comes back. DATA_LOSS names file and tensor; FAILED_PRECONDITION names the
// parameter whose state would be wrong in this job; CANCELLED when `go_on`, which is told of the
// bytes that are read next, says no.
absl::StatusOr<std::vector<std::vector<uint64_t>>> RestoreHostCopies(
    storage::Storage& storage, const v1::SnapshotManifest& manifest,
    const scheduler::PlanInputs& inputs, const GroupConfigs& groups, const scheduler::Plan& plan,
    const std::vector<HostState>& lanes, const std::function<bool(uint64_t bytes)>& go_on);

// Whether the snapshot's state means the same in the job as it is registered.
absl::Status CheckRestorable(const v1::SnapshotManifest& manifest,
                             const scheduler::PlanInputs& inputs, const GroupConfigs& groups);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOTS_NODE_SNAPSHOT_H_
