// What the coordinator hears of weights: whether ranks begin with the same ones, and whether an
// update has made some that are no numbers.
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/convert.h"
#include "server/daemon/coordinator.h"
#include "server/daemon/errors.h"

namespace dmuond::server {

AddressedMessages Coordinator::CompareFirstWeights(const v1::RankAttached& attached) {
  // A job with state has weights of its own, which every rank gets.
  if (job_->restore_step > 0 || job_->steps->has_state() || job_->steps->lost()) {
    job_->first_weights.Clear();
    return {};
  }
  job_->first_weights.Remove(scheduler::TrainerRank(attached.rank()));
  const auto& registrations = job_->wire.registrations();
  if (attached.weight_digests().empty() || attached.rank() < 0 ||
      attached.rank() >= registrations.size()) {
    return {};
  }
  // Its daemon has checked that there is one for each fragment.
  absl::StatusOr<scheduler::Registration> registration =
      FromProto(registrations.Get(attached.rank()));
  const auto digests = static_cast<size_t>(attached.weight_digests_size());
  if (!registration.ok() || digests != registration->fragments.size()) return {};
  const std::optional<scheduler::Message> difference = job_->first_weights.Set(
      *registration, {attached.weight_digests().begin(), attached.weight_digests().end()},
      attached.broadcast());
  if (!difference.has_value()) return {};
  return EndJob(difference->text, "WEIGHTS_DIFFER", difference->metadata);
}

AddressedMessages Coordinator::EndWhereNotFinite(const v1::Vote& vote) {
  // What is not of the open attempt, or of a group that is broken, comes again.
  if (vote.non_finite().empty() || vote.attempt() != job_->steps->Current().attempt.value() ||
      job_->interruption.has_value() || job_->steps->lost()) {
    return {};
  }
  const std::vector<scheduler::Unit>& units = job_->plan->units;
  std::set<int32_t> parameters;
  const scheduler::Unit* first = nullptr;
  for (const int32_t id : vote.non_finite()) {
    if (id < 0 || id >= static_cast<int32_t>(units.size())) continue;
    parameters.insert(units[id].parameter);
    if (first == nullptr || units[id].parameter < first->parameter) first = &units[id];
  }
  if (first == nullptr) return {};
  const scheduler::Parameter& parameter = job_->inputs->layout.parameters[first->parameter];
  const scheduler::Message why = Say(
      "parameter '", Named("parameter", parameter.name), "'",
      parameters.size() > 1 ? absl::StrCat(" and ", parameters.size() - 1, " more") : "",
      ": after step ", Named("step", job_->steps->last_committed().value()),
      " weights are infinite or NaN, as ", Named("type", Name(parameter.weight_type)),
      ", out of finite gradients (lane ", Named("lane", first->owner.value()),
      "); no snapshot with such weights is kept: start the job again with resume, to go on from "
      "its newest one, with a smaller learning rate, or weights of a type with a larger range");
  return EndJob(why.text, "WEIGHTS_NOT_FINITE", why.metadata);
}

}  // namespace dmuond::server
