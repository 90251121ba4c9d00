// The fake of the driver's management library, libnvidia-ml.so.1: what kernels/cuda/free_memory.cc
// asks of it. It counts what the fake driver counts.
#include <cstdio>
#include <cstring>

#include "tests/fake_cuda/driver/state.h"

using dmuond::fake_cuda::All;

namespace {
constexpr int kInvalidArgument = 2;
}

extern "C" {

struct FakeNvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (CUdevice one = 0; one < All().settings.devices; ++one) {
    CUuuid bytes{};
    if (cuDeviceGetUuid(&bytes, one) != CUDA_SUCCESS) return kInvalidArgument;
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char digits[4];
      std::snprintf(digits, sizeof(digits), "%s%02x",
                    i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                    static_cast<unsigned char>(bytes.bytes[i]));
      text += digits;
    }
    if (text != uuid) continue;
    *device = reinterpret_cast<void*>(static_cast<intptr_t>(one) + 1);
    return 0;
  }
  return kInvalidArgument;
}

int nvmlDeviceGetMemoryInfo(void* device, void* answer) {
  auto* const memory = static_cast<FakeNvmlMemory*>(answer);
  const auto one = static_cast<CUdevice>(reinterpret_cast<intptr_t>(device) - 1);
  std::lock_guard lock(All().mutex);
  memory->total = All().settings.memory_bytes;
  memory->used = dmuond::fake_cuda::UsedBytes(one);
  memory->free = memory->total - memory->used;
  return 0;
}

}  // extern "C"
