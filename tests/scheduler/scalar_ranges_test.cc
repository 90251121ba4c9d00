#include "scheduler/scalar_ranges.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dmuond::scheduler {
namespace {

constexpr double kBelowOne = 1 - 0x1p-53;  // the largest double that is

std::vector<Parameter> OneOn(Route route) {
  std::vector<Parameter> parameters(1);
  parameters[0].route = route;
  return parameters;
}

StepScalars Usual() {
  StepScalars scalars;
  scalars.groups.push_back({.learning_rate = 1e-3,
                            .weight_decay = 0.1,
                            .momentum = 0.95,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = 1e-8});
  return scalars;
}

// "field = value", or "" where all is in range.
std::string Found(const StepScalars& scalars, Route route = Route::kAdamW) {
  const auto wrong = FindOutOfRange(scalars, OneOn(route));
  return wrong.has_value() ? wrong->field + " = " + wrong->value : "";
}

std::string FoundWith(double GroupScalars::*field, double value, Route route = Route::kAdamW) {
  StepScalars scalars = Usual();
  scalars.groups[0].*field = value;
  return Found(scalars, route);
}

TEST(ScalarRangesTest, WhatTrainersUsuallySayIsInRange) {
  EXPECT_EQ(Found(Usual()), "");
  StepScalars scalars = Usual();
  scalars.groups.assign(1, GroupScalars{.eps = 1e-30});
  scalars.loss_scale = 65536;
  EXPECT_EQ(Found(scalars), "") << "a warm-up's first step: all zero";
}

TEST(ScalarRangesTest, ABetaOfOneIsNamedWithItsGroupAndRange) {
  StepScalars scalars = Usual();
  scalars.groups.push_back(scalars.groups[0]);
  scalars.groups[1].beta1 = 1;
  const auto wrong = FindOutOfRange(scalars, OneOn(Route::kMuon));
  ASSERT_TRUE(wrong.has_value());
  EXPECT_EQ(wrong->field, "groups[1].beta1");
  EXPECT_EQ(wrong->value, "1");
  EXPECT_EQ(wrong->range, "at least 0 and less than 1");
}

TEST(ScalarRangesTest, MeansAreBelowOne) {
  for (double GroupScalars::*field :
       {&GroupScalars::momentum, &GroupScalars::beta1, &GroupScalars::beta2}) {
    EXPECT_EQ(FoundWith(field, 0), "");
    EXPECT_EQ(FoundWith(field, kBelowOne), "");
    EXPECT_NE(FoundWith(field, 1), "");
    EXPECT_NE(FoundWith(field, -0x1p-60), "");
    EXPECT_NE(FoundWith(field, std::nan("")), "");
  }
}

TEST(ScalarRangesTest, RatesThatFp32CannotHoldAreNamed) {
  EXPECT_EQ(FoundWith(&GroupScalars::learning_rate, 1e39), "groups[0].learning_rate = 1e+39");
  EXPECT_EQ(FoundWith(&GroupScalars::weight_decay, 1e39), "groups[0].weight_decay = 1e+39");
  EXPECT_EQ(FoundWith(&GroupScalars::learning_rate, -0.5), "groups[0].learning_rate = -0.5");
  EXPECT_EQ(FoundWith(&GroupScalars::weight_decay, std::numeric_limits<double>::infinity()),
            "groups[0].weight_decay = inf");
}

TEST(ScalarRangesTest, EpsMayBeZeroWhereNothingIsOnAdamW) {
  EXPECT_EQ(FoundWith(&GroupScalars::eps, 0, Route::kMuon), "");
  EXPECT_EQ(FoundWith(&GroupScalars::eps, 0), "groups[0].eps = 0");
  EXPECT_EQ(FoundWith(&GroupScalars::eps, 1e-46), "groups[0].eps = 1e-46") << "0 in fp32";
}

TEST(ScalarRangesTest, AScaleHasAnInverseInFp32) {
  StepScalars scalars = Usual();
  for (const double scale : {1e-40, 1e39, 0.0, -1.0}) {
    scalars.loss_scale = scale;
    EXPECT_NE(Found(scalars), "") << scale;
  }
  scalars.loss_scale = 0x1p120;
  EXPECT_EQ(Found(scalars), "");
  scalars.max_grad_norm = -1;
  EXPECT_EQ(Found(scalars), "max_grad_norm = -1");
}

// What the kernels compute of them (kernels/cpu/adamw.cc, kernels/cpu/muon.cc), at the ends of the
// ranges.
TEST(ScalarRangesTest, WhatIsMadeOfTheLargestIsFinite) {
  StepScalars scalars = Usual();
  GroupScalars& group = scalars.groups[0];
  group = {.learning_rate = 1e6,
           .weight_decay = 1e6,
           .momentum = kBelowOne,
           .beta1 = kBelowOne,
           .beta2 = kBelowOne,
           .eps = 1e-37};
  ASSERT_EQ(Found(scalars), "");
  const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
  EXPECT_TRUE(finite(1 - group.learning_rate * group.weight_decay));
  EXPECT_TRUE(finite(group.learning_rate / (1 - std::pow(group.beta1, 1))));
  EXPECT_GT(static_cast<float>(std::sqrt(1 - std::pow(group.beta2, 1))), 0);
  EXPECT_GT(static_cast<float>(group.eps), 0);
}

}  // namespace
}  // namespace dmuond::scheduler
