#include "scheduler/convert/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "google/protobuf/util/message_differencer.h"
#include "kernels/newton_schulz.h"
#include "kernels/presets.h"
#include "scheduler/convert/difference.h"
#include "tests/scheduler/layouts.h"

namespace dmuond {
namespace {

using google::protobuf::util::MessageDifferencer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

v1::PlanInputs TwoTrainers() {
  scheduler::testing::World world(2, 1, 1);
  scheduler::Parameter w = scheduler::testing::Muon("w", {8, 4});
  w.weight_type = scheduler::ElementType::kBF16;
  w.view.kind = scheduler::MatrixView::Kind::kHeads;
  w.view.heads = 2;
  w.reduce_factor = 0.5;
  scheduler::Parameter b = scheduler::testing::AdamW("b", {3});
  b.held_by_all = true;
  world.ShardRows(w).Hold(0, b, {{0}, {3}}).Hold(1, b, {{0}, {3}}, scheduler::Contribution::kNone);
  v1::PlanInputs inputs;
  inputs.set_nodes(1);
  inputs.set_lanes_per_node(1);
  for (const scheduler::Registration& registration : world.registrations) {
    v1::Registration& to = *inputs.add_registrations();
    to = ToProto(registration);
    to.set_world_size(2);
    to.add_groups()->set_preset("keller");
  }
  return inputs;
}

TEST(ConvertTest, RegistrationsComeBackAsTheyWere) {
  const v1::PlanInputs inputs = TwoTrainers();
  for (const v1::Registration& registration : inputs.registrations()) {
    auto value = FromProto(registration);
    ASSERT_TRUE(value.ok()) << value.status();
    v1::Registration again = ToProto(*value);
    again.set_world_size(2);
    *again.mutable_groups() = registration.groups();
    EXPECT_TRUE(MessageDifferencer::Equals(registration, again)) << again.DebugString();
  }
}

TEST(ConvertTest, PlanInputsAreMerged) {
  v1::PlanInputs message = TwoTrainers();
  message.set_lane_memory_bytes(1 << 30);
  message.mutable_costs()->set_tflops(12);
  auto inputs = FromProto(message);
  ASSERT_TRUE(inputs.ok()) << inputs.status();
  EXPECT_EQ(inputs->layout.parameters.size(), 2);
  EXPECT_EQ(inputs->layout.fragments.size(), 4);
  EXPECT_EQ(inputs->lane_memory_bytes, 1 << 30);
  EXPECT_EQ(inputs->bucket_bytes, int64_t{32} << 20);
  EXPECT_EQ(inputs->costs.tflops, 12);
  EXPECT_EQ(inputs->costs.launch_us, scheduler::CostTable().launch_us);
}

TEST(ConvertTest, CostsAreOfTheGroupsOwnNewtonSchulz) {
  v1::PlanInputs message = TwoTrainers();
  for (v1::Registration& registration : *message.mutable_registrations()) {
    registration.add_groups();
    v1::GroupConfig& group = *registration.add_groups();
    group.set_preset("torch");
    for (int step = 0; step < 3; ++step) group.add_coefficients()->set_a(1);
  }
  auto inputs = FromProto(message);
  ASSERT_TRUE(inputs.ok()) << inputs.status();
  EXPECT_THAT(inputs->iterations, ElementsAre(scheduler::Iteration{5, 5}, scheduler::Iteration{},
                                              scheduler::Iteration{3, 3}));
}

TEST(ConvertTest, ThePlannersFlopsAreThoseOfTheProductsThatRun) {
  constexpr int64_t kRows = 96;
  constexpr int64_t kCols = 64;
  const auto flops = [](const kernels::NewtonSchulzProgram& program) {
    const auto p = static_cast<double>(program.p);
    const auto q = static_cast<double>(program.q);
    double sum = 0;
    for (const kernels::Product& product : program.products) {
      sum += product.kind == kernels::ProductKind::kSymmetric ? p * p * p
             : product.kind == kernels::ProductKind::kGram    ? p * p * q
                                                              : 2 * p * p * q;
    }
    return sum;
  };
  for (const char* preset : kernels::kPresetNames) {
    for (const std::vector<int32_t>& restarts :
         std::vector<std::vector<int32_t>>{{}, {2}, {1, 3, 4}}) {
      v1::GroupConfig group;
      group.set_preset(preset);
      kernels::NewtonSchulzConfig config = FromProto(group)->newton_schulz;
      if (!restarts.empty()) config.restarts.assign(restarts.begin(), restarts.end());
      EXPECT_EQ(flops(*kernels::BuildNewtonSchulz(config, kRows, kCols)),
                scheduler::NewtonSchulzFlops({kRows, kCols, IterationOf(config)}))
          << preset << ", " << restarts.size() << " restarts";
    }
  }
}

TEST(ConvertTest, UnknownEnumValuesNameFieldAndParameter) {
  const auto expect = [](void (*spoil)(v1::Registration&), const char* field) {
    v1::PlanInputs inputs = TwoTrainers();
    spoil(*inputs.mutable_registrations(1));
    auto value = FromProto(inputs);
    ASSERT_EQ(value.status().code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(Message(value.status()), HasSubstr("trainer 1"));
    EXPECT_THAT(Message(value.status()), HasSubstr("\"w\""));
    EXPECT_THAT(Message(value.status()), HasSubstr(field));
  };
  expect([](auto& r) { r.mutable_parameters(0)->set_route(v1::Route(9)); }, "route");
  expect([](auto& r) { r.mutable_parameters(0)->set_weight_type(v1::ElementType(0)); },
         "weight_type");
  expect([](auto& r) { r.mutable_parameters(0)->set_gradient_type(v1::ElementType(7)); },
         "gradient_type");
  expect([](auto& r) { r.mutable_fragments(0)->set_contribution(v1::Contribution(0)); },
         "contribution");
  expect(
      [](auto& r) { r.mutable_parameters(0)->mutable_view()->set_kind(v1::MatrixView::Kind(4)); },
      "view.kind");
  expect([](auto& r) { r.mutable_fragments(0)->mutable_box()->add_begin(1); }, "begins");
  expect([](auto& r) { r.mutable_parameters(0)->set_group(1); }, "group 1 of 1");
}

TEST(ConvertTest, TrainersMustAgreeOnGroups) {
  v1::PlanInputs inputs = TwoTrainers();
  inputs.mutable_registrations(1)->mutable_groups(0)->set_preset("torch");
  auto value = FromProto(inputs);
  EXPECT_EQ(value.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(value.status()), HasSubstr("trainers 0 and 1"));
  EXPECT_THAT(Message(value.status()), HasSubstr("different groups[0].preset: \"keller\" and "
                                                 "\"torch\""));
}

TEST(ConvertTest, TheFirstDifferenceIsNamedWithBothValues) {
  v1::GroupConfig one;
  one.set_preset("torch");
  v1::GroupConfig other = one;
  const auto found = [&] {
    const auto [field, a, b] = FirstDifference(one, other);
    return absl::StrCat(field, ": ", a, ", ", b);
  };
  other.add_coefficients()->set_a(1.5);
  EXPECT_EQ(found(), "coefficients: none, 1 of them");
  one.add_coefficients()->set_a(1.25);
  EXPECT_EQ(found(), "coefficients[0].a: 1.25, 1.5");
  other.set_nesterov(false);
  EXPECT_EQ(found(), "nesterov: none, false");
  other.set_momentum(v1::GroupConfig::MOMENTUM_EMA);
  EXPECT_EQ(found(), "momentum: MOMENTUM_UNSPECIFIED, MOMENTUM_EMA");
}

TEST(ConvertTest, ScalarsPassBitByBit) {
  scheduler::StepScalars scalars;
  scalars.groups.push_back({.learning_rate = 0.1,
                            .weight_decay = std::numeric_limits<double>::denorm_min(),
                            .momentum = -0.0,
                            .beta1 = std::nextafter(0.9, 1.0),
                            .beta2 = std::nan("7"),
                            .eps = 1e-300});
  scalars.loss_scale = 65536.0000001;
  scalars.max_grad_norm = 0.3;
  scalars.clip_muon = false;
  v1::StepScalars wire;
  ASSERT_TRUE(wire.ParseFromString(ToProto(scalars).SerializeAsString()));
  const scheduler::StepScalars back = FromProto(wire);
  ASSERT_EQ(back.groups.size(), 1);
  const auto differs = Compare(back, scalars);
  EXPECT_FALSE(differs.has_value()) << differs->field;
  EXPECT_EQ(FromProto(v1::StepScalars()).loss_scale, 1);
}

TEST(ConvertTest, DecisionsComeBackAsTheyWere) {
  scheduler::Decision decision;
  decision.attempt = scheduler::Attempt((uint64_t{3} << 32) | 7);
  decision.step = scheduler::StepId(12);
  decision.verdict = scheduler::Verdict::kCommit;
  decision.outcome = {.kind = scheduler::OutcomeKind::kCommitted,
                      .step = scheduler::StepId(12),
                      .attempt = decision.attempt,
                      .durable_step = scheduler::StepId(10),
                      .gradient_norm = 2.5};
  decision.scalars.groups.resize(2);
  decision.clip_coefficient = 0.25;
  decision.absent = {{scheduler::TrainerRank(1), 4}};
  auto back = FromProto(ToProto(decision));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(MessageDifferencer::Equals(ToProto(*back), ToProto(decision)));
  EXPECT_EQ(back->outcome.durable_step, scheduler::StepId(10));
  EXPECT_EQ(back->absent, decision.absent);

  v1::Decision unknown = ToProto(decision);
  unknown.set_verdict(v1::Decision::Verdict(8));
  EXPECT_EQ(FromProto(unknown).status().code(), absl::StatusCode::kInvalidArgument);
  unknown = ToProto(decision);
  unknown.clear_outcome();
  EXPECT_EQ(FromProto(unknown).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ConvertTest, NormsComeBackAsTheyWereOrAreRefused) {
  using scheduler::UnitId;
  const std::vector<scheduler::UnitNorm> norms = {
      {UnitId(7), 0, {0.1}, 0}, {UnitId(3), 2, {1e300, 0, 5e-324}, 131'072}, {UnitId(4), 5, {}, 0}};
  const v1::UnitNorms wire = ToProto(norms);
  const auto back = FromProto(wire);
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->size(), norms.size());
  for (size_t i = 0; i < norms.size(); ++i) {
    EXPECT_EQ((*back)[i].unit, norms[i].unit);
    EXPECT_EQ((*back)[i].first_block, norms[i].first_block);
    EXPECT_EQ((*back)[i].first_element, norms[i].first_element);
    EXPECT_EQ((*back)[i].sums, norms[i].sums);
  }
  const auto broken = [&wire](const auto& change) {
    v1::UnitNorms other = wire;
    change(other);
    return FromProto(other).status().code();
  };
  const auto refused = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(broken([](auto& norms) { norms.add_unit(1); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.clear_first_block(); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.add_first_element(1); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.clear_sum_count(); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.set_sum_count(2, 1); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.set_sum_count(0, -1); }), refused);
  EXPECT_EQ(broken([](auto& norms) { norms.add_sums(1); }), refused);
}

TEST(ConvertTest, SubmissionsHaveTheirListsSorted) {
  v1::RankSubmitted submitted;
  submitted.set_rank(2);
  submitted.set_attempt(9);
  submitted.set_kind(v1::ATTEMPT_KIND_STEP);
  for (int parameter : {5, 1, 5, 3}) submitted.add_absent(parameter);
  auto value = FromProto(submitted);
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_THAT(value->absent, ElementsAre(1, 3, 5));
  EXPECT_FALSE(ToProto(*value).has_not_finite());
  submitted.set_not_finite(0);
  EXPECT_EQ(ToProto(*FromProto(submitted)).not_finite(), 0);
  submitted.set_kind(v1::ATTEMPT_KIND_UNSPECIFIED);
  EXPECT_EQ(FromProto(submitted).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ConvertTest, GroupsOverrideTheirPreset) {
  v1::GroupConfig group;
  auto base = FromProto(group);
  ASSERT_TRUE(base.ok()) << base.status();
  EXPECT_EQ(base->newton_schulz.form, kernels::NewtonSchulzForm::kGram);
  group.set_preset("keller");
  group.set_nesterov(false);
  group.set_scale(v1::GroupConfig::SCALE_SPECTRAL);
  group.set_newton_schulz_type(v1::ELEMENT_TYPE_FLOAT32);
  group.set_eps(1e-5);
  group.set_norm(v1::GroupConfig::NORM_SCHATTEN4);
  v1::Coefficients& step = *group.add_coefficients();
  step.set_a(1.5);
  step.set_b(-0.5);
  auto config = FromProto(group);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->nesterov);
  EXPECT_EQ(config->scale, kernels::ScaleRule::kSpectral);
  EXPECT_EQ(config->momentum, kernels::MomentumForm::kEma);
  EXPECT_EQ(config->newton_schulz.dtype, kernels::DType::kF32);
  EXPECT_EQ(config->newton_schulz.eps, 1e-5);
  EXPECT_EQ(config->newton_schulz.norm, kernels::NormRule::kSchatten4);
  ASSERT_EQ(config->newton_schulz.coefficients.size(), 1);
  EXPECT_EQ(config->newton_schulz.coefficients[0][0], 1.5);
}

TEST(ConvertTest, RestartsOverrideThePresetsInEveryShape) {
  v1::GroupConfig group;
  group.add_restarts(2);
  group.add_restarts(4);
  auto config = FromProto(group);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->newton_schulz.restarts, ElementsAre(2, 4));
  EXPECT_TRUE(config->newton_schulz.restarts_near_square.empty());
  EXPECT_EQ(config->newton_schulz.coefficients,
            FromProto(v1::GroupConfig())->newton_schulz.coefficients);

  group.add_restarts(5);
  EXPECT_THAT(Message(FromProto(group).status()), HasSubstr("ns_restarts=2,4,5: "));
  group.mutable_restarts()->Truncate(2);
  group.set_preset("torch");
  EXPECT_THAT(Message(FromProto(group).status()),
              HasSubstr("ns_restarts=2,4: ns_form=standard has no restarts"));
  group.set_form(v1::GroupConfig::FORM_GRAM);
  group.set_newton_schulz_type(v1::ELEMENT_TYPE_FLOAT16);
  EXPECT_TRUE(FromProto(group).ok()) << FromProto(group).status();
}

TEST(ConvertTest, GroupsThatCannotBeAreRefused) {
  v1::GroupConfig group;
  group.set_preset("kellar");
  EXPECT_THAT(Message(FromProto(group).status()), HasSubstr("kellar"));
  group.set_preset("dmuon");
  group.set_norm(v1::GroupConfig::Norm(12));
  EXPECT_THAT(Message(FromProto(group).status()), HasSubstr("GroupConfig.norm"));
  group.clear_norm();
  group.set_newton_schulz_type(v1::ELEMENT_TYPE_BFLOAT16);  // the Gram form in bf16 is wrong
  EXPECT_EQ(FromProto(group).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dmuond
