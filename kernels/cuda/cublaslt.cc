#include "kernels/cuda/cublaslt.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace dmuond::kernels::cuda {
namespace {

struct Loaded {
  absl::Status status;
  CublasLt library{};
};

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

Loaded Load() {
  Loaded loaded;
  const std::string file = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR);
  // Kept until the process ends: libraries of CUDA do not survive being unloaded.
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.status = absl::UnavailableError(absl::StrCat(
        file, " cannot be loaded (", ::dlerror(), "). It comes with the CUDA toolkit ",
        CUBLAS_VER_MAJOR, ".x: add the folder that holds it to LD_LIBRARY_PATH or to ld.so.conf"));
    return loaded;
  }
  if (!FindAll(library, loaded.library)) {
    loaded.status = absl::UnavailableError(absl::StrCat(file, " lacks a function: ", ::dlerror()));
    return loaded;
  }
  if (const cublasStatus_t result = loaded.library.create(&loaded.library.handle);
      result != CUBLAS_STATUS_SUCCESS) {
    loaded.status =
        absl::UnavailableError(absl::StrCat(file, ": cublasLtCreate returned ", result));
  }
  return loaded;
}

}  // namespace

absl::StatusOr<const CublasLt*> CublasLt::Get() {
  static const Loaded& loaded = *new Loaded(Load());
  if (!loaded.status.ok()) return loaded.status;
  return &loaded.library;
}

}  // namespace dmuond::kernels::cuda
