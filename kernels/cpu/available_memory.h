// How much memory a process can still be given: what the machine has, or less where a cgroup of the
// process, or one above that, has a limit. A process that takes more than its cgroup has is killed.
//
// Threads: any.
#ifndef DMUOND_KERNELS_CPU_AVAILABLE_MEMORY_H_
#define DMUOND_KERNELS_CPU_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace dmuond::kernels::cpu {

struct AvailableMemory {
  uint64_t bytes = 0;
  // The file of the limit that leaves least, as "/sys/fs/cgroup/…/memory.max", and the limit; empty
  // where the machine's own memory leaves least.
  std::string limited_by;
  uint64_t limit_bytes = 0;

  // For messages: "12 available", or "12 available of 34 (/sys/fs/cgroup/…/memory.max)".
  [[nodiscard]] std::string Words() const;
};

// nullopt: /proc does not say. `process`: "self" or a pid. cgroup v2 and v1. `root` stands before
// /proc and /sys, for tests.
[[nodiscard]] std::optional<AvailableMemory> ReadAvailableMemory(
    const std::string& process = "self", const std::string& root = "");

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_AVAILABLE_MEMORY_H_
