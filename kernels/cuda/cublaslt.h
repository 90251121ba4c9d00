// cuBLASLt's functions, found at run time: a lane runs without the library as long as nothing asks
// for it.
#ifndef DMUOND_KERNELS_CUDA_CUBLASLT_H_
#define DMUOND_KERNELS_CUDA_CUBLASLT_H_

#include <cublasLt.h>

#include <string>

#include "absl/status/statusor.h"

namespace dmuond::kernels::cuda {

struct CublasLt {
  decltype(&::cublasLtCreate) create;
  decltype(&::cublasLtGetVersion) get_version;
  decltype(&::cublasLtMatmulDescCreate) desc_create;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&::cublasLtMatmulAlgoCheck) algo_check;
  decltype(&::cublasLtMatmul) matmul;

  cublasLtHandle_t handle;  // of the device that was current at the first Get()

  // Loaded once for the process. UNAVAILABLE with what to do about it. Threads: any.
  static absl::StatusOr<const CublasLt*> Get();
  // From a file of that name; never unloaded.
  static absl::StatusOr<CublasLt> Load(const std::string& file);
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUBLASLT_H_
