#include "server/daemon/process/readiness.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

// A core that has not come through a tick for so long is not live: something holds its lock.
constexpr std::chrono::seconds kTurnMax{10};
// A caller that hangs up is noticed within this time.
constexpr std::chrono::milliseconds kLookAtCaller{250};

bool Reached(v1::GetReadinessRequest::State awaited, const v1::GetReadinessReply& now) {
  switch (awaited) {
    case v1::GetReadinessRequest::STATE_LIVE:
      return now.live();
    case v1::GetReadinessRequest::STATE_READY:
      return now.ready();
    default:
      return true;
  }
}

}  // namespace

void Readiness::Turned() {
  MutexLock lock(mutex_);
  live_until_ = steady_clock::now() + kTurnMax;
  changed_.NotifyAll();
}

void Readiness::SetReady(bool ready, const std::string& why_not) {
  MutexLock lock(mutex_);
  ready_ = ready;
  why_not_ = why_not;
  changed_.NotifyAll();
}

void Readiness::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

v1::GetReadinessReply Readiness::Look() const {
  v1::GetReadinessReply now;
  now.set_live(steady_clock::now() < live_until_);
  now.set_ready(ready_);
  if (!now.live()) {
    now.set_why_not(absl::StrCat("the core has not come through a turn for ", kTurnMax.count(),
                                 " s: something holds its lock"));
  } else if (!ready_) {
    now.set_why_not(why_not_);
  }
  return now;
}

v1::GetReadinessReply Readiness::Now() {
  MutexLock lock(mutex_);
  return Look();
}

v1::GetReadinessReply Readiness::Await(v1::GetReadinessRequest::State awaited,
                                       std::chrono::milliseconds wait,
                                       const std::function<bool()>& cancelled) {
  const auto deadline = steady_clock::now() + wait;
  MutexLock lock(mutex_);
  for (;;) {
    v1::GetReadinessReply now = Look();
    const auto time = steady_clock::now();
    if (stopped_ || Reached(awaited, now) || time >= deadline || cancelled()) return now;
    changed_.WaitUntil(mutex_, std::min(deadline, time + kLookAtCaller));
  }
}

}  // namespace dmuond::server
