// Between messages and the steps' own machine (step_coordinator.h).
#include <iterator>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::OnReports(TimePoint now, int32_t from, const v1::Reports& reports) {
  AddressedMessages out;
  const auto perform = [&](std::vector<CoordinatorAction> actions) {
    if (actions.empty()) return;
    AddressedMessages told = Broadcast(now, std::move(actions));
    std::move(told.begin(), told.end(), std::back_inserter(out));
  };
  // What cannot be read comes from another build, which does not come so far.
  for (const v1::RankSubmitted& submitted : reports.submitted()) {
    const absl::StatusOr<Submission> submission = FromProto(submitted);
    if (!submission.ok()) continue;
    const Attempt open = job_->steps->Current().attempt;
    if (Drops(OfAnotherAttempt(submission->attempt, open), from, "submitted")) continue;
    perform(job_->steps->OnSubmission(now, *submission));
  }
  for (const v1::RailReady& wire : reports.ready()) {
    const absl::StatusOr<RailReady> ready = FromProto(wire);
    if (!ready.ok()) continue;
    const Attempt under_way = job_->steps->UnderWay(ready->operation);
    if (Drops(OfAnotherAttempt(ready->attempt, under_way), from, "ready")) continue;
    perform(job_->steps->OnRailReady(now, NodeRank(from), *ready));
  }
  return out;
}

AddressedMessages GroupJob::OnVote(TimePoint now, const v1::Vote& vote) {
  if (AddressedMessages ended = EndWhereNotFinite(vote); !ended.empty()) return ended;
  std::string error = vote.error();
  absl::StatusOr<std::vector<UnitNorm>> norms = FromProto(vote.norms());
  if (!norms.ok()) {
    error = std::string(norms.status().message());
    norms.emplace();
  }
  return Broadcast(now, job_->steps->OnVote(now, Attempt(vote.attempt()), NodeRank(vote.node()),
                                            vote.plan_digest(), *std::move(norms), error));
}

AddressedMessages GroupJob::Broadcast(TimePoint now, std::vector<CoordinatorAction> actions) {
  AddressedMessages out;
  for (CoordinatorAction& action : actions) {
    if (auto* go = std::get_if<Go>(&action)) {
      job_->goes->Add(now, job_->steps->Current().gather, std::move(*go));
      continue;
    }
    Addressed& addressed = out.emplace_back();
    if (const auto* open = std::get_if<OpenAttempt>(&action)) {
      *addressed.message.mutable_open() = ToProto(*open);
    } else if (const auto* begun = std::get_if<Begun>(&action)) {
      addressed.node = begun->node.value();
      *addressed.message.mutable_submitted() = ToProto(begun->submission);
    } else if (const auto* expel = std::get_if<Expel>(&action)) {
      addressed.message.mutable_expel()->set_rank(expel->rank.value());
      addressed.message.mutable_expel()->set_attempt(expel->attempt.value());
      addressed.message.mutable_expel()->set_detail(expel->detail);
    } else if (const auto* overdue = std::get_if<GatherOverdue>(&action)) {
      addressed.node = overdue->node.value();
      addressed.message.mutable_gather_overdue()->set_attempt(overdue->attempt.value());
      addressed.message.mutable_gather_overdue()->set_detail(overdue->detail);
    } else if (const auto* republish = std::get_if<Republish>(&action)) {
      addressed.message.mutable_republish()->set_attempt(republish->attempt.value());
      addressed.message.mutable_republish()->set_step(republish->step.value());
    } else {
      *addressed.message.mutable_decision() = ToProto(std::get<Decision>(action));
    }
  }
  return out;
}

}  // namespace dmuond::scheduler
