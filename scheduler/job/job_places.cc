#include "scheduler/job/job_places.h"

#include <utility>

namespace dmuond::scheduler {

void JobPlaces::Look(const std::vector<std::string>& running) {
  for (size_t i = 0; i < last_.size(); ++i) {
    Last& last = last_[i];
    if (!running[i].empty() && running[i] != last.job) last = {.job = running[i]};
    if (!running[i].empty()) {
      last.has_begun = true;
    } else if (last.has_begun) {
      last.has_ended = true;
    }
  }
}

bool JobPlaces::IsFree(TimePoint now, size_t place, const std::vector<std::string>& running) const {
  const Last& last = last_[place];
  return running[place].empty() &&
         (last.job.empty() || last.has_ended || now >= last.asked + kept_);
}

std::optional<int32_t> JobPlaces::Find(TimePoint now, const std::string& job,
                                       const std::vector<std::string>& running) {
  Look(running);
  std::optional<size_t> found;
  for (size_t i = 0; i < last_.size(); ++i) {
    if (last_[i].job == job && (running[i] == job || running[i].empty())) found = i;
    if (running[i] == job) break;
  }
  // One that nobody had comes first, and then the one that was asked for longest ago.
  const auto order = [this](size_t i) { return std::pair(!last_[i].job.empty(), last_[i].asked); };
  const bool is_known = found.has_value();
  for (size_t i = 0; i < last_.size() && !is_known; ++i) {
    if (!IsFree(now, i, running)) continue;
    if (!found.has_value() || order(i) < order(*found)) found = i;
  }
  if (!found.has_value()) return std::nullopt;
  Last& given = last_[*found];
  const bool runs = !running[*found].empty();
  given = {.job = job, .asked = now, .has_begun = runs, .has_ended = false};
  return static_cast<int32_t>(*found);
}

std::vector<std::string> JobPlaces::holders() const {
  std::vector<std::string> holders;
  holders.reserve(last_.size());
  for (const Last& last : last_) holders.push_back(last.job);
  return holders;
}

}  // namespace dmuond::scheduler
