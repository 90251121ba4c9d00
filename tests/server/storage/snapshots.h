// Jobs small enough to be saved thousands of times, and what their state is at each step.
#ifndef DMUOND_TESTS_SERVER_STORAGE_SNAPSHOTS_H_
#define DMUOND_TESTS_SERVER_STORAGE_SNAPSHOTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/plan.h"
#include "server/storage/snapshot_store.h"
#include "server/storage/storage.h"
#include "server/storage/tensor_name.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::server::storage::testing {

inline constexpr char kJob[] = "run7";

// A job's inputs and plan.
struct Job {
  scheduler::PlanInputs inputs;
  scheduler::Plan plan;
  v1::SnapshotManifest base;  // all but step, attempt and files

  [[nodiscard]] int32_t lanes() const { return inputs.nodes * inputs.lanes_per_node; }
};
// Matrices (an expert stack among them) and AdamW tensors (replicated, and sharded unevenly) on a
// world of this size. `wide`: with a replicated tensor that is cut over lanes.
[[nodiscard]] Job MakeJob(int32_t trainers, int32_t nodes, int32_t lanes_per_node,
                          bool wide = false);
[[nodiscard]] Job JobOf(const std::string& name, scheduler::PlanInputs inputs,
                        const google::protobuf::RepeatedPtrField<v1::GroupConfig>& groups);
[[nodiscard]] Job PlanFor(const scheduler::testing::World& world);

// The state's value at an element of a parameter (row-major index) after a step.
[[nodiscard]] float ValueAt(int64_t step, int32_t parameter, StateTensor kind, int64_t element);
[[nodiscard]] uint64_t UpdatesAt(int64_t step, int32_t parameter);
[[nodiscard]] std::string TrainerStateAt(int64_t step, int32_t rank);

[[nodiscard]] SnapshotId IdAt(int64_t step);  // attempt 1.step

// Everything that daemons and coordinator do for one snapshot, up to its manifest.
absl::Status Save(Storage& storage, const Job& job, int64_t step);

// The record that vouches for a file as it is; nothing for one without a header.
[[nodiscard]] std::optional<v1::SnapshotFile> RecordOf(const std::string& name,
                                                       v1::SnapshotFile::Kind kind, int32_t owner,
                                                       const std::string& file);

// Restores a snapshot to a job, which may have another plan than the one that saved it, and
// compares every value, number of updates and trainer's state with those of the snapshot's step.
absl::Status RestoreAndCompare(Storage& storage, const v1::SnapshotManifest& manifest,
                               const Job& job);

}  // namespace dmuond::server::storage::testing

#endif  // DMUOND_TESTS_SERVER_STORAGE_SNAPSHOTS_H_
