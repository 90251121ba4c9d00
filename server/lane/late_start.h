// When in a step gradients begin to come from other GPUs: as late as they can and still be there
// with the last gradient, going by the step before.
//
// A link between GPUs that carries something takes about 20 W of each of them, and for some 50 ms
// more. A GPU at its limit of power takes them from its products: copies spread over a backward
// pass slow it by 2 to 3 %, however few they are; the same copies at once cost nothing
// (docs/design/lanes.md, "Gradients cross between GPUs all at once").
//
// Threads: one. Nothing allocates after the constructor.
#ifndef DMUOND_SERVER_LANE_LATE_START_H_
#define DMUOND_SERVER_LANE_LATE_START_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "server/lane/timing.h"

namespace dmuond::server::lane {

class LateStart {
 public:
  // buckets: that become ready in a step.
  explicit LateStart(size_t buckets) : buckets_(buckets) { ready_.reserve(buckets); }

  // A step begins. It learns from what it was told since the last call, if all buckets became ready
  // meanwhile and came; else what it knows stays.
  void Arm();
  // Another bucket is ready.
  void OnReady(Clock::time_point now) {
    if (ready_.size() < buckets_) ready_.push_back(now);
  }
  // Gradients come, or are worked on, from a call of OnBusy() to one of OnIdle().
  void OnBusy(Clock::time_point now) { busy_since_ = now; }
  void OnIdle(Clock::time_point now) { busy_ += now - std::exchange(busy_since_, {}); }
  // Whether gradients may begin to come: always in a first step, and once all buckets are ready.
  [[nodiscard]] bool due() const { return ready_.size() >= first_; }

 private:
  const size_t buckets_;
  size_t first_ = 0;                      // due when so many are ready
  std::vector<Clock::time_point> ready_;  // ascending
  Clock::time_point busy_since_;          // none: it is idle
  Clock::duration busy_{};
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_LATE_START_H_
