#include "server/daemon/state_mutex.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace dmuond::server {

// The compiler's check knows the outer capability, and must not look for the inner one.
#define DMUOND_INNER_LOCK DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis)

StateMutex::StateMutex()
    : woken_max_(std::clamp<size_t>(std::thread::hardware_concurrency() / 2, 1, kWokenMax)) {}

DMUOND_INNER_LOCK void StateMutex::LockInner() {
  inner_.Lock();
  locked_ = std::chrono::steady_clock::now();
}

void StateMutex::CountHeld() {
  const std::chrono::nanoseconds held = std::chrono::steady_clock::now() - locked_;
  ++held_.times;
  held_.total += held;
  held_.longest = std::max(held_.longest, held);
}

DMUOND_INNER_LOCK void StateMutex::UnlockInner() {
  CountHeld();
  inner_.Unlock();
}

DMUOND_INNER_LOCK void StateMutex::Lock() { LockInner(); }

DMUOND_INNER_LOCK void StateMutex::Unlock() {
  const Woken woken = Choose();
  const std::vector<LateWait> ended = std::exchange(ended_, {});
  UnlockInner();
  Wake(woken);
  for (const LateWait& wait : ended) wait.then();
}

DMUOND_INNER_LOCK void StateMutex::WaitUntil(const Condition& condition,
                                             std::chrono::steady_clock::time_point deadline) {
  Place& place = Take(condition);
  Wake(Choose());
  if (const std::vector<LateWait> ended = std::exchange(ended_, {}); !ended.empty()) {
    UnlockInner();
    for (const LateWait& wait : ended) wait.then();
    LockInner();
  }
  CountHeld();
  while (place.state != Place::State::kWoken && place.woken.WaitUntil(inner_, deadline)) {
  }
  locked_ = std::chrono::steady_clock::now();
  Leave(place);
}

StateMutex::LateId StateMutex::WaitLate(LateWait wait) {
  late_.emplace(++last_late_, std::move(wait));
  return last_late_;
}

void StateMutex::EndLate(LateId id) {
  if (auto found = late_.extract(id)) ended_.push_back(std::move(found.mapped()));
}

std::optional<std::chrono::steady_clock::time_point> StateMutex::EndOverdue(
    std::chrono::steady_clock::time_point now) {
  std::optional<std::chrono::steady_clock::time_point> next;
  EndLateIf([&](const LateWait& wait) {
    if (wait.deadline <= now) return true;
    next = next.has_value() ? std::min(*next, wait.deadline) : wait.deadline;
    return false;
  });
  return next;
}

template <typename Predicate>
void StateMutex::EndLateIf(const Predicate& ends) {
  for (auto at = late_.begin(); at != late_.end();) {
    if (!ends(at->second)) {
      ++at;
      continue;
    }
    ended_.push_back(std::move(at->second));
    at = late_.erase(at);
  }
}

StateMutex::Place& StateMutex::Take(const Condition& condition) {
  if (free_.empty()) free_.push_back(&places_.emplace_back());
  Place* place = free_.back();
  free_.pop_back();
  place->condition = &condition;
  place->state = Place::State::kWaiting;
  waiting_.push_back(place);
  return *place;
}

void StateMutex::Leave(Place& place) {
  if (place.state == Place::State::kWoken) --woken_;
  if (place.state == Place::State::kWaiting) std::erase(waiting_, &place);
  if (place.state == Place::State::kHolds) std::erase(hold_, &place);
  place.state = Place::State::kFree;
  free_.push_back(&place);
}

StateMutex::Woken StateMutex::Choose() {
  if (std::exchange(changed_, false)) {
    std::erase_if(waiting_, [this](Place* place) {
      if (!(*place->condition)()) return false;
      place->state = Place::State::kHolds;
      hold_.push_back(place);
      return true;
    });
    EndLateIf([](const LateWait& wait) { return wait.condition(); });
  }
  Woken woken;
  for (; !hold_.empty() && woken_ < woken_max_; ++woken_) {
    hold_.front()->state = Place::State::kWoken;
    woken.places[woken.count++] = &hold_.front()->woken;
    hold_.pop_front();
  }
  return woken;
}

void StateMutex::Wake(const Woken& woken) {
  for (size_t i = 0; i < woken.count; ++i) woken.places[i]->NotifyOne();
}

}  // namespace dmuond::server
