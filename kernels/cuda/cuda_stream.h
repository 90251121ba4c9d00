// CUDA streams and events behind kernels/device.h.
#ifndef DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
#define DMUOND_KERNELS_CUDA_CUDA_STREAM_H_

#include <cuda_runtime.h>

#include <memory>

#include "kernels/device.h"

namespace dmuond::kernels::cuda {

class CudaEvent final : public Event {
 public:
  static absl::StatusOr<std::unique_ptr<Event>> Create();
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  absl::StatusOr<bool> Done() override;

  // REQUIRES: an event of a CudaDevice.
  static cudaEvent_t Of(Event& event) { return static_cast<CudaEvent&>(event).event_; }

 private:
  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  cudaEvent_t event_;
};

class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create();
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  absl::Status Record(Event& event) override;
  absl::Status WaitFor(Event& event) override;
  absl::Status Synchronize() override;

  // REQUIRES: a stream of a CudaDevice.
  static cudaStream_t Of(Stream& stream) { return static_cast<CudaStream&>(stream).stream_; }

 private:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
