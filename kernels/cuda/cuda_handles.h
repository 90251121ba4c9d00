// Memory of other processes by the driver's 64-byte handles, opened in this device's own context.
#ifndef DMUOND_KERNELS_CUDA_CUDA_HANDLES_H_
#define DMUOND_KERNELS_CUDA_CUDA_HANDLES_H_

#include <map>
#include <memory>
#include <string>

#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace dmuond::kernels::cuda {

// "GPU-12345678-…"
[[nodiscard]] std::string UuidOf(const Driver& driver, CUdevice device);
// OK if `device` can access memory of `owner`; FAILED_PRECONDITION naming both.
[[nodiscard]] absl::Status CheckAccess(const Driver& driver, CUdevice device, CUdevice owner);

// An allocation is opened once, however many arenas lie in it: the driver would count, and give the
// same address. Threads: one. Mappings may outlive this.
class CudaHandles {
 public:
  CudaHandles(const Driver& driver, CUdevice device) : driver_(driver), device_(device) {}

  // Errors as Device::MapHandle(). REQUIRES: the calling thread has a context of the device.
  absl::StatusOr<std::unique_ptr<Mapping>> Map(const HandleMemory& memory);

 private:
  class Allocation;
  absl::StatusOr<std::shared_ptr<Allocation>> Open(const HandleMemory& memory);
  absl::Status CheckDevice(const std::string& uuid) const;

  const Driver& driver_;
  const CUdevice device_;
  std::map<std::string, std::weak_ptr<Allocation>> open_;  // by handle
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_HANDLES_H_
