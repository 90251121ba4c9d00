// The coordinator's part in checks of all copies.
#include <optional>
#include <string>
#include <utility>

#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::OnCheckRequest(TimePoint now, int32_t from,
                                           const v1::CheckRequest& request) {
  if (job_ != nullptr && job_->check != nullptr) {
    job_->check->OnRequest(now, request);
    return {};
  }
  AddressedMessages out;
  Addressed& answer = out.emplace_back();
  answer.node = from;
  v1::CheckDone& done = *answer.message.mutable_check_done();
  done.add_requests(request.request());
  done.set_reason("CHECK_UNANSWERED");
  done.set_error("the job has not begun, or goes back: ask again when it runs");
  return out;
}

std::string GroupJob::WhyNotCompared() const {
  if (!job_->steps->has_state()) return "no step has been committed: there is nothing to compare";
  if (job_->steps->lost()) return "the job is lost";
  if (job_->parked()) return "the job is parked";
  if (job_->lacks_lanes()) return "the job waits for new lanes or nodes";
  if (job_->goes_back) return "the job goes back to a snapshot";
  if (!leavers_.empty()) return "a node is about to leave";
  return "";
}

// Behind the decisions among the messages: nodes digest what these have made.
void GroupJob::AddChecks(TimePoint now, AddressedMessages& messages) {
  if (job_ == nullptr || job_->check == nullptr) return;
  for (const Addressed& addressed : messages) {
    if (addressed.message.has_decision()) job_->check->OnDecision(addressed.message.decision());
  }
  std::optional<v1::CoordinatorMessage> told =
      job_->check->Advance(now, WhyNotCompared(), job_->steps->pushing());
  if (told.has_value()) messages.emplace_back().message = *std::move(told);
}

}  // namespace dmuond::scheduler
