#include "kernels/cuda/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace dmuond::kernels::cuda {

absl::Status CudaStatus(cudaError_t result, absl::string_view call) {
  if (result == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " failed: ", cudaGetErrorName(result), " (",
                                           cudaGetErrorString(result), ")");
  return result == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                             : absl::InternalError(message);
}

}  // namespace dmuond::kernels::cuda
