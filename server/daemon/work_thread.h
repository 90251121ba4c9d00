// A thread for work that may block. It does one piece after the other, and holds no lock of the
// daemon.
//
// Threads: Post() from any.
#ifndef DMUOND_SERVER_DAEMON_WORK_THREAD_H_
#define DMUOND_SERVER_DAEMON_WORK_THREAD_H_

#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "base/mutex.h"

namespace dmuond::server {

class WorkThread {
 public:
  using Work = std::function<void()>;

  WorkThread() : thread_([this] { Run(); }) {}
  // Waits for the work that is being done; work that has not begun is dropped. If the work may wait
  // for something, the caller ends that wait first.
  ~WorkThread() {
    (void)Stop(std::chrono::steady_clock::now());
    thread_.join();
  }
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  // The same, until the deadline at most. False: the work is not done, and may hang. The destructor
  // would wait for it: an owner that must not wait must not destroy the object.
  bool Stop(std::chrono::steady_clock::time_point deadline) {
    MutexLock lock(mutex_);
    stop_ = true;
    queue_.clear();
    changed_.NotifyAll();
    while (!done_ && changed_.WaitUntil(mutex_, deadline)) {
    }
    return done_;
  }

  // Adds work, which is done in this order. Never blocks.
  void Post(Work work) {
    MutexLock lock(mutex_);
    if (stop_) return;
    queue_.push_back(std::move(work));
    changed_.NotifyAll();
  }

 private:
  void Run() {
    for (;;) {
      Work work;
      {
        MutexLock lock(mutex_);
        while (queue_.empty() && !stop_) changed_.Wait(mutex_);
        done_ = stop_;
        if (stop_) return changed_.NotifyAll();
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  bool done_ DMUOND_GUARDED_BY(mutex_) = false;  // nothing more is going to be done
  std::deque<Work> queue_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_WORK_THREAD_H_
