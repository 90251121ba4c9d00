// Is loaded into a lane by LD_PRELOAD. At SIGUSR1 a kernel of the lane's process makes an illegal
// access, in the context that the lane has: what a wrong kernel of its own would do to it.
#include <sys/eventfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "tests/faults/wrong_kernels.h"

namespace dmuond::testing {
namespace {

// Lanes have the primary context of one GPU.
CUresult EnterTheLanesContext() {
  int count = 0;
  CUresult result = cuDeviceGetCount(&count);
  for (CUdevice device = 0; device < count && result == CUDA_SUCCESS; ++device) {
    unsigned flags = 0;
    int active = 0;
    result = cuDevicePrimaryCtxGetState(device, &flags, &active);
    if (result != CUDA_SUCCESS || active == 0) continue;
    CUcontext context = nullptr;
    result = cuDevicePrimaryCtxRetain(&context, device);
    return result == CUDA_SUCCESS ? cuCtxSetCurrent(context) : result;
  }
  return result == CUDA_SUCCESS ? CUDA_ERROR_INVALID_CONTEXT : result;
}

void Fault() {
  CUresult result = EnterTheLanesContext();
  CUstream stream = nullptr;
  if (result == CUDA_SUCCESS) result = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = StoreNowhere(stream);
  std::fprintf(stderr, "lane_fault: an illegal access is launched: %d\n", static_cast<int>(result));
}

// A signal handler may call next to nothing: it wakes a thread.
int wake = -1;

const bool armed = [] {
  wake = ::eventfd(0, EFD_CLOEXEC);
  struct sigaction action {};
  action.sa_handler = [](int) {
    const uint64_t one = 1;
    if (::write(wake, &one, sizeof(one)) < 0) ::_exit(1);
  };
  if (wake < 0 || ::sigaction(SIGUSR1, &action, nullptr) != 0) ::_exit(1);
  std::thread([] {
    uint64_t count = 0;
    if (::read(wake, &count, sizeof(count)) == sizeof(count)) Fault();
  }).detach();
  return true;
}();

}  // namespace
}  // namespace dmuond::testing
