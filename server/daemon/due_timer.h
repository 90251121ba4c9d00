// Calls back at a time that was set. Its thread sleeps while none is set.
//
//   DueTimer timer([this] { OnDue(); });
//   timer.Set(now + 1ms);
//
// Threads: Set() from any, and from the callback. The callback runs on the timer's own thread and
// holds none of its locks.
#ifndef DMUOND_SERVER_DAEMON_DUE_TIMER_H_
#define DMUOND_SERVER_DAEMON_DUE_TIMER_H_

#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace dmuond::server {

class DueTimer {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit DueTimer(std::function<void()> on_due)
      : on_due_(std::move(on_due)), thread_([this] { Run(); }) {}
  // Waits for a callback that runs. A time that has not come is forgotten.
  ~DueTimer() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  DueTimer(const DueTimer&) = delete;
  DueTimer& operator=(const DueTimer&) = delete;

  // The next callback comes at this time, or at an earlier one that was set before.
  void Set(Time at) {
    MutexLock lock(mutex_);
    if (stop_ || (due_.has_value() && *due_ <= at)) return;
    due_ = at;
    changed_.NotifyAll();
  }

 private:
  void Run() {
    for (;;) {
      {
        MutexLock lock(mutex_);
        while (!stop_ && (!due_.has_value() || std::chrono::steady_clock::now() < *due_)) {
          if (due_.has_value()) {
            changed_.WaitUntil(mutex_, *due_);
          } else {
            changed_.Wait(mutex_);
          }
        }
        if (stop_) return;
        due_.reset();
      }
      on_due_();
    }
  }

  const std::function<void()> on_due_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::optional<Time> due_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;  // the last: it uses the others
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_DUE_TIMER_H_
