// What the coordinator hears of weights: whether ranks begin with the same ones.
#include <optional>
#include <string>
#include <vector>

#include "server/convert.h"
#include "server/daemon/coordinator.h"

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

}  // namespace dmuond::server
