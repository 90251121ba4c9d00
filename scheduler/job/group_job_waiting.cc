// What members are told of who keeps the job waiting.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

JobLacks GroupJob::Lacks() const {
  JobLacks lacks;
  lacks.places = job_->places;
  for (auto& [rank, place] : lacks.places) place.open = job_->open_ranks.contains(rank);
  if (job_->register_deadline.has_value()) {
    lacks.registering_since = *job_->register_deadline - options_.register_timeout;
    for (int32_t rank = 0; rank < job_->world_size; ++rank) {
      if (!job_->registrations.Contains(rank)) lacks.unregistered.push_back(rank);
    }
  }
  if (job_->unattached_since.has_value()) {
    lacks.back_since = *job_->unattached_since;
    lacks.back_to = job_->restore.step.value();
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
  if (job_->parked()) {
    lacks.parked =
        JobLacks::Parked{job_->interruption.detail, job_->parked_since, job_->tried_again};
    return lacks;
  }
  if (job_->has_steps() && !job_->steps->lost()) lacks.steps = job_->steps->Lacks();
  return lacks;
}

void GroupJob::TellWaiting(TimePoint now, AddressedMessages& out) {
  std::vector<Awaited> awaited;
  if (job_ != nullptr) {
    const Patience patience{.registration = options_.register_timeout,
                            .step = options_.step.step_timeout,
                            .work = options_.step.work_timeout(),
                            .replacement = options_.step.session_linger};
    awaited = WhoIsAwaited(Lacks(), patience);
  }
  std::optional<std::vector<Awaited>> news = waiting_.Update(now, std::move(awaited));
  if (!news.has_value() || job_ == nullptr) return;
  using std::chrono::milliseconds;
  v1::Waiting& waiting = *out.emplace_back().message.mutable_waiting();
  if (job_->has_steps()) waiting.set_attempt(job_->steps->Current().attempt.value());
  for (Awaited& one : *news) {
    v1::Awaited& told = *waiting.add_awaited();
    told.set_what(std::move(one.what));
    told.set_since_ms(std::chrono::duration_cast<milliseconds>(now - one.since).count());
    // 0 would say that there is no limit.
    const auto left = std::chrono::ceil<milliseconds>(one.until.value_or(now) - now);
    if (one.until.has_value()) told.set_patience_ms(std::max<int64_t>(1, left.count()));
    told.set_otherwise(std::move(one.otherwise));
  }
}

}  // namespace dmuond::scheduler
