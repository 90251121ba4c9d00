// When the parts of an attempt ended, for StepTiming.
#ifndef DMUOND_SERVER_LANE_TIMING_H_
#define DMUOND_SERVER_LANE_TIMING_H_

#include <algorithm>
#include <chrono>

#include "dmuond/v1/types.pb.h"

namespace dmuond::server::lane {

using Clock = std::chrono::steady_clock;

struct AttemptTimes {
  Clock::time_point first_ready;
  Clock::time_point last_ready;   // bucket
  Clock::time_point last_submit;  // of a local trainer's host, which may be ahead of its device
  Clock::time_point gathered;
  Clock::time_point decided;
  Clock::time_point updated;
  Clock::time_point published;
};

// How long a part of the device's work took, from its enqueuing to its event, and what it moved.
struct WorkTime {
  double us = 0;
  int64_t bytes = 0;
};

// Microseconds from `a` to `b`; 0 where one of them did not happen.
[[nodiscard]] inline double Microseconds(Clock::time_point a, Clock::time_point b) {
  if (a == Clock::time_point() || b < a) return 0;
  return std::chrono::duration<double, std::micro>(b - a).count();
}

inline void FillTiming(const AttemptTimes& times, v1::StepTiming& timing) {
  timing.set_collect_us(Microseconds(times.first_ready, times.gathered));
  timing.set_decide_us(Microseconds(times.gathered, times.decided));
  timing.set_update_us(Microseconds(times.decided, times.updated));
  timing.set_publish_us(Microseconds(times.updated, times.published));
  timing.set_quiet_us(Microseconds(std::max(times.last_submit, times.last_ready), times.published));
}

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_TIMING_H_
