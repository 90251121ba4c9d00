// Geometry of the boxes that several trainers hold of one tensor: their cells, holes, overlaps and
// unions.
#ifndef DMUOND_SCHEDULER_FRAGMENT_ALGEBRA_H_
#define DMUOND_SCHEDULER_FRAGMENT_ALGEBRA_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/box.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// A box with the labels (fragment indices, say) of all who hold it.
struct HeldBox {
  Box box;
  Indices labels;  // ascending
};

struct Holding {
  Box box;
  int32_t label = 0;
};

// Equal boxes become one HeldBox; empty boxes are left out. Sorted by box; a function of the set of
// holdings, not of their order.
[[nodiscard]] std::vector<HeldBox> GroupEqualBoxes(std::vector<Holding> holdings);

// A part of space in which every element is held by the same HeldBoxes.
struct ArrangedCell {
  Box box;
  Indices held;  // indices into the HeldBoxes, ascending; empty: a hole
};

// Returns the indices of two boxes that have an element in common, or nullopt. The time grows with
// the square of their number only for boxes that were made to be slow.
[[nodiscard]] std::optional<std::pair<int32_t, int32_t>> FindOverlap(const std::vector<Box>& boxes);

// The dimension in which boxes have the most different begins: sorted along it, each box has few
// others to be compared with. REQUIRES: `boxes` is not empty, and all have the same dimensions.
[[nodiscard]] size_t MostDifferent(const std::vector<Box>& boxes);

// Divides `within` into boxes each of which has one set of holders. Neighbours with equal sets are
// merged where slabs agree; the result is in row-major order of begins. RESOURCE_EXHAUSTED beyond
// kCellsPerParameterMax cells. REQUIRES: no box of `held` is empty, and all have within's
// dimensions.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> Arrange(const Box& within,
                                                                const std::vector<HeldBox>& held);
// The same, looking only at the HeldBoxes with the ascending indices `candidates`. REQUIRES: no
// other one reaches into `within`.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> Arrange(
    const Box& within, const std::vector<HeldBox>& held, const std::vector<int32_t>& candidates);

// The same with a budget (kArrangeWorkMin): what arranging takes is subtracted from `work`, and
// RESOURCE_EXHAUSTED comes back as soon as nothing is left.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> ArrangeWithin(
    int64_t& work, const Box& within, const std::vector<HeldBox>& held);

// The labels of all who hold the cell, ascending.
[[nodiscard]] Indices LabelsOf(const ArrangedCell& cell, const std::vector<HeldBox>& held);

// Returns disjoint boxes that together cover exactly what `boxes` cover of `within`. Boxes that fit
// together slab by slab are merged, so that there are few.
[[nodiscard]] absl::StatusOr<std::vector<Box>> Union(const Box& within,
                                                     const std::vector<Box>& boxes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_FRAGMENT_ALGEBRA_H_
