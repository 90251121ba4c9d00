// Numbers the pieces of several items in one row, so that one ParallelFor covers a list of tasks of
// very different sizes. Where pieces are cut is a function of the item alone.
#ifndef DMUOND_KERNELS_CPU_PIECES_H_
#define DMUOND_KERNELS_CPU_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dmuond::kernels::cpu {

// 256 KiB of fp32: large against the cost of handing it out, small against a lane's share.
inline constexpr int64_t kPieceElements = 65536;

class Pieces {
 public:
  struct Place {
    size_t item = 0;
    int64_t piece = 0;
  };

  // Keeps its memory: after the largest list there are no more allocations.
  void Clear() { ends_.clear(); }
  void Add(int64_t pieces) { ends_.push_back(total() + pieces); }
  void AddElements(int64_t elements) { Add((elements + kPieceElements - 1) / kPieceElements); }
  [[nodiscard]] int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // REQUIRES: 0 <= index < total().
  [[nodiscard]] Place Locate(int64_t index) const {
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), index);
    const auto item = static_cast<size_t>(end - ends_.begin());
    return {item, index - (item == 0 ? 0 : ends_[item - 1])};
  }

 private:
  std::vector<int64_t> ends_;
};

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_PIECES_H_
