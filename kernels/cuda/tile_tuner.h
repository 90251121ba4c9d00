// Finds the fastest tile for each kind of product by running it. A tile changes no bits (each
// element is summed in the order of k by one accumulator, which gemm_check holds every tile to), so
// the choice may differ from batch to batch, lane to lane and run to run.
//
//   TileTuner tuner;
//   options.tile = tuner.Fastest(problem, options);
#ifndef DMUOND_KERNELS_CUDA_TILE_TUNER_H_
#define DMUOND_KERNELS_CUDA_TILE_TUNER_H_

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// Threads: one.
class TileTuner {
 public:
  struct Choice {
    // What a product's time depends on.
    GemmType type;
    GemmLayout layout;
    bool symmetric;
    bool same_operands;  // A and B lie in the same memory: some tiles load it once
    int addends;
    std::array<int64_t, 4> sizes;  // rows, columns, depth, batch
    GemmTile tile;
    double microseconds;  // of one launch among others of its kind; 0: not measured
  };

  // `measures`: false for the rule's tile, TileFor(), which is itself worth remembering.
  explicit TileTuner(bool measures = true) : measures_(measures) {}

  // Found at the first question for a kind of product, by some milliseconds on the device, some
  // tens where another tile than the rule's seems faster: all matrices of the problem are
  // overwritten. TileFor(problem) where that fails.
  GemmTile Fastest(const GemmProblem& problem, const GemmOptions& options);

  [[nodiscard]] const std::vector<Choice>& choices() const { return choices_; }
  // Takes over what another tuner has found on the same device. Call it before Fastest().
  void Use(std::vector<Choice> choices) { choices_ = std::move(choices); }

 private:
  const bool measures_;
  std::vector<Choice> choices_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_TILE_TUNER_H_
