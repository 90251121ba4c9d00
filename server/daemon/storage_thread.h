// One thread for everything that may wait for a disk: no lock of the daemon is held there.
//
// Threads: Post() from any.
#ifndef DMUOND_SERVER_DAEMON_STORAGE_THREAD_H_
#define DMUOND_SERVER_DAEMON_STORAGE_THREAD_H_

#include <deque>
#include <functional>
#include <thread>

#include "kernels/mutex.h"

namespace dmuond::server {

class StorageThread {
 public:
  using Work = std::function<void()>;

  StorageThread() : thread_([this] { Run(); }) {}
  // Waits for the work that is being done; what was not begun is dropped. Who makes work wait for
  // something ends that wait first.
  ~StorageThread() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      queue_.clear();
      changed_.NotifyAll();
    }
    thread_.join();
  }
  StorageThread(const StorageThread&) = delete;
  StorageThread& operator=(const StorageThread&) = delete;

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
        if (stop_) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::deque<Work> queue_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_STORAGE_THREAD_H_
