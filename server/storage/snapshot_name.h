// Where a job's snapshots lie below --snapshot_dir:
//
//   JOB/step-000000001200.3.1105/manifest.json
//   JOB/step-000000001200.3.1105/lane-00000.safetensors
//   JOB/step-000000001200.3.1105/trainers-00000.safetensors
//
// is the snapshot of step 1200, which attempt 1105 of epoch 3 committed. A job that went back may
// commit a step again: the attempt, which only grows, tells the two snapshots apart.
#ifndef DMUOND_SERVER_STORAGE_SNAPSHOT_NAME_H_
#define DMUOND_SERVER_STORAGE_SNAPSHOT_NAME_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "scheduler/types.h"

namespace dmuond::server::storage {

using scheduler::SnapshotId;

inline constexpr char kManifestName[] = "manifest.json";
// The name of a manifest that no longer counts, because the job went back to before it.
inline constexpr char kSetAsideName[] = "manifest.set-aside.json";
// The name of one that no longer counts because the job was begun anew (RESUME_DISCARD).
inline constexpr char kDiscardedName[] = "manifest.discarded.json";
inline constexpr char kTemporarySuffix[] = ".tmp";

[[nodiscard]] std::string DirectoryName(const SnapshotId& id);
[[nodiscard]] std::optional<SnapshotId> ParseDirectoryName(const std::string& name);
[[nodiscard]] std::string ToString(const SnapshotId& id);  // "step 1200 (attempt 3.1105)"

[[nodiscard]] std::string StateFileName(scheduler::LaneId lane);
[[nodiscard]] std::string TrainersFileName(scheduler::NodeRank node);
// Whether a manifest may name such a file: one of the two above, in any numbers.
[[nodiscard]] bool IsFileName(const std::string& name);

// INVALID_ARGUMENT: a job's name is 1 to 128 of A-Z a-z 0-9 . _ - and does not begin with a dot.
[[nodiscard]] absl::Status CheckJobName(const std::string& job);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SNAPSHOT_NAME_H_
