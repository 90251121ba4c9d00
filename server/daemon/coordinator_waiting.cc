// What members are told of who keeps the job waiting.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/daemon/coordinator.h"

namespace dmuond::server {

using scheduler::TimePoint;

scheduler::JobLacks Coordinator::Lacks() const {
  scheduler::JobLacks lacks;
  lacks.places = job_->places;
  for (auto& [rank, place] : lacks.places) place.open = job_->open_ranks.contains(rank);
  if (job_->register_deadline.has_value()) {
    lacks.registering_since = *job_->register_deadline - options_.register_timeout;
    for (int32_t rank = 0; rank < job_->world_size; ++rank) {
      if (!job_->registrations.contains(rank)) lacks.unregistered.push_back(rank);
    }
  }
  if (job_->unattached_since.has_value()) {
    lacks.back_since = *job_->unattached_since;
    lacks.back_to = job_->restore_step;
    for (int32_t rank = 0; rank < job_->world_size; ++rank) {
      if (!job_->attached.contains(rank)) lacks.not_back.push_back(rank);
    }
  }
  if (job_->unready_since.has_value()) {
    lacks.preparing_since = *job_->unready_since;
    for (const auto& [node, state] : states_) {
      if (!job_->ready.contains(node)) lacks.preparing.emplace(node, AwaitedBy(node));
    }
  }
  if (job_->steps != nullptr && !job_->steps->lost()) lacks.steps = job_->steps->Lacks();
  return lacks;
}

void Coordinator::TellWaiting(TimePoint now, AddressedMessages& out) {
  std::vector<scheduler::Awaited> awaited;
  if (job_ != nullptr) {
    const scheduler::Patience patience{.registration = options_.register_timeout,
                                       .step = options_.step.step_timeout,
                                       .work = options_.step.work_timeout(),
                                       .replacement = options_.step.session_linger};
    awaited = scheduler::WhoIsAwaited(Lacks(), patience);
  }
  std::optional<std::vector<scheduler::Awaited>> news = waiting_.Update(now, std::move(awaited));
  if (!news.has_value() || job_ == nullptr) return;
  using std::chrono::milliseconds;
  v1::Waiting& waiting = *out.emplace_back().message.mutable_waiting();
  if (job_->steps != nullptr) waiting.set_attempt(job_->steps->Current().attempt.value());
  for (scheduler::Awaited& one : *news) {
    v1::Awaited& told = *waiting.add_awaited();
    told.set_what(std::move(one.what));
    told.set_since_ms(std::chrono::duration_cast<milliseconds>(now - one.since).count());
    // 0 would say that there is no limit.
    const auto left = std::chrono::ceil<milliseconds>(one.until.value_or(now) - now);
    if (one.until.has_value()) told.set_patience_ms(std::max<int64_t>(1, left.count()));
    told.set_otherwise(std::move(one.otherwise));
  }
}

}  // namespace dmuond::server
