#include "kernels/cuda/free_memory.h"

#include <dlfcn.h>

namespace dmuond::kernels::cuda {
namespace {

// Of nvml.h, which is not among the headers that a build needs. Its functions return 0 for success.
struct NvmlMemory {
  unsigned long long total;  // NOLINT(google-runtime-int): as there
  unsigned long long free;   // NOLINT(google-runtime-int)
  unsigned long long used;   // NOLINT(google-runtime-int)
};
struct Nvml {
  int (*init)() = nullptr;
  int (*find_device)(const char* uuid, void** device) = nullptr;
  // `memory`: an NvmlMemory. The sanitizer would tell two declarations of that type apart.
  int (*memory_info)(void* device, void* memory) = nullptr;
};

template <typename Function>
bool FindIn(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// Initialised; nullopt: it is not to be had.
std::optional<Nvml> LoadNvml() {
  void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  Nvml nvml;
  if (library == nullptr || !FindIn(library, "nvmlInit_v2", nvml.init) ||
      !FindIn(library, "nvmlDeviceGetHandleByUUID", nvml.find_device) ||
      !FindIn(library, "nvmlDeviceGetMemoryInfo", nvml.memory_info) || nvml.init() != 0) {
    return std::nullopt;
  }
  return nvml;
}

}  // namespace

std::optional<FreeMemory> FreeMemoryOf(const std::string& uuid) {
  static const std::optional<Nvml> nvml = LoadNvml();
  void* device = nullptr;
  NvmlMemory memory{};
  if (!nvml.has_value() || nvml->find_device(uuid.c_str(), &device) != 0 ||
      nvml->memory_info(device, &memory) != 0) {
    return std::nullopt;
  }
  return FreeMemory{memory.free, memory.total};
}

}  // namespace dmuond::kernels::cuda
