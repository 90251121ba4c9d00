#include "scheduler/job/job_places.h"

#include <utility>

namespace dmuond::scheduler {

void JobPlaces::Look(const std::vector<Running>& running) {
  for (size_t i = 0; i < last_.size(); ++i) {
    Last& last = last_[i];
    const auto& [job, begun] = running[i];
    if (!job.empty() && job != last.job) last = {.job = job, .begun = begun};
    // One that began and ended between two looks was never seen.
    if (!job.empty() || begun > last.begun) last.has_begun = true;
    if (job.empty() && last.has_begun) last.has_ended = true;
  }
}

bool JobPlaces::IsFree(TimePoint now, size_t place, const std::vector<Running>& running) const {
  const Last& last = last_[place];
  return running[place].job.empty() &&
         (last.job.empty() || last.has_ended || now >= last.asked + kept_);
}

std::optional<int32_t> JobPlaces::Find(TimePoint now, const std::string& job,
                                       const std::vector<Running>& running) {
  Look(running);
  std::optional<size_t> found;
  for (size_t i = 0; i < last_.size(); ++i) {
    const std::string& runs = running[i].job;
    if (last_[i].job == job && (runs == job || runs.empty())) found = i;
    if (runs == job) break;
  }
  // One that nobody had comes first, and then the one that was asked for longest ago.
  const auto order = [this](size_t i) { return std::pair(!last_[i].job.empty(), last_[i].asked); };
  const bool is_known = found.has_value();
  for (size_t i = 0; i < last_.size() && !is_known; ++i) {
    if (!IsFree(now, i, running)) continue;
    if (!found.has_value() || order(i) < order(*found)) found = i;
  }
  if (!found.has_value()) return std::nullopt;
  const Running& there = running[*found];
  last_[*found] = {.job = job, .asked = now, .begun = there.begun, .has_begun = !there.job.empty()};
  return static_cast<int32_t>(*found);
}

bool JobPlaces::Awaits(TimePoint now, const std::string& job) const {
  return std::any_of(last_.begin(), last_.end(), [&](const Last& last) {
    return last.job == job && !last.has_begun && now < last.asked + kept_;
  });
}

std::vector<std::string> JobPlaces::holders() const {
  std::vector<std::string> holders;
  holders.reserve(last_.size());
  for (const Last& last : last_) holders.push_back(last.job);
  return holders;
}

}  // namespace dmuond::scheduler
