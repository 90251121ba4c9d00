// Streams are threads that do one piece of work after the other, each a little late.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <thread>
#include <utility>

#include "tests/fake_cuda/driver/fake_cuda.h"
#include "tests/fake_cuda/driver/state.h"

namespace dmuond::fake_cuda {

void Point::Finish() {
  std::lock_guard lock(mutex);
  done = true;
  ms = static_cast<double>(NowNs()) * 1e-6;
  changed.notify_all();
}

void Point::Wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return done; });
}

bool Point::Done() {
  std::lock_guard lock(mutex);
  return done;
}

namespace {

std::atomic<int> held_up_by_events{0};

int NextNumber() {
  static std::atomic<int> next{0};
  return next++;
}

const char* Name(WorkKind kind) {
  switch (kind) {
    case WorkKind::kKernel:
    case WorkKind::kKernelBeside:
      return "kernel";
    case WorkKind::kEngine:
      return "engine";
    case WorkKind::kWord:
      return "word";
    default:
      return "other";
  }
}

}  // namespace

Stream::Stream(Context* context)
    : context_(context),
      number_(NextNumber()),
      random_(All().settings.seed * 1000003 + static_cast<uint64_t>(number_)) {}

std::shared_ptr<Stream> Stream::Make(Context* context) {
  auto stream = std::make_shared<Stream>(context);
  std::thread([stream] { stream->RunAll(stream); }).detach();
  return stream;
}

void Stream::Add(Work work) {
  if (captured_) Abort("%s goes to a stream that is being captured", work.name.c_str());
  {
    State& all = All();
    std::lock_guard lock(all.mutex);
    for (const Range& range : work.ranges) all.pending.push_back({range, work.name});
  }
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::Empty() {
  std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::Destroy() {
  std::lock_guard lock(mutex_);
  destroyed_ = true;
  changed_.notify_all();
}

void Stream::RunAll(const std::shared_ptr<Stream>& self) {
  for (;;) {
    Work work;
    {
      std::unique_lock lock(self->mutex_);
      self->changed_.wait(lock, [&] { return !self->queue_.empty() || self->destroyed_; });
      if (self->queue_.empty()) return;
      work = std::move(self->queue_.front());
      self->queue_.pop_front();
      self->busy_ = true;
    }
    self->Run(work);
    std::lock_guard lock(self->mutex_);
    self->busy_ = false;
    self->changed_.notify_all();
  }
}

void Stream::Run(Work& work) {
  State& all = All();
  if (all.settings.delay_us > 0 && work.kind != WorkKind::kOther) {
    ::usleep(static_cast<useconds_t>(random_() % (all.settings.delay_us + 1)));
  }
  // After an error nothing is done any more.
  if (context_->error == CUDA_SUCCESS) {
    std::unique_lock<std::mutex> whole_device;
    if (work.kind == WorkKind::kKernel) {
      whole_device = std::unique_lock(all.devices[context_->device]->kernels);
    }
    const int64_t begin = NowNs();
    const CUresult result = work.run();
    if (result != CUDA_SUCCESS) context_->error = result;
    if (work.kind != WorkKind::kOther && !all.settings.log.empty()) {
      char line[256];
      std::snprintf(line, sizeof(line),
                    "%" PRId64 " %" PRId64 " pid=%d stream=%d %s %s bytes=%zu\n", begin, NowNs(),
                    static_cast<int>(all.pid), number_, Name(work.kind), work.name.c_str(),
                    work.bytes);
      Log(context_->device, line);
    }
  }
  {
    std::lock_guard lock(all.mutex);
    for (const Range& range : work.ranges) {
      for (auto at = all.pending.begin(); at != all.pending.end(); ++at) {
        if (at->range.begin != range.begin || at->range.bytes != range.bytes) continue;
        all.pending.erase(at);
        break;
      }
    }
  }
  if (work.point != nullptr) work.point->Finish();
}

}  // namespace dmuond::fake_cuda

using namespace dmuond::fake_cuda;  // NOLINT: the driver's interface is global

namespace {

Event* FindEvent(CUevent event) {
  const auto at = All().events.find(event);
  return at == All().events.end() ? nullptr : at->second.get();
}

// The last record of an event, nullptr where there is none; CUDA_ERROR_INVALID_HANDLE.
CUresult LastRecord(CUevent event, std::shared_ptr<Point>* last) {
  std::lock_guard lock(All().mutex);
  const Event* found = FindEvent(event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *last = found->last;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  LogCall("cuStreamCreate");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Stream> made = Stream::Make(context);
  *stream = reinterpret_cast<CUstream>(made.get());
  std::lock_guard lock(All().mutex);
  All().streams[*stream] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Stream> found;
  {
    std::lock_guard lock(All().mutex);
    const auto at = All().streams.find(stream);
    if (at == All().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    found = at->second;
    All().streams.erase(at);
  }
  found->Destroy();
  return found->context()->error;
}

CUresult cuStreamSynchronize(CUstream stream) {
  LogCall("cuStreamSynchronize");
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (found->captured()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  found->Synchronize();
  return found->context()->error;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  *status = found->captured() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (stream == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  found->SetCaptured(true);
  return CUDA_SUCCESS;
}

// The graph is empty.
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (!found->captured()) return CUDA_ERROR_ILLEGAL_STATE;
  found->SetCaptured(false);
  *graph = reinterpret_cast<CUgraph>(stream);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph) { return NeedDriver(); }

CUresult cuCtxSynchronize() {
  LogCall("cuCtxSynchronize");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(All().mutex);
    for (const auto& [handle, stream] : All().streams) {
      if (stream->context() == context) streams.push_back(stream);
    }
    if (context->default_stream != nullptr) streams.push_back(context->default_stream);
  }
  for (const std::shared_ptr<Stream>& stream : streams) stream->Synchronize();
  return context->error;
}

CUresult cuStreamQuery(CUstream stream) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (!found->Empty()) return CUDA_ERROR_NOT_READY;
  return found->context()->error;
}

int fakeCudaHeldUpByEvents() { return held_up_by_events; }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Point> last;
  if (const CUresult result = LastRecord(event, &last); result != CUDA_SUCCESS) return result;
  if (last == nullptr) return CUDA_SUCCESS;
  Work work;
  work.name = "cuStreamWaitEvent";
  work.run = [last] {
    ++held_up_by_events;
    last->Wait();
    --held_up_by_events;
    return CUDA_SUCCESS;
  };
  found->Add(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  LogCall("cuEventCreate");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  auto made = std::make_unique<Event>();
  made->context = context;
  made->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *event = reinterpret_cast<CUevent>(made.get());
  std::lock_guard lock(All().mutex);
  All().events[*event] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  return All().events.erase(event) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  auto point = std::make_shared<Point>();
  {
    std::lock_guard lock(All().mutex);
    Event* recorded = FindEvent(event);
    if (recorded == nullptr || recorded->context != found->context()) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    recorded->last = point;
  }
  Work work;
  work.name = "cuEventRecord";
  work.run = [] { return CUDA_SUCCESS; };
  work.point = std::move(point);
  found->Add(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Point> last;
  if (const CUresult result = LastRecord(event, &last); result != CUDA_SUCCESS) return result;
  return last == nullptr || last->Done() ? context->error.load() : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
  LogCall("cuEventSynchronize");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Point> last;
  if (const CUresult result = LastRecord(event, &last); result != CUDA_SUCCESS) return result;
  if (last != nullptr) last->Wait();
  return context->error;
}

CUresult cuEventElapsedTime(float* ms, CUevent begin, CUevent end) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::shared_ptr<Point> points[2];
  {
    std::lock_guard lock(All().mutex);
    const CUevent events[] = {begin, end};
    for (int i = 0; i < 2; ++i) {
      const Event* event = FindEvent(events[i]);
      if (event == nullptr || !event->timing || event->last == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
      }
      points[i] = event->last;
    }
  }
  for (const auto& point : points) {
    if (!point->Done()) return CUDA_ERROR_NOT_READY;
  }
  *ms = static_cast<float>(points[1]->ms - points[0]->ms);
  return CUDA_SUCCESS;
}

}  // extern "C"
