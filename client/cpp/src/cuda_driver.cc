#include "client/cpp/src/cuda_driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "base/mps.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

struct Loaded {
  absl::Status status;
  CudaDriver driver{};
};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

Loaded Load() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    loaded.status = absl::UnavailableError(absl::StrCat("no CUDA driver: ", ::dlerror()));
    return loaded;
  }
// Names carry the version of the interface that <cuda.h> declares, which are macros of it.
#define DMUOND_TEXT(function) #function
#define DMUOND_FIND(member, function)                                              \
  if (!Find(library, DMUOND_TEXT(function), loaded.driver.member)) {               \
    loaded.status = absl::UnavailableError(                                        \
        "the CUDA driver is older than needed: it has no " DMUOND_TEXT(function)); \
    return loaded;                                                                 \
  }
  DMUOND_CLIENT_CUDA_FUNCTIONS(DMUOND_FIND)
#undef DMUOND_FIND
#undef DMUOND_TEXT
  loaded.status = loaded.driver.Check(
      OnceMpsHasRecovered(kMpsPatience, [&] { return loaded.driver.init(0); }), "cuInit");
  return loaded;
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  static const Loaded* const loaded = new Loaded(Load());
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->driver;
}

absl::Status CudaDriver::Check(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  get_error_name(result, &name);
  return MakeError(absl::StatusCode::kInternal, kCudaFailed,
                   absl::StrCat(call, " failed: ", name == nullptr ? "unknown error" : name, " (",
                                static_cast<int>(result), ")"),
                   {{"call", std::string(call)}, {"result", absl::StrCat(result)}});
}

}  // namespace dmuond::client
