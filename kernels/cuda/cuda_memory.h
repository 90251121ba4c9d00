// Device memory held by file descriptor: made by a process that has no CUDA context (the daemon),
// mapped by one that has (a lane). It outlives every process that computes with it.
#ifndef DMUOND_KERNELS_CUDA_CUDA_MEMORY_H_
#define DMUOND_KERNELS_CUDA_CUDA_MEMORY_H_

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace dmuond::kernels::cuda {

// Threads: any.
class CudaMemoryHolder final : public MemoryHolder {
 public:
  // Memory of the device with this ordinal. NOT_FOUND naming the number of devices.
  static absl::StatusOr<std::unique_ptr<CudaMemoryHolder>> Create(int ordinal);

  // The driver clears memory before it gives it to another process, and the holder frees none that
  // it would get again: what it hands out reads as zero.
  absl::StatusOr<UniqueFd> Allocate(size_t bytes, const std::string& name) override;
  // To whole granules; 0 where that would not fit.
  [[nodiscard]] size_t Rounded(size_t bytes) const override;
  // Also whether it is memory of this very device. Sizes of such memory cannot be asked for: the
  // mapping, which is tried here, fails where `bytes` is not as allocated.
  absl::Status Check(int fd, size_t bytes) override;

 private:
  CudaMemoryHolder(const Driver& driver, CUdevice device, size_t granularity)
      : driver_(driver), device_(device), granularity_(granularity) {}

  const Driver& driver_;
  const CUdevice device_;
  const size_t granularity_;
};

// Maps such memory, of any device of this machine, for kernels and copies of `device`.
// FAILED_PRECONDITION naming both devices where this one cannot access that one's memory.
// REQUIRES: the calling thread has a context of `device`.
absl::StatusOr<std::unique_ptr<Mapping>> MapForDevice(const Driver& driver, CUdevice device,
                                                      size_t granularity, int fd, size_t bytes);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_MEMORY_H_
