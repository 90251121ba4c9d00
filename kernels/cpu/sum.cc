#include "kernels/cpu/sum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/box_walk.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/copy.h"

namespace dmuond::kernels::cpu {
namespace {

// 8 KiB of fp32: the open nodes of a tree over 16 sources stay in a 48 KiB first-level cache.
constexpr int64_t kChunk = 2048;
constexpr int kLevels = kSumLevelMax + 1;

DMUOND_CLONES void AddInto(float* __restrict a, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] += b[i];
}
DMUOND_CLONES void Add(const float* a, const float* b, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}
DMUOND_CLONES void Scale(const float* a, float factor, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * factor;
}
DMUOND_CLONES void ScaleInPlace(float* a, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] *= factor;
}

// The tree, walked like a binary counter: a complete subtree of 2^l sources waits on the stack
// until its sibling is complete. What is left at the end is merged from the small end, which
// carries odd last nodes up.
class Tree {
 public:
  void Reset(int64_t length) {
    length_ = length;
    depth_ = 0;
  }

  // `values` is the next source's chunk, null if absent; it stands for 2^level leaves. It must stay
  // where it is until its sibling comes: the caller hands in its own fp32 memory, or LeafBuffer().
  void Push(const float* values, int level) {
    stack_[depth_++] = {values, level};
    while (depth_ >= 2 && stack_[depth_ - 1].level == stack_[depth_ - 2].level) MergeTop();
  }
  // Where a source that needs widening goes; valid for the next Push.
  [[nodiscard]] float* LeafBuffer() { return buffers_[depth_].data(); }

  // The sum, null if every source was absent.
  [[nodiscard]] const float* Finish() {
    while (depth_ >= 2) MergeTop();
    return stack_[0].values;
  }

 private:
  struct Node {
    const float* values = nullptr;
    int level = 0;
  };

  void MergeTop() {
    Node& left = stack_[depth_ - 2];
    const Node right = stack_[depth_ - 1];
    float* own = buffers_[depth_ - 2].data();
    if (left.values == nullptr) {
      left.values = right.values;
      // A buffer belongs to its place on the stack; a node that moves down takes its values along.
      if (right.values == buffers_[depth_ - 1].data()) {
        std::memcpy(own, right.values, static_cast<size_t>(length_) * sizeof(float));
        left.values = own;
      }
    } else if (right.values != nullptr) {
      if (left.values == own) {
        AddInto(own, right.values, length_);
      } else {
        Add(left.values, right.values, own, length_);
      }
      left.values = own;
    }
    ++left.level;
    --depth_;
  }

  int64_t length_ = 0;
  int depth_ = 0;
  std::array<Node, kLevels + 1> stack_;
  alignas(64) std::array<std::array<float, kChunk>, kLevels + 1> buffers_;
};

const StridedBox* OnlySource(const SumTask& task) {
  const StridedBox* only = nullptr;
  for (const StridedBox& source : task.sources) {
    if (source.data == nullptr) continue;
    if (only != nullptr) return nullptr;
    only = &source;
  }
  return only;
}

void StoreSum(const SumTask& task, const float* sum, int64_t offset, int64_t stride,
              int64_t length) {
  if (stride == 1) {
    auto* to = reinterpret_cast<float*>(task.dst.data) + offset;
    if (task.factor == 1.0F) {
      std::memcpy(to, sum, static_cast<size_t>(length) * sizeof(float));
    } else {
      Scale(sum, task.factor, to, length);
    }
    return;
  }
  std::array<float, kChunk> scaled;
  std::memcpy(scaled.data(), sum, static_cast<size_t>(length) * sizeof(float));
  if (task.factor != 1.0F) ScaleInPlace(scaled.data(), task.factor, length);
  StoreRun(DType::kF32, task.dst.data, offset, stride, scaled.data(), length);
}

}  // namespace

absl::Status CheckTree(const SumTask& task) {
  if (!task.levels.empty() && task.levels.size() != task.sources.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a sum has ", task.sources.size(),
                                                   " sources and ", task.levels.size(), " levels"));
  }
  constexpr int64_t kLeavesMax = int64_t{1} << kSumLevelMax;
  int64_t leaves = 0;
  for (size_t i = 0; i < task.sources.size(); ++i) {
    const int level = task.levels.empty() ? 0 : task.levels[i];
    const int64_t own = int64_t{1} << std::min(level, kSumLevelMax + 1);
    if (leaves + own > kLeavesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a sum has more than ", kLeavesMax, " leaves"));
    }
    if (leaves % own != 0) {
      return absl::InvalidArgumentError(absl::StrCat("source ", i, " of a sum stands for ", own,
                                                     " leaves but begins at leaf ", leaves));
    }
    leaves += own;
  }
  return absl::OkStatus();
}

void SumElements(const SumTask& task, int64_t begin, int64_t end) {
  BoxWalk walk(task.dst);
  if (const StridedBox* only = OnlySource(task); only != nullptr && task.factor == 1.0F) {
    walk.Add(*only);
    walk.Simplify();
    return CopyElements(walk, task.dst, *only, begin, end);
  }
  for (const StridedBox& source : task.sources) {
    if (source.data != nullptr) walk.Add(source);
  }
  walk.Simplify();
  const bool contiguous = walk.contiguous_runs();
  const auto stride = [&](size_t box) { return contiguous ? 1 : walk.run_stride(box); };
  Tree tree;
  walk.Runs(begin, end, kChunk, [&](const int64_t* offsets, int64_t length) {
    tree.Reset(length);
    size_t box = 0;
    for (size_t i = 0; i < task.sources.size(); ++i) {
      const StridedBox& source = task.sources[i];
      const int level = task.levels.empty() ? 0 : task.levels[i];
      if (source.data == nullptr) {
        tree.Push(nullptr, level);
        continue;
      }
      ++box;
      if (source.dtype == DType::kF32 && stride(box) == 1) {
        tree.Push(reinterpret_cast<const float*>(source.data) + offsets[box], level);
      } else {
        float* leaf = tree.LeafBuffer();
        LoadRun(source.dtype, source.data, offsets[box], stride(box), leaf, length);
        tree.Push(leaf, level);
      }
    }
    if (const float* sum = box == 0 ? nullptr : tree.Finish(); sum != nullptr) {
      StoreSum(task, sum, offsets[0], stride(0), length);
    } else {
      const std::array<float, 1> zero{};
      for (int64_t i = 0; i < length; ++i) {
        StoreRun(DType::kF32, task.dst.data, offsets[0] + i * stride(0), 1, zero.data(), 1);
      }
    }
  });
}

}  // namespace dmuond::kernels::cpu
