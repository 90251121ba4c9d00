#include "kernels/cuda/cuda_stream.h"

#include "kernels/cuda/cuda_status.h"

namespace dmuond::kernels::cuda {

absl::StatusOr<std::unique_ptr<Event>> CudaEvent::Create() {
  cudaEvent_t event = nullptr;
  const absl::Status status =
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  if (!status.ok()) return status;
  return std::unique_ptr<Event>(new CudaEvent(event));
}

CudaEvent::~CudaEvent() { cudaEventDestroy(event_); }

absl::StatusOr<bool> CudaEvent::Done() {
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) return false;
  if (absl::Status status = CudaStatus(result, "cudaEventQuery"); !status.ok()) return status;
  return true;
}

absl::StatusOr<std::unique_ptr<Stream>> CudaStream::Create() {
  cudaStream_t stream = nullptr;
  const absl::Status status =
      CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  if (!status.ok()) return status;
  return std::unique_ptr<Stream>(new CudaStream(stream));
}

CudaStream::~CudaStream() { cudaStreamDestroy(stream_); }

absl::Status CudaStream::Record(Event& event) {
  return CudaStatus(cudaEventRecord(CudaEvent::Of(event), stream_), "cudaEventRecord");
}

absl::Status CudaStream::WaitFor(Event& event) {
  return CudaStatus(cudaStreamWaitEvent(stream_, CudaEvent::Of(event), 0), "cudaStreamWaitEvent");
}

absl::Status CudaStream::Synchronize() {
  return CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

}  // namespace dmuond::kernels::cuda
