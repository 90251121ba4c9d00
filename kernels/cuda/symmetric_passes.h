// What a library's product leaves to be done on symmetric results.
#ifndef DMUOND_KERNELS_CUDA_SYMMETRIC_PASSES_H_
#define DMUOND_KERNELS_CUDA_SYMMETRIC_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// wide[z] (n x n, contiguous) = beta * c[z] + beta2 * c2[z] + diagonal * I in fp32. c, c2 may have
// no data.
cudaError_t LaunchWidenAddends(cudaStream_t stream, GemmType type, const MatrixView& c, float beta,
                               const MatrixView& c2, float beta2, float diagonal, int64_t n,
                               int64_t batch, float* wide);
// The lower triangle of wide[z], rounded, into both triangles of d[z].
cudaError_t LaunchNarrowMirrored(cudaStream_t stream, GemmType type, const float* wide,
                                 const MatrixView& d, int64_t batch);
// The lower triangle of d[z] into the upper one.
cudaError_t LaunchMirror(cudaStream_t stream, GemmType type, const MatrixView& d, int64_t batch);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SYMMETRIC_PASSES_H_
