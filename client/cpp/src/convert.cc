#include "client/cpp/src/convert.h"

#include <string>

namespace dmuond::client {
namespace {

// The client's numbers are the contract's, so that a cast converts them.
static_assert(static_cast<int>(ElementType::kFloat32) == v1::ELEMENT_TYPE_FLOAT32);
static_assert(static_cast<int>(ElementType::kBFloat16) == v1::ELEMENT_TYPE_BFLOAT16);
static_assert(static_cast<int>(ElementType::kFloat16) == v1::ELEMENT_TYPE_FLOAT16);
static_assert(static_cast<int>(Route::kMuon) == v1::ROUTE_MUON);
static_assert(static_cast<int>(Route::kAdamW) == v1::ROUTE_ADAMW);
static_assert(static_cast<int>(Route::kTrainer) == v1::ROUTE_TRAINER);
static_assert(static_cast<int>(Contribution::kSum) == v1::CONTRIBUTION_SUM);
static_assert(static_cast<int>(Contribution::kSame) == v1::CONTRIBUTION_SAME);
static_assert(static_cast<int>(Contribution::kNone) == v1::CONTRIBUTION_NONE);
static_assert(static_cast<int>(MatrixView::Kind::kWhole) == v1::MatrixView::KIND_WHOLE);
static_assert(static_cast<int>(MatrixView::Kind::kRowBlocks) == v1::MatrixView::KIND_ROW_BLOCKS);
static_assert(static_cast<int>(MatrixView::Kind::kHeads) == v1::MatrixView::KIND_HEADS);
using Config = v1::GroupConfig;
static_assert(static_cast<int>(GroupConfig::Momentum::kSum) == Config::MOMENTUM_SUM);
static_assert(static_cast<int>(GroupConfig::Momentum::kEma) == Config::MOMENTUM_EMA);
static_assert(static_cast<int>(GroupConfig::Form::kStandard) == Config::FORM_STANDARD);
static_assert(static_cast<int>(GroupConfig::Form::kGram) == Config::FORM_GRAM);
static_assert(static_cast<int>(GroupConfig::Norm::kExact) == Config::NORM_EXACT);
static_assert(static_cast<int>(GroupConfig::Norm::kPlusEps) == Config::NORM_PLUS_EPS);
static_assert(static_cast<int>(GroupConfig::Norm::kClampedEps) == Config::NORM_CLAMPED_EPS);
static_assert(static_cast<int>(GroupConfig::Norm::kSchatten4) == Config::NORM_SCHATTEN4);
static_assert(static_cast<int>(GroupConfig::Scale::kMatchRmsAdamW) ==
              Config::SCALE_MATCH_RMS_ADAMW);
static_assert(static_cast<int>(GroupConfig::Scale::kOriginal) == Config::SCALE_ORIGINAL);
static_assert(static_cast<int>(GroupConfig::Scale::kSpectral) == Config::SCALE_SPECTRAL);
static_assert(static_cast<int>(GroupConfig::Scale::kNone) == Config::SCALE_NONE);
static_assert(static_cast<int>(Outcome::Kind::kPending) == v1::Outcome::KIND_UNSPECIFIED);
static_assert(static_cast<int>(Outcome::Kind::kCommitted) == v1::Outcome::KIND_COMMITTED);
static_assert(static_cast<int>(Outcome::Kind::kSkipped) == v1::Outcome::KIND_SKIPPED);
static_assert(static_cast<int>(Outcome::Kind::kAborted) == v1::Outcome::KIND_ABORTED);
static_assert(static_cast<int>(Outcome::Kind::kRolledBack) == v1::Outcome::KIND_ROLLED_BACK);
static_assert(static_cast<int>(Outcome::Reason::kNonFinite) == v1::Outcome::REASON_NON_FINITE);
static_assert(static_cast<int>(Outcome::Reason::kLayoutChanged) ==
              v1::Outcome::REASON_LAYOUT_CHANGED);

void SetExtents(const Extents& from, google::protobuf::RepeatedField<int64_t>* to) {
  to->Add(from.begin(), from.end());
}

void ToProto(const Parameter& parameter, v1::Parameter& message) {
  message.set_name(parameter.name);
  SetExtents(parameter.shape, message.mutable_shape());
  message.set_weight_type(static_cast<v1::ElementType>(parameter.weight_type));
  message.set_gradient_type(static_cast<v1::ElementType>(parameter.gradient_type));
  message.set_route(static_cast<v1::Route>(parameter.route));
  message.set_route_reason(parameter.route_reason);
  if (parameter.route == Route::kMuon) {
    v1::MatrixView& view = *message.mutable_view();
    view.set_kind(static_cast<v1::MatrixView::Kind>(parameter.view.kind));
    SetExtents(parameter.view.row_blocks, view.mutable_row_blocks());
    view.set_heads(parameter.view.heads);
  }
  message.set_group(parameter.group);
  message.set_reduce_factor(parameter.reduce_factor);
  message.set_ready_order(parameter.ready_order);
  message.set_held_by_all(parameter.held_by_all);
}

void ToProto(const Slice& slice, v1::Slice& message) {
  message.set_arena(slice.arena);
  message.set_offset_bytes(slice.offset_bytes);
  SetExtents(slice.strides, message.mutable_strides());
}

void ToProto(const Fragment& fragment, v1::Fragment& message) {
  message.set_parameter(fragment.parameter);
  SetExtents(fragment.box.begin, message.mutable_box()->mutable_begin());
  SetExtents(fragment.box.end, message.mutable_box()->mutable_end());
  message.set_contribution(static_cast<v1::Contribution>(fragment.contribution));
  ToProto(fragment.gradient, *message.mutable_gradient());
  ToProto(fragment.weight, *message.mutable_weight());
}

void ToProto(const GroupConfig& group, v1::GroupConfig& message) {
  message.set_preset(group.preset);
  if (group.momentum) message.set_momentum(static_cast<Config::Momentum>(*group.momentum));
  if (group.nesterov) message.set_nesterov(*group.nesterov);
  if (group.scale) message.set_scale(static_cast<Config::Scale>(*group.scale));
  if (group.form) message.set_form(static_cast<Config::Form>(*group.form));
  if (group.norm) message.set_norm(static_cast<Config::Norm>(*group.norm));
  if (group.eps) message.set_eps(*group.eps);
  if (group.newton_schulz_type) {
    message.set_newton_schulz_type(static_cast<v1::ElementType>(*group.newton_schulz_type));
  }
  for (const Coefficients& coefficients : group.coefficients) {
    v1::Coefficients& added = *message.add_coefficients();
    added.set_a(coefficients.a);
    added.set_b(coefficients.b);
    added.set_c(coefficients.c);
  }
  for (const int32_t restart : group.restarts) message.add_restarts(restart);
}

}  // namespace

void ToProto(const Layout& layout, v1::RegisterLayoutRequest& request) {
  for (const Parameter& parameter : layout.parameters) {
    ToProto(parameter, *request.add_parameters());
  }
  for (const Fragment& fragment : layout.fragments) ToProto(fragment, *request.add_fragments());
  for (const GroupConfig& group : layout.groups) ToProto(group, *request.add_groups());
  request.set_bucket_bytes(layout.bucket_bytes);
}

void ToProto(const StepScalars& scalars, v1::StepScalars& message) {
  message.clear_groups();  // keeps the old messages for the new ones
  for (const GroupScalars& group : scalars.groups) {
    v1::GroupScalars& added = *message.add_groups();
    added.set_learning_rate(group.learning_rate);
    added.set_weight_decay(group.weight_decay);
    added.set_momentum(group.momentum);
    added.set_beta1(group.beta1);
    added.set_beta2(group.beta2);
    added.set_eps(group.eps);
  }
  message.set_loss_scale(scalars.loss_scale);
  message.set_max_grad_norm(scalars.max_grad_norm);
  message.set_clip_muon(scalars.clip_muon);
}

Registered FromProto(const v1::RegisterLayoutReply& reply) {
  Registered registered;
  for (const v1::RoutingRow& row : reply.routing()) {
    RoutingRow& added = registered.routing.emplace_back();
    added.parameter = row.parameter();
    added.route = static_cast<Route>(row.route());
    added.matrices = row.matrices();
    added.owners.assign(row.owners().begin(), row.owners().end());
    added.why = row.why();
    added.bucket = row.bucket();
  }
  registered.parameter_bucket.assign(reply.parameter_bucket().begin(),
                                     reply.parameter_bucket().end());
  registered.buckets = reply.buckets();
  registered.plan_digest = reply.plan_digest();
  registered.makespan_us = reply.makespan_us();
  registered.lower_bound_us = reply.lower_bound_us();
  registered.imbalance = reply.imbalance();
  return registered;
}

Outcome FromProto(const v1::Outcome& outcome) {
  Outcome out;
  out.kind = static_cast<Outcome::Kind>(outcome.kind());
  out.step = outcome.step();
  out.attempt = outcome.attempt();
  out.reason = static_cast<Outcome::Reason>(outcome.reason());
  out.detail = outcome.detail();
  out.retry = outcome.retry();
  out.next_attempt = outcome.next_attempt();
  if (outcome.has_durable_step()) out.durable_step = outcome.durable_step();
  out.to_step = outcome.to_step();
  out.gradient_norm = outcome.gradient_norm();
  out.clip_coefficient = outcome.clip_coefficient();
  out.matrices = outcome.matrices();
  return out;
}

StepTiming FromProto(const v1::StepTiming& timing) {
  return {timing.collect_us(), timing.decide_us(), timing.update_us(), timing.publish_us(),
          timing.quiet_us(),   timing.sum_us(),    timing.sum_bytes(), timing.norm_us(),
          timing.copy_us(),    timing.copy_bytes()};
}

}  // namespace dmuond::client
