#include "kernels/cuda/cuda_stream.h"

#include "base/status_macros.h"

namespace dmuond::kernels::cuda {

absl::StatusOr<std::unique_ptr<Event>> CudaEvent::Create(const Driver& driver) {
  CUevent event = nullptr;
  RETURN_IF_ERROR(
      driver.Check(driver.event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  return std::unique_ptr<Event>(new CudaEvent(driver, event));
}

CudaEvent::~CudaEvent() { driver_.event_destroy(event_); }

absl::StatusOr<bool> CudaEvent::Done() {
  const CUresult result = driver_.event_query(event_);
  if (result == CUDA_ERROR_NOT_READY) return false;
  RETURN_IF_ERROR(driver_.Check(result, "cuEventQuery"));
  return true;
}

absl::StatusOr<std::unique_ptr<Stream>> CudaStream::Create(const Driver& driver) {
  CUstream stream = nullptr;
  RETURN_IF_ERROR(
      driver.Check(driver.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
  return std::unique_ptr<Stream>(new CudaStream(driver, stream));
}

CudaStream::~CudaStream() {
  driver_.stream_synchronize(stream_);
  driver_.stream_destroy(stream_);
}

absl::Status CudaStream::Record(Event& event) {
  return driver_.Check(driver_.event_record(CudaEvent::Of(event), stream_), "cuEventRecord");
}

absl::Status CudaStream::WaitFor(Event& event) {
  return driver_.Check(driver_.stream_wait_event(stream_, CudaEvent::Of(event), 0),
                       "cuStreamWaitEvent");
}

absl::Status CudaStream::Synchronize() {
  return driver_.Check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
}

}  // namespace dmuond::kernels::cuda
