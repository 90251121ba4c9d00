#include "scheduler/pieces.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// The outermost dimension along which a box can be cut.
size_t CutDimension(const Box& box) {
  size_t d = 0;
  while (d + 1 < box.begin.size() && box.end[d] - box.begin[d] == 1) ++d;
  return d;
}

// Where along its dimension a box may be cut: at begin + first + k * step.
struct CutPlaces {
  int64_t first = 0;
  int64_t step = 1;
};

// Of an odd number, modulo 2^64: each round doubles the bits that are right, of which there are
// three at first.
uint64_t Inverse(uint64_t odd) {
  uint64_t inverse = odd;
  for (int bits = 3; bits < 64; bits *= 2) inverse *= 2 - odd * inverse;
  return inverse;
}
static_assert((kPieceCut & (kPieceCut - 1)) == 0, "a power of two");

// Places at multiples of kPieceCut of the tensor's row-major elements; step 0 where there are none.
// `inner`: elements of the box per index of the dimension.
CutPlaces AlignedPlaces(const Extents& shape, const Box& box, size_t dim, int64_t inner) {
  const Extents strides = RowMajorStrides(shape);
  if (!IsFlatRange(shape, box)) {
    // Not consecutive in the tensor: blocks are counted from the piece's own start anyway.
    const int64_t step = kPieceCut / std::gcd(kPieceCut, inner);
    return {step, step};
  }
  const int64_t common = std::gcd(kPieceCut, strides[dim]);
  const int64_t step = kPieceCut / common;
  const int64_t start = FlatIndex(shape, box.begin) % kPieceCut;
  // start + row * stride is a multiple of kPieceCut.
  if (start % common != 0) return {0, 0};
  const auto odd = static_cast<uint64_t>(strides[dim] / common);
  const uint64_t row = (0 - static_cast<uint64_t>(start / common)) * Inverse(odd);
  const auto first = static_cast<int64_t>(row % static_cast<uint64_t>(step));
  return {first == 0 ? step : first, step};
}

// The place nearest to `row`, 0 and `extent` included.
int64_t Nearest(const CutPlaces& places, int64_t row, int64_t extent) {
  if (row < places.first) return 2 * row < places.first ? 0 : std::min(places.first, extent);
  const int64_t steps = (row - places.first + places.step / 2) / places.step;
  return std::min(extent, places.first + steps * places.step);
}

Box Rows(const Box& box, size_t dim, int64_t from, int64_t to) {
  Box rows = box;
  rows.begin[dim] = box.begin[dim] + from;
  rows.end[dim] = box.begin[dim] + to;
  return rows;
}

}  // namespace

std::vector<Box> CutBox(const Extents& shape, const Box& box, int64_t elements_max) {
  const int64_t elements = Elements(box);
  if (elements <= elements_max) return {box};
  const size_t dim = CutDimension(box);
  const int64_t extent = box.end[dim] - box.begin[dim];
  const int64_t inner = elements / extent;
  std::vector<Box> pieces;
  if (inner > elements_max) {
    for (int64_t i = 0; i < extent; ++i) {
      std::vector<Box> parts = CutBox(shape, Rows(box, dim, i, i + 1), elements_max);
      pieces.insert(pieces.end(), parts.begin(), parts.end());
    }
    return pieces;
  }
  const int64_t rows_max = elements_max / inner;
  CutPlaces places = AlignedPlaces(shape, box, dim, inner);
  if (places.step == 0 || places.step > rows_max || places.first > rows_max) places = {rows_max, 1};
  for (int64_t from = 0; from < extent;) {
    int64_t to = from + rows_max;
    if (to >= extent) {
      to = extent;
    } else {
      to = places.first + (to - places.first) / places.step * places.step;
    }
    pieces.push_back(Rows(box, dim, from, to));
    from = to;
  }
  return pieces;
}

std::vector<Box> CutByShares(const Extents& shape, const Box& box,
                             const std::vector<int64_t>& shares) {
  const size_t dim = CutDimension(box);
  const int64_t extent = box.end[dim] - box.begin[dim];
  const int64_t elements = Elements(box);
  const int64_t inner = elements / extent;
  CutPlaces places = AlignedPlaces(shape, box, dim, inner);
  const auto lanes = static_cast<int64_t>(shares.size());
  // Aligned places that are too far apart for a fair cut give way to single rows.
  if (places.step == 0 || (places.step * inner > kPieceElementsMax && extent >= lanes)) {
    places = {1, 1};
  }
  __int128 total = 0;
  for (int64_t share : shares) total += share;
  std::vector<Box> pieces;
  pieces.reserve(shares.size());
  __int128 cumulated = 0;
  int64_t from = 0;
  for (int64_t i = 0; i < lanes; ++i) {
    cumulated += shares[i];
    const auto wanted = static_cast<int64_t>((cumulated * extent + total / 2) / total);
    int64_t to = wanted;
    if (to < extent) {
      to = Nearest(places, to, extent);
    }
    to = std::max(from, to);
    pieces.push_back(Rows(box, dim, from, to));
    from = to;
  }
  return pieces;
}

absl::StatusOr<std::vector<HeldCell>> AdamWCells(const Layout& layout) {
  std::vector<HeldCell> cells;
  size_t begin = 0;
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    size_t end = begin;
    while (end < layout.fragments.size() && layout.fragments[end].parameter == p) ++end;
    const Parameter& parameter = layout.parameters[p];
    if (parameter.route == Route::kAdamW) {
      std::vector<Holding> holdings;
      holdings.reserve(end - begin);
      for (size_t f = begin; f < end; ++f) {
        holdings.push_back({layout.fragments[f].box, static_cast<int32_t>(f)});
      }
      const std::vector<HeldBox> held = GroupEqualBoxes(std::move(holdings));
      auto arranged = Arrange(WholeBox(parameter.shape), held);
      if (!arranged.ok()) {
        return absl::Status(
            arranged.status().code(),
            absl::StrCat("parameter '", parameter.name, "': ", arranged.status().message()));
      }
      for (ArrangedCell& cell : *arranged) {
        HeldCell& held_cell = cells.emplace_back();
        held_cell.parameter = static_cast<int32_t>(p);
        held_cell.fragments = LabelsOf(cell, held);
        held_cell.box = std::move(cell.box);
      }
    }
    begin = end;
  }
  return cells;
}

Unit MakePiece(const Layout& layout, int32_t parameter, Box box, LaneId owner) {
  const Extents& shape = layout.parameters[parameter].shape;
  Unit unit;
  unit.kind = UnitKind::kPiece;
  unit.parameter = parameter;
  unit.rows = 1;
  unit.cols = Elements(box);
  unit.flat = IsFlatRange(shape, box);
  unit.first_element = unit.flat ? FlatIndex(shape, box.begin) : 0;
  unit.owner = owner;
  unit.box = std::move(box);
  return unit;
}

}  // namespace dmuond::scheduler
