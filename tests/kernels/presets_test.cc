#include "kernels/presets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"

namespace dmuond::kernels {
namespace {

TEST(Presets, AllExistAndAreConsistent) {
  for (const char* name : kPresetNames) {
    const auto preset = FindPreset(name);
    ASSERT_TRUE(preset.ok());
    EXPECT_TRUE(CheckConfig(*preset).ok());
    EXPECT_EQ(preset->newton_schulz.coefficients.size(), 5);
  }
  const auto unknown = FindPreset("kellar").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("keller"));
}

TEST(Presets, AreTheirOriginals) {
  const auto torch = *FindPreset("torch");
  EXPECT_EQ(torch.momentum, MomentumForm::kEma);
  EXPECT_EQ(torch.scale, ScaleRule::kOriginal);
  EXPECT_EQ(torch.newton_schulz.norm, NormRule::kClampedEps);
  EXPECT_EQ(torch.newton_schulz.dtype, DType::kBF16);
  const auto keller = *FindPreset("keller");
  EXPECT_EQ(keller.momentum, MomentumForm::kEma);
  EXPECT_EQ(keller.newton_schulz.norm, NormRule::kPlusEps);
  const auto moonlight = *FindPreset("moonlight");
  EXPECT_EQ(moonlight.momentum, MomentumForm::kSum);
  EXPECT_EQ(moonlight.scale, ScaleRule::kMatchRmsAdamW);
  const auto dmuon = *FindPreset("dmuon");
  EXPECT_EQ(dmuon.newton_schulz.form, NewtonSchulzForm::kGram);
  EXPECT_EQ(dmuon.newton_schulz.dtype, DType::kF16);
  EXPECT_EQ(dmuon.newton_schulz.norm, NormRule::kExact);
  EXPECT_NEAR(dmuon.newton_schulz.coefficients[0][0], 8.28721201814563 / 1.05, 1e-12);
}

TEST(Presets, GramInBF16IsRefused) {
  MuonConfig config = *FindPreset("dmuon");
  config.newton_schulz.dtype = DType::kBF16;
  EXPECT_EQ(CheckConfig(config).code(), absl::StatusCode::kInvalidArgument);
  config.newton_schulz.form = NewtonSchulzForm::kStandard;
  EXPECT_TRUE(CheckConfig(config).ok());
}

TEST(Presets, RestartsThatCannotBeAreRefusedWithTheirNumbers) {
  MuonConfig config = *FindPreset("dmuon");
  for (const std::vector<int>& wrong : {std::vector<int>{2, 5}, {4, 2}, {2, 2}, {0}}) {
    config.newton_schulz.restarts = wrong;
    const absl::Status status = CheckConfig(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("ns_restarts=" + absl::StrJoin(wrong, ",") + ": "));
  }
}

TEST(UpdateScale, FollowsItsFormulas) {
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kMatchRmsAdamW, 400, 100), 4.0);
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kMatchRmsAdamW, 100, 400), 4.0);
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kOriginal, 400, 100), 2.0);
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kOriginal, 100, 400), 1.0);
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kSpectral, 100, 400), 0.5);
  EXPECT_DOUBLE_EQ(UpdateScale(ScaleRule::kNone, 100, 400), 1.0);
}

}  // namespace
}  // namespace dmuond::kernels
