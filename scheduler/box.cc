#include "scheduler/box.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dmuond::scheduler {

Box WholeBox(const Extents& shape) { return {Extents(shape.size(), 0), shape}; }

int64_t Elements(const Box& box) {
  int64_t elements = 1;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    elements *= std::max<int64_t>(0, box.end[d] - box.begin[d]);
  }
  return elements;
}

bool Empty(const Box& box) {
  for (size_t d = 0; d < box.begin.size(); ++d) {
    if (box.end[d] <= box.begin[d]) return true;
  }
  return false;
}

Box Intersect(const Box& a, const Box& b) {
  Box result = a;
  for (size_t d = 0; d < a.begin.size(); ++d) {
    result.begin[d] = std::max(a.begin[d], b.begin[d]);
    result.end[d] = std::min(a.end[d], b.end[d]);
  }
  return result;
}

bool Intersects(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.begin.size(); ++d) {
    if (std::max(a.begin[d], b.begin[d]) >= std::min(a.end[d], b.end[d])) return false;
  }
  return true;
}

bool Contains(const Box& outer, const Box& inner) {
  if (outer.begin.size() != inner.begin.size()) return false;
  for (size_t d = 0; d < outer.begin.size(); ++d) {
    if (inner.begin[d] < outer.begin[d] || inner.end[d] > outer.end[d]) return false;
  }
  return true;
}

Extents ShapeOf(const Box& box) {
  Extents shape(box.begin.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    shape[d] = std::max<int64_t>(0, box.end[d] - box.begin[d]);
  }
  return shape;
}

std::string ToString(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.begin.size(); ++d) {
    absl::StrAppend(&text, d == 0 ? "" : ", ", box.begin[d], ":", box.end[d]);
  }
  return text + "]";
}

std::string ShapeToString(const Extents& shape) {
  return shape.empty() ? "scalar" : absl::StrJoin(shape, "x");
}

Extents RowMajorStrides(const Extents& shape) {
  Extents strides(shape.size(), 1);
  for (size_t d = shape.size(); d > 1; --d) strides[d - 2] = strides[d - 1] * shape[d - 1];
  return strides;
}

int64_t FlatIndex(const Extents& shape, const Extents& index) {
  int64_t flat = 0;
  for (size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + index[d];
  return flat;
}

bool IsFlatRange(const Extents& shape, const Box& box) {
  // Single indices first, then any range, then whole dimensions only.
  size_t d = 0;
  while (d < shape.size() && box.end[d] - box.begin[d] == 1) ++d;
  for (++d; d < shape.size(); ++d) {
    if (box.begin[d] != 0 || box.end[d] != shape[d]) return false;
  }
  return true;
}

bool Before(const Box& a, const Box& b) {
  if (a.begin != b.begin) return a.begin < b.begin;
  return a.end < b.end;
}

}  // namespace dmuond::scheduler
