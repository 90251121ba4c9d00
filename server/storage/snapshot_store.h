// A job's snapshots in the directory that all daemons see. A snapshot exists when its manifest
// does; everything that it names was durable before.
//
//   every daemon                                  the coordinator
//   store.Prepare(id);
//   CreateStateFile(…) … Finish() → record  ────→ manifest.add_files(record), of all lanes
//   WriteTrainersFile(…)          → record  ────→
//                                                 store.Commit(manifest);     // now durable
//                                                 store.Retain(2);
//
// Threads: calls of one object one at a time. Of several daemons, only the coordinator calls
// Commit(), Retain(), RemoveLeftovers(), SetAsideAfter() and DiscardAll().
#ifndef DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_
#define DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/types.h"
#include "server/storage/snapshot_name.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

enum class SnapshotState : uint8_t {
  kDurable = 1,     // its manifest is there and whole, and its files have their sizes
  kUnfinished = 2,  // no manifest: being written, or left behind
  kSetAside = 3,    // the job went back before it
  kBroken = 4,      // `problem` says why
  kDiscarded = 5    // the job was begun anew after it
};
[[nodiscard]] const char* Name(SnapshotState state);

struct SnapshotEntry {
  SnapshotId id;
  SnapshotState state = SnapshotState::kUnfinished;
  absl::Status problem;
  v1::SnapshotManifest manifest;  // kDurable only
};

class SnapshotStore {
 public:
  // INVALID_ARGUMENT for a job's name that no directory can have. `storage` must outlive it.
  static absl::StatusOr<SnapshotStore> Create(Storage& storage, std::string job);

  // Makes the snapshot's directory, durably; OK if it is there.
  absl::Status Prepare(const SnapshotId& id);

  // Makes the snapshot exist: looks that every file of the manifest is there with its size, then
  // writes the manifest under a temporary name, syncs, renames, syncs. When an error comes back,
  // the snapshot may exist or not, and is whole if it does. FAILED_PRECONDITION naming the file
  // that is not there: the daemons do not share the directory.
  absl::Status Commit(const v1::SnapshotManifest& manifest);

  // All of them, newest first; looks at manifests and sizes, not at the data. A job without a
  // directory has none.
  absl::StatusOr<std::vector<SnapshotEntry>> List();
  // The newest durable one. Nothing: there is none. Broken ones are passed over, and appended to
  // `broken` if it is given: they are worth a warning.
  absl::StatusOr<std::optional<SnapshotEntry>> Newest(std::vector<SnapshotEntry>* broken = nullptr);
  // The newest durable one of a step. NOT_FOUND names the steps that there are.
  absl::StatusOr<SnapshotEntry> Find(scheduler::StepId step);

  // What the directory of the largest attempt is called, finished or not; a new epoch must be
  // larger than its epoch. Nothing: there is none.
  absl::StatusOr<std::optional<SnapshotId>> Largest();

  // Removes all but the newest `keep` durable snapshots. REQUIRES: keep >= 1.
  absl::Status Retain(int32_t keep);
  // Removes what has no manifest and was begun by an older attempt than `oldest_live`: that of the
  // snapshot being written, or the open one.
  absl::Status RemoveLeftovers(scheduler::Attempt oldest_live);
  // Snapshots newer than `id` count no more: the job is set back to `id` and goes on from there.
  // Their files stay until retention removes them.
  absl::Status SetAsideAfter(const SnapshotId& id);
  // The job is begun anew: what there is of it counts no more, durably. Retention removes none of
  // it, nor counts it.
  absl::Status DiscardAll();

  [[nodiscard]] const std::string& job() const { return job_; }
  // Of the snapshot's directory, relative to the storage.
  [[nodiscard]] std::string PathOf(const SnapshotId& id) const;

 private:
  SnapshotStore(Storage& storage, std::string job) : storage_(&storage), job_(std::move(job)) {}
  absl::StatusOr<std::vector<SnapshotId>> Directories();  // newest first
  absl::StatusOr<std::vector<std::string>> NamesIn(const SnapshotId& id);
  absl::Status RenameManifest(const SnapshotId& id, const char* to);
  SnapshotEntry Look(const SnapshotId& id);
  absl::StatusOr<v1::SnapshotManifest> ReadManifest(const SnapshotId& id);
  absl::Status CheckFiles(const v1::SnapshotManifest& manifest);
  absl::Status RemoveSnapshot(const SnapshotId& id);

  Storage* storage_;
  std::string job_;
};

// Names of all jobs that have a directory there.
absl::StatusOr<std::vector<std::string>> JobsIn(Storage& storage);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_
