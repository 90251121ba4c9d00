// Results of the CUDA runtime, which kernels are launched with, as absl::Status.
#ifndef DMUOND_KERNELS_CUDA_CUDA_STATUS_H_
#define DMUOND_KERNELS_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuond::kernels::cuda {

// OK, or an error that names the call. Errors of kernels surface at later calls.
[[nodiscard]] absl::Status CudaStatus(cudaError_t result, absl::string_view call);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_STATUS_H_
