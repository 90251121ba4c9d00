// CUDA streams and events behind kernels/device.h.
#ifndef DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
#define DMUOND_KERNELS_CUDA_CUDA_STREAM_H_

#include <cuda_runtime.h>

#include <memory>
#include <utility>
#include <vector>

#include "kernels/device.h"

namespace dmuond::kernels::cuda {

// Idle events: recording costs no allocation of the driver's once there are enough. Threads: one.
class EventPool {
 public:
  EventPool() = default;
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  absl::StatusOr<cudaEvent_t> Take();
  void Return(cudaEvent_t event) { idle_.push_back(event); }

 private:
  std::vector<cudaEvent_t> idle_;
};

class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create(std::shared_ptr<EventPool> events);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  absl::StatusOr<std::unique_ptr<Event>> Record() override;
  absl::Status WaitFor(Event& event) override;
  absl::Status Synchronize() override;

  // REQUIRES: a stream of a CudaDevice.
  static cudaStream_t Of(Stream& stream) { return static_cast<CudaStream&>(stream).stream_; }

 private:
  CudaStream(cudaStream_t stream, std::shared_ptr<EventPool> events)
      : stream_(stream), events_(std::move(events)) {}

  cudaStream_t stream_;
  std::shared_ptr<EventPool> events_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
