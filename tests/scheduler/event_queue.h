// A simulated clock: what happens next, in the order of its time, and of its making where times are
// equal. The unit of time is the caller's.
#ifndef DMUOND_TESTS_SCHEDULER_EVENT_QUEUE_H_
#define DMUOND_TESTS_SCHEDULER_EVENT_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace dmuond::scheduler::testing {

using Event = std::function<void()>;

class EventQueue {
 public:
  [[nodiscard]] int64_t now() const { return now_; }
  [[nodiscard]] bool empty() const { return queue_.empty(); }
  [[nodiscard]] size_t size() const { return queue_.size(); }
  // When the next event happens. REQUIRES: not empty.
  [[nodiscard]] int64_t next_at() const { return queue_.front().at; }

  void At(int64_t at, Event event) {
    queue_.push_back({at, sequence_++, std::move(event)});
    std::push_heap(queue_.begin(), queue_.end(), Later);
  }
  void After(int64_t delay, Event event) { At(now_ + delay, std::move(event)); }
  // REQUIRES: not empty.
  void RunNext() {
    std::pop_heap(queue_.begin(), queue_.end(), Later);
    const Queued next = std::move(queue_.back());
    queue_.pop_back();
    now_ = next.at;
    next.event();
  }

 private:
  struct Queued {
    int64_t at;
    uint64_t sequence;
    Event event;
  };
  static bool Later(const Queued& a, const Queued& b) {
    return std::pair(a.at, a.sequence) > std::pair(b.at, b.sequence);
  }

  int64_t now_ = 0;
  uint64_t sequence_ = 0;
  std::vector<Queued> queue_;  // a heap
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_EVENT_QUEUE_H_
