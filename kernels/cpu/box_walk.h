// Walks several strided boxes of one shape together, in runs along the innermost dimension.
// Dimensions of size one vanish, dimensions that lie behind one another in every box become one,
// and the order of dimensions follows the first box's strides: a whole tensor or a row shard is one
// run, a column shard one run per row.
#ifndef DMUOND_KERNELS_CPU_BOX_WALK_H_
#define DMUOND_KERNELS_CPU_BOX_WALK_H_

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Threads: const functions from any. Allocates only beyond 17 boxes.
class BoxWalk {
 public:
  // The first box gives shape and order. REQUIRES: all boxes have its shape.
  explicit BoxWalk(const StridedBox& first) : boxes_{first.strides} { SetShape(first); }
  void Add(const StridedBox& box) { boxes_.push_back(box.strides); }
  // Call once, after the last Add.
  void Simplify();

  [[nodiscard]] int64_t elements() const { return elements_; }
  [[nodiscard]] size_t boxes() const { return boxes_.size(); }
  // Outermost first, as simplified; strides in elements.
  [[nodiscard]] int dims() const { return dims_; }
  [[nodiscard]] int64_t size(int dim) const { return shape_[dim]; }
  [[nodiscard]] int64_t stride(size_t box, int dim) const { return boxes_[box][dim]; }
  // Distance of neighbours in a run, in elements.
  [[nodiscard]] int64_t run_stride(size_t box) const { return boxes_[box][dims_ - 1]; }
  // True if runs are contiguous in every box.
  [[nodiscard]] bool contiguous_runs() const;

  // True if there is one run, contiguous in every box: elements in walking order are those in
  // memory.
  [[nodiscard]] bool single_run() const { return dims_ == 1 && contiguous_runs(); }

  // Calls visit(const int64_t* offsets, int64_t length) for the elements [begin, end), counted in
  // walking order; offsets[i] is where the run begins in box i, in elements. No run is longer than
  // length_max.
  template <typename Visit>
  void Runs(int64_t begin, int64_t end, int64_t length_max, Visit&& visit) const;

 private:
  using Dims = std::array<int64_t, kDimsMax>;
  void SetShape(const StridedBox& box);
  void SortDims();
  void MergeDims();

  int dims_ = 0;
  int64_t elements_ = 1;
  Dims shape_{};
  absl::InlinedVector<Dims, 17> boxes_;  // strides of each box
};

template <typename Visit>
void BoxWalk::Runs(int64_t begin, int64_t end, int64_t length_max, Visit&& visit) const {
  absl::InlinedVector<int64_t, 17> row(boxes_.size());
  absl::InlinedVector<int64_t, 17> offsets(boxes_.size());
  const int inner = dims_ - 1;
  const int64_t row_length = shape_[inner];
  while (begin < end) {
    int64_t rest = begin / row_length;
    int64_t column = begin % row_length;
    std::fill(row.begin(), row.end(), 0);
    for (int d = inner - 1; d >= 0; --d) {
      const int64_t index = rest % shape_[d];
      rest /= shape_[d];
      for (size_t box = 0; box < boxes_.size(); ++box) row[box] += index * boxes_[box][d];
    }
    const int64_t row_end = std::min(row_length, column + (end - begin));
    begin += row_end - column;
    while (column < row_end) {
      const int64_t length = std::min(length_max, row_end - column);
      for (size_t box = 0; box < boxes_.size(); ++box) {
        offsets[box] = row[box] + column * boxes_[box][inner];
      }
      visit(offsets.data(), length);
      column += length;
    }
  }
}

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_BOX_WALK_H_
