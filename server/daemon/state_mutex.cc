#include "server/daemon/state_mutex.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace dmuond::server {

// The compiler's check knows the outer capability, and must not look for the inner one.
#define DMUOND_INNER_LOCK DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis)

StateMutex::StateMutex()
    : woken_max_(std::clamp<size_t>(std::thread::hardware_concurrency() / 2, 1, kWokenMax)) {}

DMUOND_INNER_LOCK void StateMutex::Lock() { inner_.Lock(); }

DMUOND_INNER_LOCK void StateMutex::Unlock() {
  const Woken woken = Choose();
  inner_.Unlock();
  Wake(woken);
}

DMUOND_INNER_LOCK void StateMutex::WaitUntil(const Condition& condition,
                                             std::chrono::steady_clock::time_point deadline) {
  Place& place = Take(condition);
  Wake(Choose());
  while (place.state != Place::State::kWoken && place.woken.WaitUntil(inner_, deadline)) {
  }
  Leave(place);
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
