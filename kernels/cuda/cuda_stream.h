// CUDA streams and events behind kernels/device.h, of the context that was current when they were
// made. The runtime takes them as its own.
#ifndef DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
#define DMUOND_KERNELS_CUDA_CUDA_STREAM_H_

#include <cuda.h>

#include <memory>

#include "kernels/cuda/driver.h"
#include "kernels/device.h"

namespace dmuond::kernels::cuda {

class CudaEvent final : public Event {
 public:
  static absl::StatusOr<std::unique_ptr<Event>> Create(const Driver& driver);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  absl::StatusOr<bool> Done() override;

  // REQUIRES: an event of a CudaDevice.
  static CUevent Of(Event& event) { return static_cast<CudaEvent&>(event).event_; }

 private:
  CudaEvent(const Driver& driver, CUevent event) : driver_(driver), event_(event) {}
  const Driver& driver_;
  CUevent event_;
};

class CudaStream final : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create(const Driver& driver);
  // Waits until the stream is empty: what its work uses may be unmapped next.
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  absl::Status Record(Event& event) override;
  absl::Status WaitFor(Event& event) override;
  absl::Status Synchronize() override;

  // REQUIRES: a stream of a CudaDevice.
  static CUstream Of(Stream& stream) { return static_cast<CudaStream&>(stream).stream_; }

 private:
  CudaStream(const Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {}
  const Driver& driver_;
  CUstream stream_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_STREAM_H_
