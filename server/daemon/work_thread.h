// A thread that does what may block, one thing after the other: no lock of the daemon is held
// there.
//
// Threads: Post() from any.
#ifndef DMUOND_SERVER_DAEMON_WORK_THREAD_H_
#define DMUOND_SERVER_DAEMON_WORK_THREAD_H_

#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "kernels/mutex.h"

namespace dmuond::server {

class WorkThread {
 public:
  using Work = std::function<void()>;

  WorkThread() : thread_([this] { Run(); }) {}
  // Waits for the work that is being done; what was not begun is dropped. Who makes work wait for
  // something ends that wait first.
  ~WorkThread() {
    (void)Stop(std::chrono::steady_clock::now());
    thread_.join();
  }
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  // The same, and no longer than until the deadline. False: the work is not done, it hangs perhaps;
  // an object that must not wait for it must not be destroyed either.
  bool Stop(std::chrono::steady_clock::time_point deadline) {
    MutexLock lock(mutex_);
    stop_ = true;
    queue_.clear();
    changed_.NotifyAll();
    while (!done_ && changed_.WaitUntil(mutex_, deadline)) {
    }
    return done_;
  }

  // In order. Never blocks.
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
