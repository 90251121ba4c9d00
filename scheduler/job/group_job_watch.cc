// Who keeps a group waiting that forms, or a job that goes back: named, and given up.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/job/group_job.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::GiveUpUnready(TimePoint now) {
  const auto nodes = static_cast<size_t>(options_.nodes);
  const bool prepares = Formed() && job_->ready.size() < nodes &&
                        (job_->phase == Phase::kPreparing || job_->interrupted());
  if (!prepares) {
    job_->unready_since.reset();
    return {};
  }
  Job::Heard heard{.epoch = epoch_, .ready = job_->ready.size()};
  std::vector<std::string> missing;
  for (const auto& [node, state] : states_) {
    if (job_->ready.contains(node)) continue;
    const auto told = job_->progress.find(node);
    const bool current = told != job_->progress.end() && told->second.epoch() == epoch_;
    if (current) heard.done += told->second.done();
    missing.push_back(absl::StrCat("node ", node, " (", AwaitedBy(node), ")"));
  }
  if (!job_->unready_since.has_value() || heard != job_->heard) {
    job_->unready_since = now;
    job_->heard = heard;
  }
  if (now - *job_->unready_since < options_.register_timeout) return {};
  job_->unready_since.reset();
  const Message why = Say("not ready, and nothing got done for ",
                          Named("timeout_ms", options_.register_timeout.count()),
                          " ms: ", Named("missing", absl::StrJoin(missing, ", ")));
  if (job_->interrupted()) {
    // Who is ready after all comes too late.
    const std::string before = std::exchange(job_->interruption, {}).detail;
    if (job_->parks > 0) return LanesLost(now, why.text);  // `before` is what it was parked for
    return LanesLost(now, absl::StrCat(why.text, "; the group formed anew because ", before));
  }
  if (job_->goes_back) return EndJob(why.text, "NODE_NOT_READY");
  return Refuse(Error(absl::StatusCode::kUnavailable, "NODE_NOT_READY", why));
}

std::string GroupJob::AwaitedBy(int32_t node) const {
  const auto told = job_->progress.find(node);
  const bool current = told != job_->progress.end() && told->second.epoch() == epoch_;
  return current ? told->second.awaited() : "nothing heard of it";
}

AddressedMessages GroupJob::ExpelUnattached(TimePoint now) {
  const auto world = static_cast<size_t>(job_->world_size);
  const bool waits = job_->from_snapshot() && !job_->steps->has_state() && !job_->steps->lost() &&
                     !job_->interrupted() && !job_->attached.empty() &&
                     job_->attached.size() < world;
  if (!waits) {
    job_->unattached_since.reset();
    return {};
  }
  if (!job_->unattached_since.has_value() || job_->attached.size() != job_->attached_then) {
    job_->unattached_since = now;
    job_->attached_then = job_->attached.size();
  }
  if (now - *job_->unattached_since < options_.step.step_timeout) return {};
  job_->unattached_since.reset();
  std::vector<int32_t> silent;
  for (const auto& [rank, session] : job_->open_ranks) {
    if (!job_->attached.contains(rank)) silent.push_back(rank);
  }
  std::vector<CoordinatorAction> actions;
  for (const int32_t rank : silent) {
    const std::string detail =
        absl::StrCat("the job goes on from step ", job_->restore.step.value(), ", and of ", world,
                     " ranks these have not come to it within ", options_.step.step_timeout.count(),
                     " ms of the others: ", absl::StrJoin(silent, ", "));
    actions.emplace_back(Expel{TrainerRank(rank), job_->steps->Current().attempt, detail});
  }
  return Broadcast(now, std::move(actions));
}

}  // namespace dmuond::scheduler
