// How much memory a device has left, for messages: the driver tells this only to processes with a
// context on the device, its management library (libnvidia-ml.so.1, loaded at run time) to all.
#ifndef DMUOND_KERNELS_CUDA_FREE_MEMORY_H_
#define DMUOND_KERNELS_CUDA_FREE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace dmuond::kernels::cuda {

struct FreeMemory {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};
// `uuid`: "GPU-…". nullopt: there is no such library, or it does not say. Threads: any.
[[nodiscard]] std::optional<FreeMemory> FreeMemoryOf(const std::string& uuid);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_FREE_MEMORY_H_
