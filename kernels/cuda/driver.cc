#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"

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

// Names carry the version of the interface that <cuda.h> declares.
bool FindAll(void* library, Driver& d) {
  return Find(library, "cuDeviceGet", d.device_get) &&
         Find(library, "cuDeviceGetCount", d.device_get_count) &&
         Find(library, "cuDeviceGetAttribute", d.device_get_attribute) &&
         Find(library, "cuDriverGetVersion", d.driver_get_version) &&
         Find(library, "cuGetErrorName", d.get_error_name) &&
         Find(library, "cuMemGetAllocationGranularity", d.mem_get_allocation_granularity) &&
         Find(library, "cuMemCreate", d.mem_create) &&
         Find(library, "cuMemRelease", d.mem_release) &&
         Find(library, "cuMemExportToShareableHandle", d.mem_export) &&
         Find(library, "cuMemImportFromShareableHandle", d.mem_import) &&
         Find(library, "cuMemAddressReserve", d.mem_address_reserve) &&
         Find(library, "cuMemAddressFree", d.mem_address_free) &&
         Find(library, "cuMemMap", d.mem_map) && Find(library, "cuMemUnmap", d.mem_unmap) &&
         Find(library, "cuMemSetAccess", d.mem_set_access) &&
         Find(library, "cuMemsetD16Async", d.memset_d16_async) &&
         Find(library, "cuMemsetD32Async", d.memset_d32_async);
}

Loaded Load() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    loaded.status = absl::UnavailableError(absl::StrCat("no CUDA driver: ", ::dlerror()));
    return loaded;
  }
  decltype(&::cuInit) init = nullptr;
  if (!Find(library, "cuInit", init) || !FindAll(library, loaded.driver)) {
    loaded.status = absl::UnavailableError("the CUDA driver is older than 11.0");
    return loaded;
  }
  if (const CUresult result = init(0); result != CUDA_SUCCESS) {
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
  const absl::Status status =
      driver.Check(driver.mem_get_allocation_granularity(&bytes, &properties,
                                                         CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                   "cuMemGetAllocationGranularity");
  if (!status.ok()) return status;
  return bytes;
}

}  // namespace dmuond::kernels::cuda
