// When the parts of an attempt ended, for StepTiming.
#ifndef DMUOND_SERVER_LANE_TIMING_H_
#define DMUOND_SERVER_LANE_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

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

// Of the monotonic clock, which all processes of a machine share; 0: it did not happen.
[[nodiscard]] inline int64_t MonotonicMicroseconds(Clock::time_point moment) {
  return std::chrono::duration_cast<std::chrono::microseconds>(moment.time_since_epoch()).count();
}

inline void FillTrace(const AttemptTimes& times, v1::LaneTrace& trace) {
  trace.set_first_ready_us(MonotonicMicroseconds(times.first_ready));
  trace.set_last_ready_us(MonotonicMicroseconds(times.last_ready));
  trace.set_last_submit_us(MonotonicMicroseconds(times.last_submit));
  trace.set_gathered_us(MonotonicMicroseconds(times.gathered));
  trace.set_decided_us(MonotonicMicroseconds(times.decided));
  trace.set_updated_us(MonotonicMicroseconds(times.updated));
  trace.set_published_us(MonotonicMicroseconds(times.published));
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
