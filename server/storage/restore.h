// Reads a snapshot's files into host memory, as scheduler::PlanRestore() has planned.
#ifndef DMUOND_SERVER_STORAGE_RESTORE_H_
#define DMUOND_SERVER_STORAGE_RESTORE_H_

#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/plan.h"
#include "scheduler/restore_plan.h"
#include "server/storage/snapshot_reader.h"

namespace dmuond::server::storage {

// Returns the memory for one tensor of one unit: as many values as the unit has elements, row-major
// in its box. It is called again for each saved box that has a part of the tensor. An error ends
// the restore.
using RestoreTarget =
    absl::FunctionRef<absl::StatusOr<std::span<float>>(scheduler::UnitId unit, StateTensor kind)>;

// Fills every tensor of every unit that `parts` (one lane's, or several lanes' together, by saved)
// reads. Each saved tensor is read once, in its order. What the targets hold is the state only if
// OK comes back; DATA_LOSS names file and tensor.
absl::Status Restore(SnapshotReader& reader, const std::vector<scheduler::SavedUnit>& saved,
                     const scheduler::Plan& plan, std::span<const scheduler::RestorePart> parts,
                     RestoreTarget target);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_RESTORE_H_
