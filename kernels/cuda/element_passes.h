// Passes over consecutive elements: the ordered sum of replicas, sums of squares, AdamW. Several
// tensors of any sizes a launch. All enqueue into a stream and return; addresses are multiples of
// 16 bytes.
#ifndef DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_
#define DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

inline constexpr int kSumSourcesMax = 8;

// destination = factor * (ordered sum of `count` sources); kernels/ops.h, SumTask, says in which
// order. None: zero. One fp32 source with factor 1 is a copy of bits.
struct SumPass {
  float* destination = nullptr;
  int64_t elements = 0;
  const void* sources[kSumSourcesMax] = {};  // those that are present
  WeightType types[kSumSourcesMax] = {};
  // The tree, one addition after the other: into the node that begins with source `left` goes the
  // one that begins with source `right`.
  struct Addition {
    uint8_t left = 0;
    uint8_t right = 0;
  };
  Addition additions[kSumSourcesMax - 1] = {};
  int count = 0;
  float factor = 1;
  // Not null, in all passes of a launch or in none: also the sums of squares of the result, as
  // LaunchSquares() makes them.
  double* squares = nullptr;
};
cudaError_t LaunchSum(cudaStream_t stream, std::span<const SumPass> passes);

// Source by source, the tree of a SumPass: absent ones leave no trace in it. It is walked like a
// binary counter: a complete subtree waits until its sibling is complete.
class SumTree {
 public:
  explicit SumTree(SumPass& pass) : pass_(pass) { pass.count = 0; }
  // `data`: nullptr where absent. A source of `level` stands for 2^level leaves. False where
  // kSumSourcesMax are present already.
  bool Add(const void* data, WeightType type, int level) {
    Node node{level, kAbsent};
    if (data != nullptr) {
      if (pass_.count == kSumSourcesMax) return false;
      node.first = pass_.count;
      pass_.sources[pass_.count] = data;
      pass_.types[pass_.count++] = type;
    }
    open_[depth_++] = node;
    while (depth_ >= 2 && open_[depth_ - 1].level == open_[depth_ - 2].level) Merge();
    return true;
  }
  // What is left is merged from the small end, which carries odd last nodes up.
  void Finish() {
    while (depth_ >= 2) Merge();
  }

 private:
  static constexpr int kAbsent = -1;
  static constexpr int kOpenNodesMax = 18;  // trees have at most 2^16 leaves
  struct Node {
    int level;
    int first;  // source
  };
  void Merge() {
    const Node right = open_[--depth_];
    Node& left = open_[depth_ - 1];
    if (left.first == kAbsent) {
      left.first = right.first;
    } else if (right.first != kAbsent) {
      pass_.additions[added_++] = {static_cast<uint8_t>(left.first),
                                   static_cast<uint8_t>(right.first)};
    }
    ++left.level;
  }

  SumPass& pass_;
  Node open_[kOpenNodesMax] = {};
  int depth_ = 0;
  int added_ = 0;
};

// sums[i] = sum of squares over the intersection of data with block first_element / 65536 + i.
struct SquaresPass {
  const float* data = nullptr;
  int64_t elements = 0;
  int64_t first_element = 0;
  double* sums = nullptr;  // memory that the device can write
};
cudaError_t LaunchSquares(cudaStream_t stream, std::span<const SquaresPass> passes);

// Equal to torch.optim.AdamW in fp32. weight_out may be nullptr.
struct AdamWPass {
  int64_t elements = 0;
  const float* gradient = nullptr;
  const float* m_in = nullptr;
  float* m_out = nullptr;
  const float* v_in = nullptr;
  float* v_out = nullptr;
  const float* master_in = nullptr;
  float* master_out = nullptr;
  void* weight_out = nullptr;
  PassScalars scalars{};
};
cudaError_t LaunchAdamW(cudaStream_t stream, WeightType weight, std::span<const AdamWPass> passes);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_ELEMENT_PASSES_H_
