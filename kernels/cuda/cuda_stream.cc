#include "kernels/cuda/cuda_stream.h"

#include "kernels/cuda/cuda_status.h"

namespace dmuond::kernels::cuda {
namespace {

class CudaEvent final : public Event {
 public:
  CudaEvent(cudaEvent_t event, std::shared_ptr<EventPool> pool)
      : event_(event), pool_(std::move(pool)) {}
  ~CudaEvent() override { pool_->Return(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  absl::StatusOr<bool> Done() override {
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) return false;
    if (absl::Status status = CudaStatus(result, "cudaEventQuery"); !status.ok()) return status;
    return true;
  }
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_;
  std::shared_ptr<EventPool> pool_;
};

}  // namespace

EventPool::~EventPool() {
  for (cudaEvent_t event : idle_) cudaEventDestroy(event);
}

absl::StatusOr<cudaEvent_t> EventPool::Take() {
  if (!idle_.empty()) {
    cudaEvent_t event = idle_.back();
    idle_.pop_back();
    return event;
  }
  cudaEvent_t event = nullptr;
  const absl::Status status =
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  if (!status.ok()) return status;
  return event;
}

absl::StatusOr<std::unique_ptr<Stream>> CudaStream::Create(std::shared_ptr<EventPool> events) {
  cudaStream_t stream = nullptr;
  const absl::Status status =
      CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  if (!status.ok()) return status;
  return std::unique_ptr<Stream>(new CudaStream(stream, std::move(events)));
}

CudaStream::~CudaStream() { cudaStreamDestroy(stream_); }

absl::StatusOr<std::unique_ptr<Event>> CudaStream::Record() {
  const absl::StatusOr<cudaEvent_t> event = events_->Take();
  if (!event.ok()) return event.status();
  auto recorded = std::make_unique<CudaEvent>(*event, events_);
  const absl::Status status = CudaStatus(cudaEventRecord(*event, stream_), "cudaEventRecord");
  if (!status.ok()) return status;
  return std::unique_ptr<Event>(std::move(recorded));
}

absl::Status CudaStream::WaitFor(Event& event) {
  return CudaStatus(cudaStreamWaitEvent(stream_, static_cast<CudaEvent&>(event).get(), 0),
                    "cudaStreamWaitEvent");
}

absl::Status CudaStream::Synchronize() {
  return CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

}  // namespace dmuond::kernels::cuda
