// When to beat, and when silence means that the other side is dead. Both ends of a member's stream
// use them: the membership machine for its members, a member for its coordinator. Values, pure.
#ifndef DMUOND_SCHEDULER_HEARTBEAT_H_
#define DMUOND_SCHEDULER_HEARTBEAT_H_

#include <chrono>
#include <cstdint>
#include <optional>

#include "scheduler/step.h"

namespace dmuond::scheduler {

struct HeartbeatOptions {
  std::chrono::milliseconds interval{1'000};
  std::chrono::milliseconds timeout{5'000};  // without a sign of life
};

// Says once per interval that a heartbeat is due.
class HeartbeatClock {
 public:
  // The heartbeat's number, from 1, if one is due.
  [[nodiscard]] std::optional<uint64_t> Due(TimePoint now, const HeartbeatOptions& options) {
    if (last_.has_value() && now - *last_ < options.interval) return std::nullopt;
    last_ = now;
    return ++counter_;
  }

 private:
  std::optional<TimePoint> last_;
  uint64_t counter_ = 0;
};

// Whether the other side has been silent for too long.
class HeartbeatWatch {
 public:
  explicit HeartbeatWatch(TimePoint now) : heard_(now) {}
  void OnHeard(TimePoint now) { heard_ = now > heard_ ? now : heard_; }
  [[nodiscard]] bool Lost(TimePoint now, const HeartbeatOptions& options) const {
    return now - heard_ >= options.timeout;
  }
  [[nodiscard]] TimePoint heard() const { return heard_; }
  [[nodiscard]] std::chrono::milliseconds Silence(TimePoint now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - heard_);
  }

 private:
  TimePoint heard_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_HEARTBEAT_H_
