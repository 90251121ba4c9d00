// Cuts AdamW tensors into pieces. A box that one trainer alone holds stays with the lane of that
// trainer, and is cut only where it is too large for a spare slot. A box that several hold is
// divided among lanes.
#ifndef DMUOND_SCHEDULER_PIECES_H_
#define DMUOND_SCHEDULER_PIECES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/fragment_algebra.h"
#include "scheduler/layout.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

// Cuts a box of a tensor of `shape` into boxes of at most `elements_max` elements, in row-major
// order. Cuts fall on multiples of kPieceCut of the tensor's row-major elements where the shape has
// such places between its rows at all (every width that is a multiple of 64, with pieces of a few
// MiB); else between any two rows, and then the global norm agrees to 1e-12 only (docs/maths.md).
[[nodiscard]] std::vector<Box> CutBox(const Extents& shape, const Box& box, int64_t elements_max);

// Cuts a box along its rows into at most shares.size() consecutive boxes with about these shares of
// its elements (shares in any unit, not negative, not all zero); the i-th box belongs to share i,
// empty where there was no row left for it. Same places for cuts as CutBox. REQUIRES: not a scalar.
[[nodiscard]] std::vector<Box> CutByShares(const Extents& shape, const Box& box,
                                           const std::vector<int64_t>& shares);

// A box of an AdamW tensor with one set of holders.
struct HeldCell {
  int32_t parameter = 0;
  Box box;
  Indices fragments;  // ascending
};
// The cells of all AdamW parameters.
[[nodiscard]] absl::StatusOr<std::vector<HeldCell>> AdamWCells(const Layout& layout);

[[nodiscard]] Unit MakePiece(const Layout& layout, int32_t parameter, Box box, LaneId owner);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_PIECES_H_
