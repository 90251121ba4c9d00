// The driver's functions that memory by file descriptor needs, found at run time: programs built
// with CUDA start on machines without a driver.
#ifndef DMUOND_KERNELS_CUDA_DRIVER_H_
#define DMUOND_KERNELS_CUDA_DRIVER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuond::kernels::cuda {

// Threads: any. None of these creates a context.
struct Driver {
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetCount) device_get_count;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDriverGetVersion) driver_get_version;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&::cuMemCreate) mem_create;
  decltype(&::cuMemRelease) mem_release;
  decltype(&::cuMemExportToShareableHandle) mem_export;
  decltype(&::cuMemImportFromShareableHandle) mem_import;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemUnmap) mem_unmap;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuMemsetD16Async) memset_d16_async;
  decltype(&::cuMemsetD32Async) memset_d32_async;

  // Loads and initialises the driver, once. UNAVAILABLE: there is none, or it is too old.
  static absl::StatusOr<const Driver*> Get();

  // OK, or an error that names the call and the driver's result. RESOURCE_EXHAUSTED: out of memory.
  [[nodiscard]] absl::Status Check(CUresult result, absl::string_view call) const;
};

// The properties of all memory of a device that is held by descriptor.
[[nodiscard]] CUmemAllocationProp SharedMemoryOf(CUdevice device);
// Sizes of mappings are multiples of this.
[[nodiscard]] absl::StatusOr<size_t> Granularity(const Driver& driver, CUdevice device);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_DRIVER_H_
