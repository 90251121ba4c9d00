// The daemon's lock together with those who wait for something under it. Who changes what others
// may wait for says Changed(); when the lock is given up, everybody's condition is looked at, and
// only those are woken for whom it holds. They are woken a few at a time: each wakes the next one
// when it gives up the lock, into which all of them together would only run.
//
//   { StateLock lock(mutex_); ++count_; mutex_.Changed(); }
//   const std::function<bool()> any = [&] { return count_ > 0; };
//   { StateLock lock(mutex_); while (!any()) mutex_.WaitUntil(any, deadline); }
//
// Who has no thread to wait with leaves its condition and what is to be done then:
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

#include "kernels/mutex.h"

namespace dmuond::server {

class DMUOND_CAPABILITY("mutex") StateMutex {
 public:
  using Condition = std::function<bool()>;

  StateMutex();
  void Lock() DMUOND_ACQUIRE();
  void Unlock() DMUOND_RELEASE();
  void Changed() DMUOND_REQUIRES(this) { changed_ = true; }
  // Until the condition holds or the deadline has passed; gives up the lock meanwhile. Others look
  // at the condition, under the lock, and may change what it holds for again before this returns.
  void WaitUntil(const Condition& condition, std::chrono::steady_clock::time_point deadline)
      DMUOND_REQUIRES(this);

  // A wait that holds no thread. `then` is called once, without the lock, by whoever gives the lock
  // up after the condition has held, or after the wait was ended. It must not block.
  struct LateWait {
    Condition condition;
    std::chrono::steady_clock::time_point deadline;  // for EndOverdue()
    std::function<void()> then;
  };
  // 0: of no wait.
  using LateId = uint64_t;
  LateId WaitLate(LateWait wait) DMUOND_REQUIRES(this);
  // Ends a wait whose condition has not held. One that has ended already is left alone.
  void EndLate(LateId id) DMUOND_REQUIRES(this);
  // Ends those whose deadline has passed. The earliest deadline of the others.
  std::optional<std::chrono::steady_clock::time_point> EndOverdue(
      std::chrono::steady_clock::time_point now) DMUOND_REQUIRES(this);

 private:
  // Where one waits. A place outlives who waits at it: who wakes it has given up the lock by then.
  struct Place {
    enum class State : uint8_t { kFree, kWaiting, kHolds, kWoken };
    State state = State::kFree;
    const Condition* condition = nullptr;
    CondVar woken;
  };
  static constexpr size_t kWokenMax = 8;
  // Who is to be woken: the first `count`.
  struct Woken {
    CondVar* places[kWokenMax];
    size_t count = 0;
  };

  Place& Take(const Condition& condition);
  void Leave(Place& place);
  // Of those whose condition holds, who has waited longest, and may be woken now.
  Woken Choose();
  static void Wake(const Woken& woken);
  template <typename Predicate>
  void EndLateIf(const Predicate& ends);

  // So many find a processor beside the one who wakes them, and come to the lock in turn.
  const size_t woken_max_;
  Mutex inner_;
  // All that follows is guarded by inner_.
  bool changed_ = false;
  std::deque<Place> places_;
  std::vector<Place*> free_;
  std::vector<Place*> waiting_;  // whose condition did not hold when it was looked at last
  std::deque<Place*> hold_;      // whose condition holds: to be woken, in this order
  size_t woken_ = 0;             // and have not come to the lock yet
  LateId last_late_ = 0;
  std::map<LateId, LateWait> late_;  // whose condition did not hold when it was looked at last
  std::vector<LateWait> ended_;      // to be called by who gives up the lock
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
