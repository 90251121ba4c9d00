#include "kernels/cpu/sum.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/box_walk.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/f16c.h"
#include "kernels/cpu/four_streams.h"
#include "kernels/cpu/norms.h"
#include "kernels/cpu/stream_copy.h"

namespace dmuond::kernels::cpu {
namespace {

// 16 KiB of fp32: the open nodes of a tree stay in the first- and second-level cache, and a quarter
// of it is a page (four_streams.h).
constexpr int64_t kChunk = 4096;
static_assert(kChunk == SquareSum::kChunk);
constexpr int kLevels = kSumLevelMax + 1;

DMUOND_CLONES void AddInto(float* __restrict a, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] += b[i];
}
DMUOND_CLONES void Add(const float* a, const float* b, float* __restrict out, int64_t n) {
  ForFourStreams(n, [=](int64_t i) { out[i] = a[i] + b[i]; });
}
// Four leaves at once, and so four reads at a time.
DMUOND_CLONES void AddFour(const float* a, const float* b, const float* c, const float* d,
                           float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = (a[i] + b[i]) + (c[i] + d[i]);
}
DMUOND_CLONES void AddFourBF16(const uint16_t* a, const uint16_t* b, const uint16_t* c,
                               const uint16_t* d, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = (FromBF16(a[i]) + FromBF16(b[i])) + (FromBF16(c[i]) + FromBF16(d[i]));
  }
}
DMUOND_CLONES void AddFourF16(const uint16_t* a, const uint16_t* b, const uint16_t* c,
                              const uint16_t* d, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = (FromF16(a[i]) + FromF16(b[i])) + (FromF16(c[i]) + FromF16(d[i]));
  }
}
DMUOND_CLONES void ScaleBF16(const uint16_t* a, float factor, float* __restrict out, int64_t n) {
  ForFourStreams(n, [=](int64_t i) { out[i] = FromBF16(a[i]) * factor; });
}
DMUOND_CLONES void Scale(const float* a, float factor, float* __restrict out, int64_t n) {
  ForFourStreams(n, [=](int64_t i) { out[i] = a[i] * factor; });
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
  // True if a next source of this level would begin a subtree of four of its kind.
  [[nodiscard]] bool AtMultipleOfFour(int level) const {
    return depth_ == 0 || stack_[depth_ - 1].level >= level + 2;
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

// Where the results of one task go.
struct Output {
  const SumTask& task;
  int64_t stride;
  bool stream;
  SquareSum* squares;  // of what is stored, or null

  // `sum` without the task's factor; `factor` is what is still to be applied.
  void Store(const float* sum, float factor, int64_t offset, int64_t length,
             const Ahead& ahead) const {
    float* const to = reinterpret_cast<float*>(task.dst.data) + offset;
    if (stream && squares != nullptr && length == kChunk &&
        reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      return squares->AddStreaming(sum, factor, to, ahead);
    }
    alignas(64) std::array<float, kChunk> scaled;
    if (factor != 1.0F) {
      Scale(sum, factor, scaled.data(), length);
      sum = scaled.data();
    }
    if (squares != nullptr) squares->Add(sum, length);
    if (stream) {
      StreamCopy(to, sum, static_cast<size_t>(length) * sizeof(float));
    } else {
      StoreRun(DType::kF32, task.dst.data, offset, stride, sum, length);
    }
  }
};

// The sum of one task, chunk by chunk.
class Summation {
 public:
  // Where squares are asked for and chunks do not follow each other as they do in memory, what is
  // stored is read again, from the cache.
  Summation(const SumTask& task, const BoxWalk& walk)
      : task_(task),
        walk_(walk),
        contiguous_(walk.contiguous_runs()),
        only_bf16_(OnlyBF16()),
        output_{task, Stride(0),
                Stride(0) == 1 && (task.squares == nullptr || walk.single_run()) &&
                    static_cast<size_t>(walk.elements()) * sizeof(float) >= kStreamBytesMin,
                task.squares != nullptr && walk.single_run() ? &squares_ : nullptr} {}

  void Run(int64_t begin, int64_t end) {
    Store(begin, end);
    StreamFence();
    if (task_.squares == nullptr) return;
    const auto* stored = reinterpret_cast<const float*>(task_.dst.data) + begin;
    task_.squares[begin / kNormBlock] =
        output_.squares != nullptr ? squares_.Total() : SumOfSquares(stored, end - begin);
  }

 private:
  void Store(int64_t begin, int64_t end) {
    static constexpr std::array<float, kChunk> kZeros{};
    walk_.Runs(begin, end, kChunk, [&](const int64_t* offsets, int64_t length) {
      if (only_bf16_ != nullptr) {
        float* widened = tree_.LeafBuffer();
        ScaleBF16(reinterpret_cast<const uint16_t*>(only_bf16_->data) + offsets[1], task_.factor,
                  widened, length);
        return output_.Store(widened, 1.0F, offsets[0], length, AheadOf(offsets, end, widened));
      }
      tree_.Reset(length);
      size_t box = 1;
      for (size_t i = 0; i < task_.sources.size();) {
        const size_t taken =
            IsFour(i) ? PushFour(i, offsets + box, length) : PushOne(i, box, offsets, length);
        for (size_t k = i; k < i + taken; ++k) box += task_.sources[k].data == nullptr ? 0 : 1;
        i += taken;
      }
      const float* sum = task_.sources.empty() ? nullptr : tree_.Finish();
      if (sum == nullptr) sum = kZeros.data();
      output_.Store(sum, task_.factor, offsets[0], length, AheadOf(offsets, end, sum));
    });
  }

  // The one source, where it can be widened and scaled in one pass.
  [[nodiscard]] const StridedBox* OnlyBF16() const {
    const StridedBox* only = OnlySource(task_);
    return contiguous_ && only != nullptr && only->dtype == DType::kBF16 ? only : nullptr;
  }

  // The next chunk of the first two sources; `cached` where there is none. Streaming stores leave
  // the time for it. More than two sources are read in lockstep and need no help.
  [[nodiscard]] Ahead AheadOf(const int64_t* offsets, int64_t end, const float* cached) const {
    Ahead ahead;
    ahead.sources.fill(reinterpret_cast<const std::byte*>(cached));
    if (offsets[0] + 2 * kChunk > end || walk_.boxes() > 1 + ahead.sources.size()) return ahead;
    size_t box = 0;
    for (const StridedBox& source : task_.sources) {
      if (source.data == nullptr) continue;
      ahead.element_bytes = static_cast<int64_t>(SizeOf(source.dtype));
      ahead.sources[box] = source.data + (offsets[box + 1] + kChunk) * ahead.element_bytes;
      ++box;
    }
    return ahead;
  }

  [[nodiscard]] int64_t Stride(size_t box) const { return contiguous_ ? 1 : walk_.run_stride(box); }
  [[nodiscard]] int Level(size_t i) const { return task_.levels.empty() ? 0 : task_.levels[i]; }

  // True if sources i to i+3 are present, contiguous, of one type and the four leaves of a subtree.
  [[nodiscard]] bool IsFour(size_t i) const {
    if (!contiguous_ || i + 4 > task_.sources.size() || !tree_.AtMultipleOfFour(Level(i))) {
      return false;
    }
    for (size_t k = i; k < i + 4; ++k) {
      const StridedBox& source = task_.sources[k];
      if (source.data == nullptr || Level(k) != Level(i) ||
          source.dtype != task_.sources[i].dtype) {
        return false;
      }
    }
    return true;
  }

  size_t PushFour(size_t i, const int64_t* offsets, int64_t length) {
    const auto at = [&](size_t k) {
      const StridedBox& source = task_.sources[i + k];
      return source.data + offsets[k] * static_cast<int64_t>(SizeOf(source.dtype));
    };
    const auto floats = [&](size_t k) { return reinterpret_cast<const float*>(at(k)); };
    const auto halves = [&](size_t k) { return reinterpret_cast<const uint16_t*>(at(k)); };
    float* out = tree_.LeafBuffer();
    switch (task_.sources[i].dtype) {
      case DType::kF32:
        AddFour(floats(0), floats(1), floats(2), floats(3), out, length);
        break;
      case DType::kBF16:
        AddFourBF16(halves(0), halves(1), halves(2), halves(3), out, length);
        break;
      case DType::kF16:
        if (HasF16C()) {
          AddFourF16C(halves(0), halves(1), halves(2), halves(3), out, length);
        } else {
          AddFourF16(halves(0), halves(1), halves(2), halves(3), out, length);
        }
        break;
    }
    tree_.Push(out, Level(i) + 2);
    return 4;
  }

  size_t PushOne(size_t i, size_t box, const int64_t* offsets, int64_t length) {
    const StridedBox& source = task_.sources[i];
    if (source.data == nullptr) {
      tree_.Push(nullptr, Level(i));
    } else if (source.dtype == DType::kF32 && Stride(box) == 1) {
      tree_.Push(reinterpret_cast<const float*>(source.data) + offsets[box], Level(i));
    } else {
      float* leaf = tree_.LeafBuffer();
      LoadRun(source.dtype, source.data, offsets[box], Stride(box), leaf, length);
      tree_.Push(leaf, Level(i));
    }
    return 1;
  }

  SquareSum squares_;
  Tree tree_;
  const SumTask& task_;
  const BoxWalk& walk_;
  bool contiguous_;
  const StridedBox* only_bf16_;
  Output output_;
};

}  // namespace

void SumElements(const SumTask& task, int64_t begin, int64_t end) {
  BoxWalk walk(task.dst);
  if (const StridedBox* only = OnlySource(task);
      only != nullptr && task.factor == 1.0F && task.squares == nullptr) {
    walk.Add(*only);
    walk.Simplify();
    return CopyElements(walk, task.dst, *only, begin, end);
  }
  for (const StridedBox& source : task.sources) {
    if (source.data != nullptr) walk.Add(source);
  }
  walk.Simplify();
  Summation(task, walk).Run(begin, end);
}

}  // namespace dmuond::kernels::cpu
