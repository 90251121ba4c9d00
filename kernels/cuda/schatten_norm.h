// The Schatten-4 norm of a Newton-Schulz input X, the root of ||X * X^T||_F, from the Gram matrix
// that the first product has made: one pass over its lower triangle.
#ifndef DMUOND_KERNELS_CUDA_SCHATTEN_NORM_H_
#define DMUOND_KERNELS_CUDA_SCHATTEN_NORM_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

// Device memory of a batch, one entry per matrix.
struct SchattenNorms {
  // REQUIRES: 0 before each launch, which leaves it so.
  uint32_t* arrived = nullptr;
  double* partials = nullptr;  // SchattenPartials(p) per matrix
  // What the norm divides by: factors of products (DeviceScalar). All 0 where the matrix has no
  // direction.
  float* inverse = nullptr;
  float* inverse_squared = nullptr;
  float* inverse_fourth = nullptr;
};

[[nodiscard]] int64_t SchattenPartials(int64_t p);

// Of `batch` symmetric matrices: gram * scale is X * X^T. `inverse` becomes 1 / norm times
// `inverse_norm` of the matrix, where that is not null. fp64, added in one order.
cudaError_t LaunchSchattenNorm(cudaStream_t stream, WeightType type, const MatrixView& gram,
                               int64_t batch, double scale, const float* inverse_norm,
                               const SchattenNorms& norms);

// Multiplies each matrix of a 16-bit batch by its factor and rounds it once more: for products
// whose own factors are the same for all matrices.
cudaError_t LaunchScaleInPlace(cudaStream_t stream, WeightType type, const MatrixView& matrices,
                               int64_t batch, const float* factors);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SCHATTEN_NORM_H_
