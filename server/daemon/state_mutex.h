// The daemon's lock together with its one condition. Who changes what others may wait for says
// Changed(); they are woken when the lock is given up. Woken before, each of them would only run
// into the lock, and on a small machine take the processor from its holder.
//
//   { StateLock lock(mutex_); ++count_; mutex_.Changed(); }
//   { StateLock lock(mutex_); while (count_ == 0) mutex_.WaitUntil(deadline); }
#ifndef DMUOND_SERVER_DAEMON_STATE_MUTEX_H_
#define DMUOND_SERVER_DAEMON_STATE_MUTEX_H_

#include <chrono>
#include <utility>

#include "kernels/mutex.h"

namespace dmuond::server {

class DMUOND_CAPABILITY("mutex") StateMutex {
 public:
  void Lock() DMUOND_ACQUIRE() { LockInner(); }
  void Unlock() DMUOND_RELEASE() { UnlockInner(); }
  void Changed() DMUOND_REQUIRES(this) { changed_ = true; }
  // Until woken or the deadline; gives up the lock meanwhile.
  void WaitUntil(std::chrono::steady_clock::time_point deadline) DMUOND_REQUIRES(this) {
    if (std::exchange(changed_, false)) condition_.NotifyAll();
    WaitInner(deadline);
  }

 private:
  // The compiler's check knows the outer capability; these keep the inner one from it.
  void LockInner() DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis) { inner_.Lock(); }
  void UnlockInner() DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis) {
    const bool changed = std::exchange(changed_, false);
    inner_.Unlock();
    if (changed) condition_.NotifyAll();
  }
  void WaitInner(std::chrono::steady_clock::time_point deadline)
      DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis) {
    condition_.WaitUntil(inner_, deadline);
  }

  Mutex inner_;
  CondVar condition_;
  bool changed_ = false;  // under inner_
};

class DMUOND_SCOPED_CAPABILITY StateLock {
 public:
  explicit StateLock(StateMutex& mutex) DMUOND_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~StateLock() DMUOND_RELEASE() { mutex_.Unlock(); }
  StateLock(const StateLock&) = delete;
  StateLock& operator=(const StateLock&) = delete;

 private:
  StateMutex& mutex_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_STATE_MUTEX_H_
