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
// Commit(), Retain(), RemoveUpTo(), RemoveLeftovers(), SetAsideAfter() and DiscardAll().
#ifndef DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_
#define DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_

#include <cstdint>
#include <functional>
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
  // kDurable; kBroken where the manifest itself can be read.
  v1::SnapshotManifest manifest;
  // It has a manifest, which cannot be read: whose it is, is not known.
  [[nodiscard]] bool unread() const {
    return state == SnapshotState::kBroken && manifest.job().empty();
  }
};

// Whose job the snapshots are of, as manifests that can be read say, of broken ones, too.
struct SnapshotOwners {
  std::vector<uint32_t> uids;  // each once, that of the newest snapshot first; empty: none is named
  absl::Status unread;         // why a manifest cannot be read, which may name somebody
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

  // Lists all snapshots, newest first, from manifests and file sizes without reading the data. A
  // job without a directory has none.
  absl::StatusOr<std::vector<SnapshotEntry>> List();
  // The newest durable snapshot, or nullopt. Broken ones are passed over, and appended to `broken`
  // if it is given, so that the caller can warn of them.
  absl::StatusOr<std::optional<SnapshotEntry>> Newest(std::vector<SnapshotEntry>* broken = nullptr);
  // The newest durable one of a step. NOT_FOUND names the steps that there are.
  absl::StatusOr<SnapshotEntry> Find(scheduler::StepId step);
  // The durable one of this id. NOT_FOUND names the id: there is none, or it was set aside.
  absl::StatusOr<SnapshotEntry> Find(const SnapshotId& id);

  // The users whose job the snapshots that count are of.
  absl::StatusOr<SnapshotOwners> Owners();
  // The group that made it, as its manifest says, also one that was set aside or discarded; empty:
  // it names none, cannot be read, or is not there.
  std::string GroupOf(const SnapshotEntry& entry);

  // The id of the directory with the largest attempt, finished or not, or nullopt. A new group
  // epoch must be larger than its epoch.
  absl::StatusOr<std::optional<SnapshotId>> Largest();

  // Removes all but the newest `keep` durable snapshots. REQUIRES: keep >= 1.
  absl::Status Retain(int32_t keep);
  // Removes the snapshots up to `newest`, the oldest first, but for broken ones: somebody should
  // look at them. The job's directory goes with the last. Before each removal `go_on` is asked;
  // false: what is left stays. REQUIRES: nobody uses them.
  absl::Status RemoveUpTo(const SnapshotId& newest, const std::function<bool()>& go_on);
  // Removes what has no manifest and was begun by an older attempt than `oldest_live`: that of the
  // snapshot being written, or the open one.
  absl::Status RemoveLeftovers(scheduler::Attempt oldest_live);
  // Marks the snapshots newer than `id` so that they no longer count: the job goes back to `id`.
  // Their files stay until retention removes them.
  absl::Status SetAsideAfter(const SnapshotId& id);
  // Marks all snapshots, durably, so that they no longer count: the job is begun anew. Retention
  // neither removes nor counts them.
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
  absl::StatusOr<v1::SnapshotManifest> ReadManifest(const SnapshotId& id, const char* name);
  absl::Status CheckFiles(const v1::SnapshotManifest& manifest);
  absl::Status RemoveSnapshot(const SnapshotId& id);

  Storage* storage_;
  std::string job_;
};

// Names of all jobs that have a directory there.
absl::StatusOr<std::vector<std::string>> JobsIn(Storage& storage);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SNAPSHOT_STORE_H_
