// Data for measurements and checks on the device.
#ifndef DMUOND_KERNELS_CUDA_TUNER_DATA_H_
#define DMUOND_KERNELS_CUDA_TUNER_DATA_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

// Pseudo-random values, nearly normal, of standard deviation `scale`: a function of the seed and
// the place.
cudaError_t LaunchRandom(cudaStream_t stream, WeightType type, void* values, int64_t count,
                         uint64_t seed, float scale);

// Adds to *to, in device memory: sum of (a - b)^2, sum of b^2, values of a that are not finite, and
// values whose bits differ.
struct Difference {
  double squares = 0;
  double reference = 0;
  uint64_t not_finite = 0;
  uint64_t different = 0;
};
cudaError_t LaunchCompare(cudaStream_t stream, const float* a, const float* b, int64_t count,
                          Difference* to);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_TUNER_DATA_H_
