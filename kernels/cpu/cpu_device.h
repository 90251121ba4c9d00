// The CPU as a device: shared memory for device memory, calls that are complete when they return
// for streams, OpenBLAS for matrix products.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<CpuDevice> device, CpuDevice::Create(/*threads=*/4));
//   device->ops().Sum(*stream, tasks);
//
// OpenBLAS reads OPENBLAS_CORETYPE when its library is loaded: see core_type.h.
#ifndef DMUOND_KERNELS_CPU_CPU_DEVICE_H_
#define DMUOND_KERNELS_CPU_CPU_DEVICE_H_

#include <memory>
#include <string>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/device.h"

namespace dmuond::kernels::cpu {

// Threads: one thread, the lane's dispatching one, for the device, its streams and its ops.
class CpuDevice final : public Device {
 public:
  // `threads` compute, the caller's own counted; results do not depend on their number.
  // INVALID_ARGUMENT unless 1 <= threads <= kThreadsMax.
  static absl::StatusOr<std::unique_ptr<CpuDevice>> Create(int threads);
  static constexpr int kThreadsMax = 1024;

  // The library that computes matrix products in this process: "OpenBLAS 0.3.21 … SkylakeX
  // MAX_THREADS=64", and those of its kernels that run: "SkylakeX".
  [[nodiscard]] static std::string Library();
  [[nodiscard]] static std::string CoreType();

  [[nodiscard]] std::string Describe() const override;
  absl::StatusOr<std::unique_ptr<Mapping>> Map(int fd, size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Mapping>> AllocateScratch(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Mapping>> AllocateHost(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override;
  absl::StatusOr<std::unique_ptr<Event>> CreateEvent() override;
  [[nodiscard]] Ops& ops() override { return ops_; }

 private:
  explicit CpuDevice(int threads) : pool_(threads), ops_(pool_) {}

  ThreadPool pool_;
  CpuOps ops_;
};

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_CPU_DEVICE_H_
