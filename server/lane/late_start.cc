#include "server/lane/late_start.h"

#include <algorithm>

namespace dmuond::server::lane {
namespace {

// A beginning that is too early costs 3 % of the time by which it is, one that is too late all of
// it. So there is time to spare.
constexpr int kTimes = 2;
constexpr std::chrono::milliseconds kMore{3};

}  // namespace

void LateStart::Arm() {
  const bool came = busy_ > Clock::duration::zero() && busy_since_ == Clock::time_point();
  if (came && ready_.size() == buckets_) {
    const Clock::time_point latest = ready_.back() - kTimes * busy_ - kMore;
    first_ = std::upper_bound(ready_.begin(), ready_.end(), latest) - ready_.begin();
  }
  ready_.clear();
  busy_since_ = {};
  busy_ = {};
}

}  // namespace dmuond::server::lane
