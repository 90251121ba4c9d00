// Products of fp32 matrices by plain fp32 arithmetic: for `ns_dtype=fp32`, which is chosen for its
// numbers and not for its speed.
#ifndef DMUOND_KERNELS_CUDA_PRODUCT_F32_H_
#define DMUOND_KERNELS_CUDA_PRODUCT_F32_H_

#include <cuda_runtime.h>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// D of `problem` (gemm.h), all matrices in fp32. Each element is summed in the order of k.
// Symmetric products compute the lower triangle and mirror it.
cudaError_t LaunchProductF32(cudaStream_t stream, const GemmProblem& problem, GemmLayout layout);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_PRODUCT_F32_H_
