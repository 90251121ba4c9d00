// One GPU, from compute capability 8.0, as a device. See kernels/device.h.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, CudaDevice::Create(/*ordinal=*/0));
#ifndef DMUOND_KERNELS_CUDA_CUDA_DEVICE_H_
#define DMUOND_KERNELS_CUDA_CUDA_DEVICE_H_

#include <memory>
#include <string>

#include "kernels/cuda/cuda_handles.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace dmuond::kernels::cuda {

// Threads: one thread, the lane's dispatching one, for the device, its streams, events and ops.
// Streams and events may outlive the device. Its context is the primary one, which the runtime of
// kernels and libraries shares; it is kept until the process ends.
class CudaDevice final : public Device {
 public:
  // Makes the device's primary context current in the calling thread. `engine`: whose matrix
  // products; kDefault is the own kernels on compute capability 9.0 and cuBLASLt elsewhere.
  // NOT_FOUND naming the number of devices; UNIMPLEMENTED for a device older than 8.0, or own
  // kernels on another than 9.0; UNAVAILABLE where cuBLASLt is needed and cannot be loaded.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(
      int ordinal, ProductEngine engine = ProductEngine::kDefault);

  // "cuda NVIDIA H200 uuid=GPU-… driver=13.0 runtime=13.0 sms=132 mps=0 engine=own"
  [[nodiscard]] std::string Describe() const override { return description_; }
  // The same of every device of this kind, with this driver and these kernels (a hash of their
  // sources): what measurements hold for.
  // "cuda NVIDIA H200 sms=132 driver=580.159.04 cublaslt=13.1.0 kernels=0a1b2c3d4e5f"
  [[nodiscard]] std::string DescribeType() const;
  [[nodiscard]] bool takes_turns() const override;
  [[nodiscard]] bool links_sleep() const override { return true; }
  // `fd`: of device memory, of this device or of one whose memory it can access. Host memory (state
  // tables, boards, timelines) is mapped by cpu::MapShared().
  absl::StatusOr<std::unique_ptr<Mapping>> Map(int fd, size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Mapping>> MapHandle(const HandleMemory& memory) override {
    return handles_.Map(memory);
  }
  absl::StatusOr<std::unique_ptr<Mapping>> AllocateScratch(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Mapping>> AllocateHost(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override;
  absl::StatusOr<std::unique_ptr<Event>> CreateEvent() override;
  [[nodiscard]] Ops& ops() override { return ops_; }

 private:
  CudaDevice(const Driver& driver, CUdevice device, size_t granularity, std::string description,
             ProductEngine engine);

  const Driver& driver_;
  const CUdevice device_;
  const size_t granularity_;
  const std::string description_;
  CudaHandles handles_;
  CudaOps ops_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_DEVICE_H_
