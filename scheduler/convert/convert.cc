// Steps: submissions, votes and decisions. convert_layout.cc has the layout.
#include "scheduler/convert/convert.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dmuond {
namespace {

absl::Status UnknownValue(const char* field, int value) {
  return absl::InvalidArgumentError(absl::StrCat(field, " has the unknown value ", value));
}

template <typename Repeated>
std::vector<int32_t> Ascending(const Repeated& values) {
  std::vector<int32_t> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

}  // namespace

scheduler::StepScalars FromProto(const v1::StepScalars& scalars) {
  scheduler::StepScalars out;
  out.groups.reserve(scalars.groups_size());
  for (const v1::GroupScalars& group : scalars.groups()) {
    out.groups.push_back({.learning_rate = group.learning_rate(),
                          .weight_decay = group.weight_decay(),
                          .momentum = group.momentum(),
                          .beta1 = group.beta1(),
                          .beta2 = group.beta2(),
                          .eps = group.eps()});
  }
  // An unset loss scale means 1; -0.0 too would divide by zero.
  out.loss_scale = scalars.loss_scale() == 0 ? 1 : scalars.loss_scale();
  out.max_grad_norm = scalars.max_grad_norm();
  out.clip_muon = scalars.clip_muon();
  return out;
}

v1::StepScalars ToProto(const scheduler::StepScalars& scalars) {
  v1::StepScalars out;
  for (const scheduler::GroupScalars& group : scalars.groups) {
    v1::GroupScalars& to = *out.add_groups();
    to.set_learning_rate(group.learning_rate);
    to.set_weight_decay(group.weight_decay);
    to.set_momentum(group.momentum);
    to.set_beta1(group.beta1);
    to.set_beta2(group.beta2);
    to.set_eps(group.eps);
  }
  out.set_loss_scale(scalars.loss_scale);
  out.set_max_grad_norm(scalars.max_grad_norm);
  out.set_clip_muon(scalars.clip_muon);
  return out;
}

absl::StatusOr<scheduler::AttemptKind> FromProto(v1::AttemptKind kind) {
  switch (kind) {
    case v1::ATTEMPT_KIND_STEP:
      return scheduler::AttemptKind::kStep;
    case v1::ATTEMPT_KIND_PUSH:
      return scheduler::AttemptKind::kPush;
    case v1::ATTEMPT_KIND_LOAD:
      return scheduler::AttemptKind::kLoad;
    default:
      return UnknownValue("AttemptKind", kind);
  }
}
v1::AttemptKind ToProto(scheduler::AttemptKind kind) {
  return static_cast<v1::AttemptKind>(kind);  // declared with the same numbers
}
static_assert(static_cast<int>(scheduler::AttemptKind::kStep) == v1::ATTEMPT_KIND_STEP);
static_assert(static_cast<int>(scheduler::AttemptKind::kPush) == v1::ATTEMPT_KIND_PUSH);
static_assert(static_cast<int>(scheduler::AttemptKind::kLoad) == v1::ATTEMPT_KIND_LOAD);

absl::StatusOr<scheduler::RailOperation> FromProto(v1::RailOperation operation) {
  switch (operation) {
    case v1::RAIL_OPERATION_COLLECT:
      return scheduler::RailOperation::kCollect;
    case v1::RAIL_OPERATION_PUBLISH:
      return scheduler::RailOperation::kPublish;
    default:
      return UnknownValue("RailOperation", operation);
  }
}
v1::RailOperation ToProto(scheduler::RailOperation operation) {
  return static_cast<v1::RailOperation>(operation);
}
static_assert(static_cast<int>(scheduler::RailOperation::kCollect) == v1::RAIL_OPERATION_COLLECT);
static_assert(static_cast<int>(scheduler::RailOperation::kPublish) == v1::RAIL_OPERATION_PUBLISH);

scheduler::AbsentFragment FromProto(const v1::AbsentFragment& absent) {
  return {scheduler::TrainerRank(absent.rank()), absent.parameter()};
}
v1::AbsentFragment ToProto(const scheduler::AbsentFragment& absent) {
  v1::AbsentFragment out;
  out.set_rank(absent.rank.value());
  out.set_parameter(absent.parameter);
  return out;
}

absl::StatusOr<scheduler::Submission> FromProto(const v1::RankSubmitted& submitted) {
  absl::StatusOr<scheduler::AttemptKind> kind = FromProto(submitted.kind());
  if (!kind.ok()) return kind.status();
  scheduler::Submission out;
  out.rank = scheduler::TrainerRank(submitted.rank());
  out.attempt = scheduler::Attempt(submitted.attempt());
  out.step = scheduler::StepId(submitted.step());
  out.kind = *kind;
  out.scalars = FromProto(submitted.scalars());
  out.absent = Ascending(submitted.absent());
  out.pushed = Ascending(submitted.pushed());
  out.withdraw = submitted.withdraw();
  if (submitted.has_not_finite()) out.not_finite = submitted.not_finite();
  return out;
}

v1::RankSubmitted ToProto(const scheduler::Submission& submission) {
  v1::RankSubmitted out;
  out.set_rank(submission.rank.value());
  out.set_attempt(submission.attempt.value());
  out.set_step(submission.step.value());
  out.set_kind(ToProto(submission.kind));
  *out.mutable_scalars() = ToProto(submission.scalars);
  for (int32_t parameter : submission.absent) out.add_absent(parameter);
  for (int32_t parameter : submission.pushed) out.add_pushed(parameter);
  out.set_withdraw(submission.withdraw);
  if (submission.not_finite.has_value()) out.set_not_finite(*submission.not_finite);
  return out;
}

scheduler::SnapshotId FromProto(const v1::SnapshotId& id) {
  return {scheduler::Attempt(id.attempt()), scheduler::StepId(id.step())};
}

v1::SnapshotId ToProto(const scheduler::SnapshotId& id) {
  v1::SnapshotId message;
  message.set_attempt(id.attempt.value());
  message.set_step(id.step.value());
  return message;
}

scheduler::OpenAttempt FromProto(const v1::OpenAttempt& open) {
  const int64_t gather_us = std::clamp<int64_t>(open.gather_us(), 0, scheduler::kGatherMax.count());
  return {scheduler::Attempt(open.attempt()), scheduler::StepId(open.step()),
          std::chrono::microseconds(gather_us)};
}
v1::OpenAttempt ToProto(const scheduler::OpenAttempt& open) {
  v1::OpenAttempt out;
  out.set_attempt(open.attempt.value());
  out.set_step(open.step.value());
  out.set_gather_us(open.gather.count());
  return out;
}

namespace {

using Runs = google::protobuf::RepeatedField<uint32_t>;

absl::StatusOr<scheduler::BucketRuns> RunsOf(const Runs& wire) {
  constexpr auto kMax = static_cast<uint32_t>(scheduler::kBucketsMax);
  if (wire.size() % 2 != 0 || wire.size() > 2 * scheduler::kBucketsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("buckets: ", wire.size(), " numbers are no runs of at most ", kMax));
  }
  scheduler::BucketRuns runs;
  runs.reserve(static_cast<size_t>(wire.size() / 2));
  for (int i = 0; i < wire.size(); i += 2) {
    if (wire[i] >= kMax || wire[i + 1] > kMax - wire[i]) {
      return absl::InvalidArgumentError(absl::StrCat("buckets: ", wire[i + 1], " from ", wire[i],
                                                     " on; a plan has at most ", kMax));
    }
    runs.push_back(
        {scheduler::BucketId(static_cast<int32_t>(wire[i])), static_cast<int32_t>(wire[i + 1])});
  }
  return runs;
}

void AddRuns(const scheduler::BucketRuns& runs, Runs& wire) {
  wire.Reserve(wire.size() + 2 * static_cast<int>(runs.size()));
  for (const scheduler::BucketRun& run : runs) {
    wire.Add(static_cast<uint32_t>(run.first.value()));
    wire.Add(static_cast<uint32_t>(run.count));
  }
}

}  // namespace

absl::StatusOr<scheduler::RailReady> FromProto(const v1::RailReady& ready) {
  absl::StatusOr<scheduler::RailOperation> operation = FromProto(ready.operation());
  if (!operation.ok()) return operation.status();
  absl::StatusOr<scheduler::BucketRuns> buckets = RunsOf(ready.buckets());
  if (!buckets.ok()) return buckets.status();
  scheduler::RailReady out;
  out.attempt = scheduler::Attempt(ready.attempt());
  out.rail = scheduler::LaneIndex(ready.rail());
  out.operation = *operation;
  if (ready.kind() == v1::ATTEMPT_KIND_PUSH) out.kind = scheduler::AttemptKind::kPush;
  out.buckets = *std::move(buckets);
  return out;
}
void ToProto(const scheduler::RailReady& ready, v1::RailReady& out) {
  out.set_attempt(ready.attempt.value());
  out.set_rail(ready.rail.value());
  out.set_operation(ToProto(ready.operation));
  out.set_kind(ToProto(ready.kind));
  out.clear_buckets();
  AddRuns(ready.buckets, *out.mutable_buckets());
}

absl::StatusOr<scheduler::Go> FromProto(const v1::Go& go) {
  absl::StatusOr<scheduler::RailOperation> operation = FromProto(go.operation());
  if (!operation.ok()) return operation.status();
  absl::StatusOr<scheduler::BucketRuns> buckets = RunsOf(go.buckets());
  if (!buckets.ok()) return buckets.status();
  scheduler::Go out;
  out.attempt = scheduler::Attempt(go.attempt());
  out.rail = scheduler::LaneIndex(go.rail());
  out.operation = *operation;
  if (go.kind() == v1::ATTEMPT_KIND_PUSH) out.kind = scheduler::AttemptKind::kPush;
  out.buckets = *std::move(buckets);
  return out;
}
v1::Go ToProto(const scheduler::Go& go) {
  v1::Go out;
  out.set_attempt(go.attempt.value());
  out.set_rail(go.rail.value());
  out.set_operation(ToProto(go.operation));
  out.set_kind(ToProto(go.kind));
  AddRuns(go.buckets, *out.mutable_buckets());
  return out;
}

absl::StatusOr<std::vector<scheduler::UnitNorm>> FromProto(const v1::UnitNorms& norms) {
  const int units = norms.unit_size();
  if (norms.first_block_size() != units || norms.first_element_size() != units ||
      norms.sum_count_size() != units) {
    return absl::InvalidArgumentError("UnitNorms has fields of different lengths");
  }
  std::vector<scheduler::UnitNorm> out;
  out.reserve(units);
  auto sum = norms.sums().begin();
  for (int i = 0; i < units; ++i) {
    const int32_t count = norms.sum_count(i);
    if (count < 0 || count > norms.sums().end() - sum) {
      return absl::InvalidArgumentError("UnitNorms.sum_count is not what sums there are");
    }
    out.push_back({.unit = scheduler::UnitId(norms.unit(i)),
                   .first_block = norms.first_block(i),
                   .sums = {sum, sum + count},
                   .first_element = norms.first_element(i)});
    sum += count;
  }
  if (sum != norms.sums().end()) {
    return absl::InvalidArgumentError("UnitNorms has sums of no unit");
  }
  return out;
}
v1::UnitNorms ToProto(const std::vector<scheduler::UnitNorm>& norms) {
  v1::UnitNorms out;
  const int units = static_cast<int>(norms.size());
  out.mutable_unit()->Reserve(units);
  out.mutable_first_block()->Reserve(units);
  out.mutable_first_element()->Reserve(units);
  out.mutable_sum_count()->Reserve(units);
  out.mutable_sums()->Reserve(units);
  for (const scheduler::UnitNorm& norm : norms) {
    out.add_unit(norm.unit.value());
    out.add_first_block(norm.first_block);
    out.add_first_element(norm.first_element);
    out.add_sum_count(static_cast<int32_t>(norm.sums.size()));
    out.mutable_sums()->Add(norm.sums.begin(), norm.sums.end());
  }
  return out;
}

absl::StatusOr<scheduler::Outcome> FromProto(const v1::Outcome& outcome) {
  if (outcome.kind() < v1::Outcome::KIND_COMMITTED ||
      outcome.kind() > v1::Outcome::KIND_ROLLED_BACK) {
    return UnknownValue("Outcome.kind", outcome.kind());
  }
  if (!v1::Outcome::Reason_IsValid(outcome.reason())) {
    return UnknownValue("Outcome.reason", outcome.reason());
  }
  scheduler::Outcome out;
  out.kind = static_cast<scheduler::OutcomeKind>(outcome.kind());
  out.step = scheduler::StepId(outcome.step());
  out.attempt = scheduler::Attempt(outcome.attempt());
  out.reason = static_cast<scheduler::OutcomeReason>(outcome.reason());
  out.detail = outcome.detail();
  out.retry = outcome.retry();
  out.next_attempt = scheduler::Attempt(outcome.next_attempt());
  if (outcome.has_durable_step()) out.durable_step = scheduler::StepId(outcome.durable_step());
  out.to_step = scheduler::StepId(outcome.to_step());
  out.epoch = scheduler::GroupEpoch(outcome.epoch());
  out.gradient_norm = outcome.gradient_norm();
  out.clip_coefficient = outcome.clip_coefficient();
  out.matrices = outcome.matrices();
  return out;
}
static_assert(static_cast<int>(scheduler::OutcomeKind::kCommitted) == v1::Outcome::KIND_COMMITTED);
static_assert(static_cast<int>(scheduler::OutcomeKind::kRolledBack) ==
              v1::Outcome::KIND_ROLLED_BACK);
static_assert(static_cast<int>(scheduler::OutcomeReason::kNonFinite) ==
              v1::Outcome::REASON_NON_FINITE);
static_assert(static_cast<int>(scheduler::OutcomeReason::kLayoutChanged) ==
              v1::Outcome::REASON_LAYOUT_CHANGED);

v1::Outcome ToProto(const scheduler::Outcome& outcome) {
  v1::Outcome out;
  out.set_kind(static_cast<v1::Outcome::Kind>(outcome.kind));
  out.set_step(outcome.step.value());
  out.set_attempt(outcome.attempt.value());
  out.set_reason(static_cast<v1::Outcome::Reason>(outcome.reason));
  out.set_detail(outcome.detail);
  out.set_retry(outcome.retry);
  out.set_next_attempt(outcome.next_attempt.value());
  if (outcome.durable_step.has_value()) out.set_durable_step(outcome.durable_step->value());
  out.set_to_step(outcome.to_step.value());
  out.set_epoch(outcome.epoch.value());
  out.set_gradient_norm(outcome.gradient_norm);
  out.set_clip_coefficient(outcome.clip_coefficient);
  out.set_matrices(outcome.matrices);
  return out;
}

absl::StatusOr<scheduler::Decision> FromProto(const v1::Decision& decision) {
  if (decision.verdict() < v1::Decision::VERDICT_COMMIT ||
      decision.verdict() > v1::Decision::VERDICT_REFUSE) {
    return UnknownValue("Decision.verdict", decision.verdict());
  }
  absl::StatusOr<scheduler::AttemptKind> kind = FromProto(decision.kind());
  if (!kind.ok()) return kind.status();
  scheduler::Decision out;
  out.attempt = scheduler::Attempt(decision.attempt());
  out.step = scheduler::StepId(decision.step());
  out.kind = *kind;
  out.verdict = static_cast<scheduler::Verdict>(decision.verdict());
  if (!decision.has_outcome()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Decision.outcome is missing, attempt ", decision.attempt()));
  }
  absl::StatusOr<scheduler::Outcome> outcome = FromProto(decision.outcome());
  if (!outcome.ok()) return outcome.status();
  out.outcome = *std::move(outcome);
  out.scalars = FromProto(decision.scalars());
  out.clip_coefficient = decision.clip_coefficient();
  for (const v1::AbsentFragment& absent : decision.absent()) {
    out.absent.push_back(FromProto(absent));
  }
  out.pushed = Ascending(decision.pushed());
  out.lost = decision.lost();
  out.refuse_reason = decision.reason();
  out.refuse_message = decision.message();
  out.refuse_metadata = {decision.metadata().begin(), decision.metadata().end()};
  return out;
}
static_assert(static_cast<int>(scheduler::Verdict::kCommit) == v1::Decision::VERDICT_COMMIT);
static_assert(static_cast<int>(scheduler::Verdict::kRefuse) == v1::Decision::VERDICT_REFUSE);

v1::Decision ToProto(const scheduler::Decision& decision) {
  v1::Decision out;
  out.set_attempt(decision.attempt.value());
  out.set_step(decision.step.value());
  out.set_kind(ToProto(decision.kind));
  out.set_verdict(static_cast<v1::Decision::Verdict>(decision.verdict));
  // A refusal has an outcome, too, for members: its next_attempt.
  *out.mutable_outcome() = ToProto(decision.outcome);
  *out.mutable_scalars() = ToProto(decision.scalars);
  out.set_gradient_norm(decision.outcome.gradient_norm);
  out.set_clip_coefficient(decision.clip_coefficient);
  for (const scheduler::AbsentFragment& absent : decision.absent) {
    *out.add_absent() = ToProto(absent);
  }
  for (int32_t parameter : decision.pushed) out.add_pushed(parameter);
  out.set_lost(decision.lost);
  out.set_reason(decision.refuse_reason);
  out.set_message(decision.refuse_message);
  for (const auto& [name, value] : decision.refuse_metadata) {
    (*out.mutable_metadata())[name] = value;
  }
  return out;
}

scheduler::MemberInfo FromProto(const v1::JoinRequest& join) {
  scheduler::MemberInfo info;
  info.node = scheduler::NodeRank(join.node());
  info.nodes = join.nodes();
  info.lanes = join.lanes();
  info.version = join.version();
  info.protocol_min = join.protocol_min();
  info.protocol_max = join.protocol_max();
  info.device_type = join.device_type();
  info.devices = {join.devices().begin(), join.devices().end()};
  info.bits = {join.bits().code(), join.bits().library(), join.bits().core_type(),
               join.bits().functions()};
  info.peer_address = join.peer_address();
  info.epoch = scheduler::GroupEpoch(join.epoch());
  info.boot_id = join.boot_id();
  info.lane_memory_bytes = join.lane_memory_bytes();
  info.jobs_max = join.jobs_max();
  return info;
}

}  // namespace dmuond
