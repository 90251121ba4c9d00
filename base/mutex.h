// The only locks of this repository: std::mutex and std::condition_variable with clang's
// thread-safety annotations, so that sanitizers see every lock and the compiler checks every guard.
//
//   Mutex mutex_;
//   int count_ DMUOND_GUARDED_BY(mutex_);
//   { MutexLock lock(mutex_); ++count_; changed_.NotifyAll(); }
#ifndef DMUOND_BASE_MUTEX_H_
#define DMUOND_BASE_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define DMUOND_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define DMUOND_THREAD_ANNOTATION(x)
#endif
#define DMUOND_CAPABILITY(x) DMUOND_THREAD_ANNOTATION(capability(x))
#define DMUOND_SCOPED_CAPABILITY DMUOND_THREAD_ANNOTATION(scoped_lockable)
#define DMUOND_GUARDED_BY(x) DMUOND_THREAD_ANNOTATION(guarded_by(x))
#define DMUOND_REQUIRES(...) DMUOND_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define DMUOND_EXCLUDES(...) DMUOND_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define DMUOND_ACQUIRE(...) DMUOND_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define DMUOND_RELEASE(...) DMUOND_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

namespace dmuond {

class DMUOND_CAPABILITY("mutex") Mutex {
 public:
  void Lock() DMUOND_ACQUIRE() { mutex_.lock(); }
  void Unlock() DMUOND_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class DMUOND_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) DMUOND_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() DMUOND_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class CondVar {
 public:
  void Wait(Mutex& mutex) DMUOND_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // False: the deadline passed first.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point deadline)
      DMUOND_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool woken = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return woken;
  }
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace dmuond

#endif  // DMUOND_BASE_MUTEX_H_
