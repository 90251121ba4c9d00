// Half-open n-d boxes of element indices.
#ifndef DMUOND_SCHEDULER_BOX_H_
#define DMUOND_SCHEDULER_BOX_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "scheduler/limits.h"

namespace dmuond::scheduler {

// Most tensors have two dimensions at most; a job has millions of these.
using Extents = absl::InlinedVector<int64_t, 2>;

// A half-open n-d box of element indices. Zero-dimensional (a scalar) has one element.
struct Box {
  Extents begin;
  Extents end;
  bool operator==(const Box&) const = default;
};
[[nodiscard]] Box WholeBox(const Extents& shape);
[[nodiscard]] int64_t Elements(const Box& box);  // 0 for an empty box
[[nodiscard]] bool Empty(const Box& box);
// May be empty, then with end < begin or end == begin in some dimension. REQUIRES: equal dims.
[[nodiscard]] Box Intersect(const Box& a, const Box& b);
[[nodiscard]] bool Intersects(const Box& a, const Box& b);
[[nodiscard]] bool Contains(const Box& outer, const Box& inner);
[[nodiscard]] Extents ShapeOf(const Box& box);
[[nodiscard]] std::string ToString(const Box& box);             // "[0:5, 0:1024]"
[[nodiscard]] std::string ShapeToString(const Extents& shape);  // "5x1024", "scalar"

// Element strides of a contiguous row-major tensor of this shape.
[[nodiscard]] Extents RowMajorStrides(const Extents& shape);

// Row-major index of `index` in a tensor of `shape`.
[[nodiscard]] int64_t FlatIndex(const Extents& shape, const Extents& index);

// Whether the elements of `box` are consecutive in the row-major order of a tensor of `shape`.
[[nodiscard]] bool IsFlatRange(const Extents& shape, const Box& box);

// Orders boxes by begin, then end; for maps and for results that do not depend on arrival order.
[[nodiscard]] bool Before(const Box& a, const Box& b);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_BOX_H_
