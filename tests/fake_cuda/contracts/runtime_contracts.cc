// The runtime beside the driver: kernels are launched by the one, streams and memory are the
// other's. In builds that have nvcc's runtime.
#include <cuda_runtime.h>

#include <string>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr size_t kBytes = 8 * kMiB;

void MustRuntime(cudaError_t result, const char* call) {
  if (result != cudaSuccess) throw Broken{Text("%s: %s", call, cudaGetErrorName(result))};
}

CONTRACT(
    runtime_takes_the_current_context,
    "the runtime works in the primary context that the driver has made current, on its device") {
  const int device = Devices() - 1;
  const CUcontext context = UseContext(device);
  int seen = -1;
  MustRuntime(cudaGetDevice(&seen), "cudaGetDevice");
  void* memory = nullptr;
  MustRuntime(cudaMalloc(&memory, kBytes), "cudaMalloc");
  CUcontext after = nullptr;
  MUST(cuCtxGetCurrent, &after);
  int owner = -1;
  MUST(cuPointerGetAttribute, &owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
       reinterpret_cast<CUdeviceptr>(memory));
  const std::string what = Text("device %d of %d, memory of %d", seen, device + 1, owner);
  return seen == device && after == context && owner == device ? Holds(what) : Fails(what);
}

CONTRACT(runtime_takes_streams_and_memory,
         "streams, events and mappings of the driver are the runtime's too") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  CUstream stream = MakeStream();
  CUevent event = MakeEvent();
  uint64_t* host = Pinned(kBytes);
  MustRuntime(cudaMemsetAsync(reinterpret_cast<void*>(memory), 0x5A, kBytes, stream),
              "cudaMemsetAsync");
  MustRuntime(
      cudaMemcpyAsync(host, reinterpret_cast<void*>(memory), kBytes, cudaMemcpyDefault, stream),
      "cudaMemcpyAsync");
  MustRuntime(cudaEventRecord(event, stream), "cudaEventRecord");
  MUST(cuEventSynchronize, event);
  return host[kBytes / 8 - 1] == 0x5A5A5A5A5A5A5A5A ? Holds() : Fails("the bytes are wrong");
}

CONTRACT(runtime_sees_errors_of_the_driver, "an illegal access is the runtime's error as well") {
  UseContext();
  CUstream stream = MakeStream();
  Store(stream, 8, 1);
  const cudaError_t result = cudaStreamSynchronize(stream);
  return result == cudaErrorIllegalAddress ? Holds() : Fails(cudaGetErrorName(result));
}

}  // namespace
}  // namespace dmuond::contracts
