// The planner's cost table as a file: v1::CostTable in protobuf's text format. muon_tune writes
// what it has measured on a device, and `dmuond --cost_table` loads it.
#ifndef DMUOND_SERVER_COST_FILE_H_
#define DMUOND_SERVER_COST_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "scheduler/cost_model.h"

namespace dmuond::server {

// NOT_FOUND; INVALID_ARGUMENT naming line and column, or the entry whose numbers cannot be.
[[nodiscard]] absl::StatusOr<scheduler::CostTable> ReadCostTable(const std::string& path);
[[nodiscard]] absl::Status WriteCostTable(const scheduler::CostTable& costs,
                                          const std::string& path);

// The table's choices as a device takes them.
[[nodiscard]] std::vector<kernels::KernelChoice> ToChoices(const scheduler::CostTable& costs);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COST_FILE_H_
