// The driver's functions that a trainer on a GPU needs, found at run time.
#ifndef DMUOND_CLIENT_CPP_SRC_CUDA_DRIVER_H_
#define DMUOND_CLIENT_CPP_SRC_CUDA_DRIVER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuond::client {

// The member of CudaDriver, and the function.
#define DMUOND_CLIENT_CUDA_FUNCTIONS(X)                            \
  X(init, cuInit)                                                  \
  X(get_error_name, cuGetErrorName)                                \
  X(device_get_count, cuDeviceGetCount)                            \
  X(device_get, cuDeviceGet)                                       \
  X(device_get_uuid, cuDeviceGetUuid)                              \
  X(primary_context_retain, cuDevicePrimaryCtxRetain)              \
  X(context_get_current, cuCtxGetCurrent)                          \
  X(context_set_current, cuCtxSetCurrent)                          \
  X(context_synchronize, cuCtxSynchronize)                         \
  X(mem_get_allocation_granularity, cuMemGetAllocationGranularity) \
  X(mem_import, cuMemImportFromShareableHandle)                    \
  X(mem_release, cuMemRelease)                                     \
  X(mem_address_reserve, cuMemAddressReserve)                      \
  X(mem_address_free, cuMemAddressFree)                            \
  X(mem_map, cuMemMap)                                             \
  X(mem_unmap, cuMemUnmap)                                         \
  X(mem_set_access, cuMemSetAccess)                                \
  X(mem_get_address_range, cuMemGetAddressRange)                   \
  X(pointer_get_attribute, cuPointerGetAttribute)                  \
  X(ipc_get, cuIpcGetMemHandle)                                    \
  X(memcpy_async, cuMemcpyAsync)                                   \
  X(mem_host_register, cuMemHostRegister)                          \
  X(mem_host_unregister, cuMemHostUnregister)                      \
  X(mem_host_get_device_pointer, cuMemHostGetDevicePointer)        \
  X(stream_create, cuStreamCreate)                                 \
  X(stream_destroy, cuStreamDestroy)                               \
  X(stream_synchronize, cuStreamSynchronize)                       \
  X(stream_query, cuStreamQuery)                                   \
  X(stream_is_capturing, cuStreamIsCapturing)                      \
  X(stream_wait_event, cuStreamWaitEvent)                          \
  X(stream_write_value, cuStreamWriteValue64)                      \
  X(stream_wait_value, cuStreamWaitValue64)                        \
  X(event_create, cuEventCreate)                                   \
  X(event_destroy, cuEventDestroy)                                 \
  X(event_record, cuEventRecord)                                   \
  X(event_synchronize, cuEventSynchronize)

// Threads: any.
struct CudaDriver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define DMUOND_CLIENT_CUDA_MEMBER(member, function) decltype(&::function) member;
  DMUOND_CLIENT_CUDA_FUNCTIONS(DMUOND_CLIENT_CUDA_MEMBER)
#undef DMUOND_CLIENT_CUDA_MEMBER

  // Loads and initialises the driver, once; waits up to 20 s where MPS recovers from a client's
  // fault. UNAVAILABLE: there is none, or it is too old.
  static absl::StatusOr<const CudaDriver*> Get();
  // OK, or INTERNAL (CUDA_FAILED) naming the call and the driver's result.
  [[nodiscard]] absl::Status Check(CUresult result, absl::string_view call) const;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_CUDA_DRIVER_H_
