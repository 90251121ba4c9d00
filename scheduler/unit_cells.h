// Works out the cells of every unit: which fragments contribute to which box, whose weights are
// taken at the start, and who receives new ones.
#ifndef DMUOND_SCHEDULER_UNIT_CELLS_H_
#define DMUOND_SCHEDULER_UNIT_CELLS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/plan.h"

namespace dmuond::scheduler {

// [begin, end) of every parameter's fragments in Layout::fragments.
[[nodiscard]] std::vector<std::pair<int32_t, int32_t>> FragmentRanges(const Layout& layout);

// Fills plan.cells and plan.holders for plan.units.
[[nodiscard]] absl::Status FillCells(const Layout& layout, Plan& plan);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_UNIT_CELLS_H_
