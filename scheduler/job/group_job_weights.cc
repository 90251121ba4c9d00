// What the coordinator hears of weights: whether ranks begin with the same ones, and whether an
// update has made some that are no numbers.
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::CompareFirstWeights(const v1::RankAttached& attached) {
  // A job with state has weights of its own, which every rank gets.
  if (job_->from_snapshot() || job_->steps->has_state() || job_->steps->lost()) {
    job_->first_weights.Clear();
    return {};
  }
  job_->first_weights.Remove(TrainerRank(attached.rank()));
  if (attached.weight_digests().empty()) return {};
  const absl::StatusOr<v1::Registration> wire = RegistrationOf(*job_->wire, attached.rank());
  if (!wire.ok()) return {};
  // Its daemon has checked that there is one for each fragment.
  absl::StatusOr<Registration> registration = FromProto(*wire);
  const auto digests = static_cast<size_t>(attached.weight_digests_size());
  if (!registration.ok() || digests != registration->fragments.size()) return {};
  const std::optional<Message> difference = job_->first_weights.Set(
      *registration, {attached.weight_digests().begin(), attached.weight_digests().end()},
      attached.broadcast());
  if (!difference.has_value()) return {};
  return EndJob(difference->text, "WEIGHTS_DIFFER", difference->metadata);
}

AddressedMessages GroupJob::EndWhereNotFinite(const v1::Vote& vote) {
  // What is not of the open attempt, or of a group that is broken, comes again.
  if (vote.non_finite().empty() || vote.attempt() != job_->steps->Current().attempt.value() ||
      job_->interrupted() || job_->steps->lost()) {
    return {};
  }
  const std::vector<Unit>& units = job_->planned.plan->units;
  std::set<int32_t> parameters;
  const Unit* first = nullptr;
  for (const int32_t id : vote.non_finite()) {
    if (id < 0 || id >= static_cast<int32_t>(units.size())) continue;
    parameters.insert(units[id].parameter);
    if (first == nullptr || units[id].parameter < first->parameter) first = &units[id];
  }
  if (first == nullptr) return {};
  const Parameter& parameter = job_->planned.inputs->layout.parameters[first->parameter];
  const Message why = Say(
      "parameter '", Named("parameter", parameter.name), "'",
      parameters.size() > 1 ? absl::StrCat(" and ", parameters.size() - 1, " more") : "",
      ": after step ", Named("step", job_->steps->last_committed().value()),
      " weights are infinite or NaN, as ", Named("type", Name(parameter.weight_type)),
      ", out of finite gradients (lane ", Named("lane", first->owner.value()),
      "); no snapshot with such weights is kept: start the job again with resume, to go on from "
      "its newest one, with a smaller learning rate, or weights of a type with a larger range");
  return EndJob(why.text, "WEIGHTS_NOT_FINITE", why.metadata);
}

}  // namespace dmuond::scheduler
