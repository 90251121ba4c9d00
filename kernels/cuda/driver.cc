#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/mps.h"
#include "base/status_macros.h"

namespace dmuond::kernels::cuda {
namespace {

struct Loaded {
  absl::Status status;
  Driver driver{};
};

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// Names carry the version of the interface that <cuda.h> declares, which are macros of it.
#define DMUOND_TEXT(function) #function
bool FindAll(void* library, Driver& driver, std::string& missing) {
#define DMUOND_FIND(member, function)                         \
  if (!Find(library, DMUOND_TEXT(function), driver.member)) { \
    missing = DMUOND_TEXT(function);                          \
    return false;                                             \
  }
  DMUOND_DRIVER_FUNCTIONS(DMUOND_FIND)
#undef DMUOND_FIND
  return true;
}

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

Loaded Load() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    loaded.status = absl::UnavailableError(absl::StrCat("no CUDA driver: ", ::dlerror()));
    return loaded;
  }
  decltype(&::cuInit) init = nullptr;
  std::string missing = "cuInit";
  if (!Find(library, "cuInit", init) || !FindAll(library, loaded.driver, missing)) {
    loaded.status = absl::UnavailableError(
        absl::StrCat("the CUDA driver is older than 11.4: it has no ", missing));
    return loaded;
  }
  // Within a major version new programs run on old drivers, and old ones on new drivers always.
  int version = 0;
  loaded.driver.driver_get_version(&version);
  if (version / 1000 < CUDA_VERSION / 1000) {
    loaded.status = absl::UnavailableError(absl::StrCat(
        "the CUDA driver speaks CUDA ", VersionText(version),
        ", which is older than needed: this program is built for ", VersionText(CUDA_VERSION),
        " and needs a driver of at least ", CUDA_VERSION / 1000, ".0"));
    return loaded;
  }
  if (const CUresult result = OnceMpsHasRecovered(kMpsPatience, [&] { return init(0); });
      result != CUDA_SUCCESS) {
    loaded.status = absl::UnavailableError(
        absl::StrCat("no CUDA device: ", loaded.driver.Check(result, "cuInit").message()));
  }
  return loaded;
}

}  // namespace

absl::StatusOr<const Driver*> Driver::Get() {
  static const Loaded* const loaded = new Loaded(Load());
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->driver;
}

absl::Status Driver::Check(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  get_error_name(result, &name);
  const std::string message =
      absl::StrCat(call, " failed: ", name == nullptr ? "unknown error" : name, " (",
                   static_cast<int>(result), ")");
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

absl::StatusOr<CUdevice> FindDevice(const Driver& driver, int ordinal) {
  int count = 0;
  RETURN_IF_ERROR(driver.Check(driver.device_get_count(&count), "cuDeviceGetCount"));
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("there is no device cuda:", ordinal, "; this machine has ", count));
  }
  CUdevice device = 0;
  RETURN_IF_ERROR(driver.Check(driver.device_get(&device, ordinal), "cuDeviceGet"));
  return device;
}

std::string NameOf(const Driver& driver, CUdevice device) {
  char name[256] = "unknown";
  driver.device_get_name(name, sizeof(name), device);
  return absl::StrCat("cuda:", device, " (", name, ")");
}

CUmemAllocationProp SharedMemoryOf(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  return properties;
}

absl::StatusOr<size_t> Granularity(const Driver& driver, CUdevice device) {
  const CUmemAllocationProp properties = SharedMemoryOf(device);
  size_t bytes = 0;
  RETURN_IF_ERROR(driver.Check(driver.mem_get_allocation_granularity(
                                   &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                               "cuMemGetAllocationGranularity"));
  return bytes;
}

}  // namespace dmuond::kernels::cuda
