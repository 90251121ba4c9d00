#include "server/daemon/memory/timed_holder.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "dmuond/wire/start_thread.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

constexpr std::chrono::milliseconds kLook{100};

}  // namespace

// Of who waits and of the thread that calls, whoever is longer at it.
struct TimedHolder::Call {
  Mutex mutex;
  CondVar changed;
  std::optional<absl::StatusOr<wire::UniqueFd>> made DMUOND_GUARDED_BY(mutex);
  bool given_up DMUOND_GUARDED_BY(mutex) = false;
};

TimedHolder::TimedHolder(std::string device, std::shared_ptr<kernels::MemoryHolder> holder,
                         std::chrono::milliseconds timeout)
    : device_(std::move(device)), holder_(std::move(holder)), timeout_(timeout) {}

absl::Status TimedHolder::Hangs(size_t bytes, const std::string& name) const {
  return Error(absl::StatusCode::kDeadlineExceeded, "DEVICE_HANGS",
               Say("memory '", name, "': ", Named("wanted_bytes", bytes), " bytes of ",
                   Named("device", device_), " wanted; its driver has not answered for ",
                   Named("waited_ms", timeout_.count()), " ms (--lane_timeout)"));
}

absl::StatusOr<wire::UniqueFd> TimedHolder::Allocate(size_t bytes, const std::string& name) {
  if (timeout_.count() == 0) return holder_->Allocate(bytes, name);
  if (hangs()) return Hangs(bytes, name);
  const auto call = std::make_shared<Call>();
  auto thread =
      wire::StartThread("memory", [call, bytes, name, holder = holder_, hanging = hanging_] {
        absl::StatusOr<wire::UniqueFd> made = holder->Allocate(bytes, name);
        MutexLock lock(call->mutex);
        if (call->given_up) --*hanging;
        call->made = std::move(made);
        call->changed.NotifyAll();
      });
  if (!thread.ok()) return WithReason(thread.status(), "THREADS_EXHAUSTED");
  thread->detach();
  std::chrono::steady_clock::duration waited{0};
  MutexLock lock(call->mutex);
  while (!call->made.has_value()) {
    if (waited >= timeout_) {
      call->given_up = true;
      ++*hanging_;
      return Hangs(bytes, name);
    }
    const auto begun = std::chrono::steady_clock::now();
    const auto look = std::min<std::chrono::steady_clock::duration>(kLook, timeout_ - waited);
    call->changed.WaitUntil(call->mutex, begun + look);
    waited += std::min(std::chrono::steady_clock::now() - begun, look);
  }
  return *std::move(call->made);
}

}  // namespace dmuond::server
