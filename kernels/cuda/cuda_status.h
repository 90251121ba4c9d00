// Results of the CUDA runtime as absl::Status.
#ifndef DMUOND_KERNELS_CUDA_CUDA_STATUS_H_
#define DMUOND_KERNELS_CUDA_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuond::kernels::cuda {

// OK, or an error that names the call. Errors of kernels surface at later calls.
inline absl::Status CudaStatus(cudaError_t result, absl::string_view call) {
  if (result == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " failed: ", cudaGetErrorName(result), " (",
                                           cudaGetErrorString(result), ")");
  return result == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                             : absl::InternalError(message);
}

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_STATUS_H_
