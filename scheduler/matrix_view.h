// Which matrices a muon parameter consists of. Fails closed: what is not a set of matrices is
// refused by name, never flattened into something that only looks like one.
#ifndef DMUOND_SCHEDULER_MATRIX_VIEW_H_
#define DMUOND_SCHEDULER_MATRIX_VIEW_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/layout.h"

namespace dmuond::scheduler {

// INVALID_ARGUMENT naming the parameter and the values that disagree: fewer than two dimensions, a
// dimension of size zero, row blocks that do not sum up to the rows, heads that do not divide them.
[[nodiscard]] absl::Status ValidateView(const Parameter& parameter);

// The boxes of the matrices, leading (batch) dimensions outermost, then blocks of rows from the
// top. REQUIRES: ValidateView(parameter).ok().
[[nodiscard]] std::vector<Box> MatricesOf(const Parameter& parameter);
[[nodiscard]] int64_t CountMatrices(const Parameter& parameter);

// "whole", "3 row blocks (4096, 1024, 1024)", "32 heads".
[[nodiscard]] std::string ToString(const MatrixView& view);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_MATRIX_VIEW_H_
