// Units of ownership, the cells in which their gradients come together, and where a cell lies in
// the contiguous memory of its unit.
#ifndef DMUOND_SCHEDULER_UNIT_H_
#define DMUOND_SCHEDULER_UNIT_H_

#include <cstdint>
#include <vector>

#include "scheduler/box.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

enum class UnitKind : uint8_t { kMatrix = 1, kPiece = 2 };

// The smallest thing with one owner: a matrix, or a piece of an AdamW tensor. Always a box: state
// store and snapshots are keyed by (parameter, box).
struct Unit {
  UnitId id;
  UnitKind kind = UnitKind::kMatrix;
  int32_t parameter = 0;
  Box box;           // in the parameter; a matrix has extent 1 in all but its last two dimensions
  int64_t rows = 0;  // matrix: m, n. Piece: 1, elements
  int64_t cols = 0;
  // Sums of squares are counted in blocks of the whole tensor where the elements of a piece are
  // consecutive there (`flat`): then this is the index of its first element in the row-major
  // tensor. Otherwise, and for matrices, blocks are counted from the unit's own first element and
  // this is 0.
  int64_t first_element = 0;
  bool flat = false;
  BucketId bucket;
  LaneId owner;
  int32_t batch = -1;  // index into the owner's LaneProgram::batches
};

// How one cell of a unit comes together: the box and the ranks whose fragments contribute to its
// gradient, in rank order. SAME: one rank. The order of summation is the fixed tree over this list
// (summation_tree.h). The first weights of the box are those of its lowest holder.
struct Cell {
  Box box;             // in the parameter, inside the unit's box
  Indices fragments;   // into Layout::fragments, by rank; SAME: the lowest rank's only
  int32_t lowest = 0;  // into Layout::fragments: of the lowest rank that holds the box
};

// Memory of a unit (reduced gradient, state tensors, new weights) is its box, row-major and
// contiguous: element x of the parameter lies at index sum_d (x_d - unit.box.begin_d) * strides_d,
// with the row-major strides of the unit's own shape. A cell, or any box inside the unit, is seen
// in that memory as a strided box.
struct StridedView {
  int64_t offset_elements = 0;
  Extents shape;
  Extents strides;  // in elements, outermost dimension first
  bool operator==(const StridedView&) const = default;
};
// Where `part` lies in memory that holds `whole` row-major and contiguous; all of a parameter's
// dimensions are kept. REQUIRES: Contains(whole, part).
[[nodiscard]] StridedView ViewInBox(const Box& whole, const Box& part);
[[nodiscard]] StridedView ViewInUnit(const Unit& unit, const Box& part);

// Where `part` lies in a memory that holds `whole` with the given strides, counted from whole's
// first element: how a fragment's slice is cut down to a cell.
[[nodiscard]] StridedView ViewInSlice(const Box& whole, const Extents& strides, const Box& part);

// Whether the view's elements are consecutive in memory.
[[nodiscard]] bool IsContiguous(const StridedView& view);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_UNIT_H_
