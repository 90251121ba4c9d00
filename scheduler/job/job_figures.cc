#include "scheduler/job/job_figures.h"

#include <algorithm>

namespace dmuond::scheduler {

void TimeHistogram::Add(double seconds) {
  const auto* bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  ++counts[static_cast<size_t>(bound - kBounds.begin())];
  sum_s += seconds;
}

void JobFigures::OnPublished(int64_t step, const v1::StepTiming& published) {
  timing = published;
  rail_bytes += timing.rail_bytes();
  const std::array<double, kPhases> us = {timing.collect_us(), timing.decide_us(),
                                          timing.update_us(), timing.publish_us(),
                                          timing.quiet_us()};
  StepTimes& times = recent_[published_++ % kRecentSteps];
  times.step = step;
  for (size_t i = 0; i < kPhases; ++i) {
    phases[i].Add(us[i] * 1e-6);
    times.seconds[i] = static_cast<float>(us[i] * 1e-6);
  }
}

void JobFigures::OnOpen(TimePoint now, Attempt attempt) {
  if (opened.has_value() && attempt == open_attempt) return;
  if (!began.has_value()) began = now;
  open_attempt = attempt;
  opened = now;
}

std::vector<JobFigures::StepTimes> JobFigures::RecentSteps() const {
  std::vector<StepTimes> steps;
  const size_t count = std::min(published_, kRecentSteps);
  steps.reserve(count);
  for (size_t i = published_ - count; i < published_; ++i) {
    steps.push_back(recent_[i % kRecentSteps]);
  }
  return steps;
}

}  // namespace dmuond::scheduler
