// The driver's functions that the CUDA device needs, found at run time: programs built with CUDA
// start on machines without a driver. Kernels are launched by the runtime, in the same primary
// context.
#ifndef DMUOND_KERNELS_CUDA_DRIVER_H_
#define DMUOND_KERNELS_CUDA_DRIVER_H_

#include <cuda.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuond::kernels::cuda {

// The member of Driver, and the function.
#define DMUOND_DRIVER_FUNCTIONS(X)                                         \
  X(device_get, cuDeviceGet)                                               \
  X(device_get_attribute, cuDeviceGetAttribute)                            \
  X(device_get_count, cuDeviceGetCount)                                    \
  X(device_get_name, cuDeviceGetName)                                      \
  X(device_get_uuid, cuDeviceGetUuid)                                      \
  X(device_get_pci_bus_id, cuDeviceGetPCIBusId)                            \
  X(device_can_access_peer, cuDeviceCanAccessPeer)                         \
  X(driver_get_version, cuDriverGetVersion)                                \
  X(get_error_name, cuGetErrorName)                                        \
  X(primary_context_retain, cuDevicePrimaryCtxRetain)                      \
  X(context_set_current, cuCtxSetCurrent)                                  \
  X(mem_get_allocation_granularity, cuMemGetAllocationGranularity)         \
  X(mem_get_allocation_properties, cuMemGetAllocationPropertiesFromHandle) \
  X(mem_create, cuMemCreate)                                               \
  X(mem_release, cuMemRelease)                                             \
  X(mem_export, cuMemExportToShareableHandle)                              \
  X(mem_import, cuMemImportFromShareableHandle)                            \
  X(mem_address_reserve, cuMemAddressReserve)                              \
  X(mem_address_free, cuMemAddressFree)                                    \
  X(mem_map, cuMemMap)                                                     \
  X(mem_unmap, cuMemUnmap)                                                 \
  X(mem_set_access, cuMemSetAccess)                                        \
  X(mem_alloc, cuMemAlloc)                                                 \
  X(mem_free, cuMemFree)                                                   \
  X(mem_get_address_range, cuMemGetAddressRange)                           \
  X(pointer_get_attribute, cuPointerGetAttribute)                          \
  X(ipc_get, cuIpcGetMemHandle)                                            \
  X(ipc_open, cuIpcOpenMemHandle)                                          \
  X(ipc_close, cuIpcCloseMemHandle)                                        \
  X(mem_host_alloc, cuMemHostAlloc)                                        \
  X(mem_free_host, cuMemFreeHost)                                          \
  X(memcpy_async, cuMemcpyAsync)                                           \
  X(memcpy_2d_async, cuMemcpy2DAsync)                                      \
  X(memset_d16_async, cuMemsetD16Async)                                    \
  X(memset_d32_async, cuMemsetD32Async)                                    \
  X(stream_create, cuStreamCreate)                                         \
  X(stream_destroy, cuStreamDestroy)                                       \
  X(stream_synchronize, cuStreamSynchronize)                               \
  X(stream_wait_event, cuStreamWaitEvent)                                  \
  X(event_create, cuEventCreate)                                           \
  X(event_destroy, cuEventDestroy)                                         \
  X(event_record, cuEventRecord)                                           \
  X(event_query, cuEventQuery)

// Threads: any.
struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define DMUOND_DRIVER_MEMBER(member, function) decltype(&::function) member;
  DMUOND_DRIVER_FUNCTIONS(DMUOND_DRIVER_MEMBER)
#undef DMUOND_DRIVER_MEMBER

  // Loads and initialises the driver, once; waits up to 20 s where MPS recovers from a client's
  // fault. UNAVAILABLE: there is none, or it is too old.
  static absl::StatusOr<const Driver*> Get();

  // OK, or an error that names the call and the driver's result. RESOURCE_EXHAUSTED: out of memory.
  [[nodiscard]] absl::Status Check(CUresult result, absl::string_view call) const;
};

// The device with this ordinal. NOT_FOUND naming the number of devices.
[[nodiscard]] absl::StatusOr<CUdevice> FindDevice(const Driver& driver, int ordinal);
// "cuda:0 (NVIDIA H200)"
[[nodiscard]] std::string NameOf(const Driver& driver, CUdevice device);
// The properties of all memory of a device that is held by descriptor.
[[nodiscard]] CUmemAllocationProp SharedMemoryOf(CUdevice device);
// Sizes of mappings are multiples of this.
[[nodiscard]] absl::StatusOr<size_t> Granularity(const Driver& driver, CUdevice device);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_DRIVER_H_
