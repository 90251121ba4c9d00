// Memory of the CPU device, as the daemon makes and holds it: anonymous files (memfd), which have
// no name to leak and are sealed, so that nobody who got the descriptor can shrink them under a
// mapping.
#ifndef DMUOND_KERNELS_CPU_CPU_MEMORY_H_
#define DMUOND_KERNELS_CPU_CPU_MEMORY_H_

#include <string>

#include "kernels/device.h"

namespace dmuond::kernels::cpu {

// Threads: any.
class CpuMemoryHolder final : public MemoryHolder {
 public:
  // Reserves all pages at once: a lane must not meet SIGBUS when memory runs short later.
  // INVALID_ARGUMENT for bytes == 0, RESOURCE_EXHAUSTED with wanted and available bytes.
  absl::StatusOr<UniqueFd> Allocate(size_t bytes, const std::string& name) override;
  // INVALID_ARGUMENT if `fd` is no memfd, FAILED_PRECONDITION if it can shrink or cannot be
  // written, OUT_OF_RANGE with both sizes if it is too small.
  absl::Status Check(int fd, size_t bytes) override;
};

// An own mapping of `bytes` of `fd`, shared, read and write. The descriptor may be closed
// afterwards.
absl::StatusOr<std::unique_ptr<Mapping>> MapShared(int fd, size_t bytes);
// Private memory of this process.
absl::StatusOr<std::unique_ptr<Mapping>> MapPrivate(size_t bytes);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_CPU_MEMORY_H_
