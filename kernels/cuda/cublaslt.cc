#include "kernels/cuda/cublaslt.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace dmuond::kernels::cuda {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

bool FindAll(void* library, CublasLt& l) {
  return Find(library, "cublasLtCreate", l.create) &&
         Find(library, "cublasLtGetVersion", l.get_version) &&
         Find(library, "cublasLtMatmulDescCreate", l.desc_create) &&
         Find(library, "cublasLtMatmulDescDestroy", l.desc_destroy) &&
         Find(library, "cublasLtMatmulDescSetAttribute", l.desc_set) &&
         Find(library, "cublasLtMatrixLayoutCreate", l.layout_create) &&
         Find(library, "cublasLtMatrixLayoutDestroy", l.layout_destroy) &&
         Find(library, "cublasLtMatrixLayoutSetAttribute", l.layout_set) &&
         Find(library, "cublasLtMatmulPreferenceCreate", l.preference_create) &&
         Find(library, "cublasLtMatmulPreferenceDestroy", l.preference_destroy) &&
         Find(library, "cublasLtMatmulPreferenceSetAttribute", l.preference_set) &&
         Find(library, "cublasLtMatmulAlgoGetHeuristic", l.heuristic) &&
         Find(library, "cublasLtMatmulAlgoCheck", l.algo_check) &&
         Find(library, "cublasLtMatmul", l.matmul);
}

}  // namespace

absl::StatusOr<CublasLt> CublasLt::Load(const std::string& file) {
  // Kept until the process ends: libraries of CUDA do not survive being unloaded.
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        file, " cannot be loaded (", ::dlerror(), "). It comes with the CUDA toolkit ",
        CUBLAS_VER_MAJOR, ".x: add the folder that holds it to LD_LIBRARY_PATH or to ld.so.conf"));
  }
  CublasLt loaded{};
  if (!FindAll(library, loaded)) {
    return absl::UnavailableError(absl::StrCat(file, " lacks a function: ", ::dlerror()));
  }
  if (const cublasStatus_t result = loaded.create(&loaded.handle);
      result != CUBLAS_STATUS_SUCCESS) {
    return absl::UnavailableError(absl::StrCat(file, ": cublasLtCreate returned ", result,
                                               "; it needs a GPU, and a driver for CUDA ",
                                               CUBLAS_VER_MAJOR));
  }
  return loaded;
}

absl::StatusOr<const CublasLt*> CublasLt::Get() {
  static const absl::StatusOr<CublasLt>& loaded =
      *new absl::StatusOr<CublasLt>(Load(absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR)));
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace dmuond::kernels::cuda
