// What the boxes of several holders make together: the cells of their arrangement, holes, overlaps,
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

// Boxes with the labels (fragment indices, say) of those who hold them: equal boxes once.
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

// Two boxes of those given that have an element in common, as indices; nothing where no two have.
// Time grows with the square of the boxes where they are chosen out of malice.
[[nodiscard]] std::optional<std::pair<int32_t, int32_t>> FindOverlap(const std::vector<Box>& boxes);

// The dimension in which most boxes begin at places of their own: sorted along it, each box is
// compared with few others. REQUIRES: `boxes` not empty, all of the same dimensions.
[[nodiscard]] size_t MostDifferent(const std::vector<Box>& boxes);

// Partition of `within` into boxes with one set of holders each, neighbours with equal sets merged
// where slabs agree; in row-major order of their begins. RESOURCE_EXHAUSTED beyond
// kCellsPerParameterMax cells. REQUIRES: `held` not empty boxes, of within's dims.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> Arrange(const Box& within,
                                                                const std::vector<HeldBox>& held);
// Looks at those HeldBoxes only, as indices, ascending: REQUIRES that no others reach into
// `within`.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> Arrange(
    const Box& within, const std::vector<HeldBox>& held, const std::vector<int32_t>& candidates);

// Whether they can be arranged with so much work (kArrangeWorkMin), which is taken from `work`: the
// same cells, or RESOURCE_EXHAUSTED as soon as it is used up.
[[nodiscard]] absl::StatusOr<std::vector<ArrangedCell>> ArrangeWithin(
    int64_t& work, const Box& within, const std::vector<HeldBox>& held);

// The labels of all who hold the cell, ascending.
[[nodiscard]] Indices LabelsOf(const ArrangedCell& cell, const std::vector<HeldBox>& held);

// Disjoint boxes that together cover exactly what `boxes` cover of `within`; few of them: what
// merges slab by slab is merged.
[[nodiscard]] absl::StatusOr<std::vector<Box>> Union(const Box& within,
                                                     const std::vector<Box>& boxes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_FRAGMENT_ALGEBRA_H_
