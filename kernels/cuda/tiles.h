// Which tile a product is computed with. Bits do not depend on it (each element is summed in the
// order of k by one accumulator), so it may follow the batch.
#ifndef DMUOND_KERNELS_CUDA_TILES_H_
#define DMUOND_KERNELS_CUDA_TILES_H_

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// The tile with the shortest schedule by the costs of gemm_schedule.cc, on a chip of 132 SMs.
[[nodiscard]] GemmTile TileFor(const GemmProblem& problem, GemmLayout layout);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_TILES_H_
