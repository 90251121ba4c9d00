// What this daemon has heard of its group, on its way to the core. The readers of streams append
// and read on; one thread delivers, in the order of appending. So a core that is slow holds up no
// reader, and a heartbeat that comes behind a slow message is heard in time.
//
//   DeliveryQueue queue(bytes_max);
//   queue.Append([&daemon, message] { daemon.OnCoordinatorMessage(message); }, bytes);
//   queue.WaitForRoom();
//
// The limit is on bytes, since the sizes of messages differ by a factor of a million. Nothing is
// ever dropped: a message beyond the limit is taken, and its reader waits then, so that each stream
// is ahead by one message at most. Delivering waits for no reader. While readers may wait (full()),
// this daemon does not listen, and so must not take another one's silence for its end.
//
// Threads: any, and one of its own.
#ifndef DMUOND_SERVER_DAEMON_GROUP_DELIVERY_QUEUE_H_
#define DMUOND_SERVER_DAEMON_GROUP_DELIVERY_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace dmuond::server {

class DeliveryQueue {
 public:
  explicit DeliveryQueue(size_t bytes_max) : bytes_max_(bytes_max), thread_([this] { Run(); }) {}
  // Delivers what was appended.
  ~DeliveryQueue() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  DeliveryQueue(const DeliveryQueue&) = delete;
  DeliveryQueue& operator=(const DeliveryQueue&) = delete;

  // Returns at once. `deliver` runs without a lock of the queue, after everything that was appended
  // before; `bytes` count until it has returned.
  void Append(std::function<void()> deliver, size_t bytes = 0) {
    {
      MutexLock lock(mutex_);
      queue_.push_back({std::move(deliver), bytes});
      bytes_ += bytes;
      ++appended_;
    }
    changed_.NotifyAll();  // after the lock: the thread that it wakes takes it
  }
  [[nodiscard]] bool full() {
    MutexLock lock(mutex_);
    return bytes_ > bytes_max_;
  }
  // Returns when it is not full.
  void WaitForRoom() {
    MutexLock lock(mutex_);
    while (bytes_ > bytes_max_) changed_.Wait(mutex_);
  }
  // Returns when everything that was appended before this call is delivered. REQUIRES: it is not
  // called by what is delivered.
  void WaitUntilDelivered() {
    MutexLock lock(mutex_);
    const uint64_t last = appended_;
    while (delivered_ < last) changed_.Wait(mutex_);
  }

 private:
  struct Entry {
    std::function<void()> deliver;
    size_t bytes = 0;
  };
  void Run() {
    for (;;) {
      Entry next;
      {
        MutexLock lock(mutex_);
        while (queue_.empty() && !stop_) changed_.Wait(mutex_);
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      next.deliver();
      MutexLock lock(mutex_);
      bytes_ -= next.bytes;
      ++delivered_;
      changed_.NotifyAll();
    }
  }

  const size_t bytes_max_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::deque<Entry> queue_ DMUOND_GUARDED_BY(mutex_);
  size_t bytes_ DMUOND_GUARDED_BY(mutex_) = 0;       // of what is not delivered yet
  uint64_t appended_ DMUOND_GUARDED_BY(mutex_) = 0;  // entries so far
  uint64_t delivered_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_DELIVERY_QUEUE_H_
