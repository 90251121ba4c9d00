// The daemon's lock, and those that wait for a condition under it. A thread that changes what
// others may wait for calls Changed(). When it gives up the lock, all conditions are looked at, and
// only waiters whose condition holds are woken. A few are woken at a time, since all of them need
// the lock: each wakes the next one when it gives up the lock.
//
//   { StateLock lock(mutex_); ++count_; mutex_.Changed(); }
//   const std::function<bool()> any = [&] { return count_ > 0; };
//   { StateLock lock(mutex_); while (!any()) mutex_.WaitUntil(any, deadline); }
//
// A waiter without a thread leaves its condition, and what is to be done when it holds:
//
//   { StateLock lock(mutex_); mutex_.WaitLate({any, deadline, [] { … }}); }
#ifndef DMUOND_SERVER_DAEMON_STATE_MUTEX_H_
#define DMUOND_SERVER_DAEMON_STATE_MUTEX_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "base/mutex.h"

namespace dmuond::server {

class DMUOND_CAPABILITY("mutex") StateMutex {
 public:
  using Condition = std::function<bool()>;

  StateMutex();
  void Lock() DMUOND_ACQUIRE();
  void Unlock() DMUOND_RELEASE();
  void Changed() DMUOND_REQUIRES(this) { changed_ = true; }
  // For how long the lock was held, by all threads together, until it was taken for this call.
  struct Held {
    uint64_t times = 0;
    std::chrono::nanoseconds total{0};
    std::chrono::nanoseconds longest{0};
  };
  [[nodiscard]] const Held& held() const DMUOND_REQUIRES(this) { return held_; }
  // Waits until the condition holds or the deadline has passed; gives up the lock meanwhile. Other
  // threads look at the condition, under the lock. It may not hold any more when this returns.
  void WaitUntil(const Condition& condition, std::chrono::steady_clock::time_point deadline)
      DMUOND_REQUIRES(this);

  // A wait that holds no thread. `then` is called once, without the lock, by the thread that gives
  // the lock up when the condition holds or the wait was ended. It must not block.
  struct LateWait {
    Condition condition;
    std::chrono::steady_clock::time_point deadline;  // for EndOverdue()
    std::function<void()> then;
  };
  // Names a wait; 0 names none.
  using LateId = uint64_t;
  LateId WaitLate(LateWait wait) DMUOND_REQUIRES(this);
  // Ends a wait. Does nothing if it has ended already.
  void EndLate(LateId id) DMUOND_REQUIRES(this);
  // Ends late waits whose deadline has passed. Returns the earliest deadline of the others.
  std::optional<std::chrono::steady_clock::time_point> EndOverdue(
      std::chrono::steady_clock::time_point now) DMUOND_REQUIRES(this);

 private:
  // A waiter's place. It outlives the waiter, because the thread that wakes it has given up the
  // lock.
  struct Place {
    enum class State : uint8_t { kFree, kWaiting, kHolds, kWoken };
    State state = State::kFree;
    const Condition* condition = nullptr;
    CondVar woken;
  };
  static constexpr size_t kWokenMax = 8;
  // The waiters to be woken: the first `count`.
  struct Woken {
    CondVar* places[kWokenMax];
    size_t count = 0;
  };

  // Of inner_, with the time between them counted.
  void LockInner();
  void UnlockInner();
  void CountHeld();
  Place& Take(const Condition& condition);
  void Leave(Place& place);
  // The waiters to be woken now: of those whose condition holds, the ones that have waited longest.
  Woken Choose();
  static void Wake(const Woken& woken);
  template <typename Predicate>
  void EndLateIf(const Predicate& ends);

  // At most so many are woken at a time: each finds a processor, and they take the lock in turn.
  const size_t woken_max_;
  Mutex inner_;
  // All that follows is guarded by inner_.
  Held held_;
  std::chrono::steady_clock::time_point locked_;
  bool changed_ = false;
  std::deque<Place> places_;
  std::vector<Place*> free_;
  std::vector<Place*> waiting_;  // their condition did not hold when it was looked at last
  std::deque<Place*> hold_;      // their condition holds; they are woken in this order
  size_t woken_ = 0;             // so many are woken and have not taken the lock yet
  LateId last_late_ = 0;
  std::map<LateId, LateWait> late_;  // their condition did not hold when it was looked at last
  std::vector<LateWait> ended_;      // the thread that gives up the lock calls them
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
