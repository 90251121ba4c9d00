#include "kernels/presets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/newton_schulz.h"

namespace dmuond::kernels {
namespace {

TEST(Presets, AllExistAndAreConsistent) {
  for (const char* name : kPresetNames) {
    const auto preset = FindPreset(name);
    ASSERT_TRUE(preset.ok());
    EXPECT_EQ(preset->name, name);
    EXPECT_TRUE(CheckConfig(preset->config).ok());
    EXPECT_EQ(preset->config.newton_schulz.coefficients.size(), 5);
  }
  const auto unknown = FindPreset("kellar").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), testing::HasSubstr("keller"));
}

TEST(Presets, AreTheirOriginals) {
  const auto torch = *FindPreset("torch");
  EXPECT_EQ(torch.config.momentum, MomentumForm::kEma);
  EXPECT_EQ(torch.config.scale, ScaleRule::kOriginal);
  EXPECT_EQ(torch.config.newton_schulz.norm, NormRule::kClampedEps);
  EXPECT_EQ(torch.config.newton_schulz.dtype, DType::kBF16);
  EXPECT_EQ(torch.weight_decay, 0.1);
  const auto keller = *FindPreset("keller");
  EXPECT_EQ(keller.config.momentum, MomentumForm::kEma);
  EXPECT_EQ(keller.config.newton_schulz.norm, NormRule::kPlusEps);
  EXPECT_EQ(keller.weight_decay, 0.0);
  const auto moonlight = *FindPreset("moonlight");
  EXPECT_EQ(moonlight.config.momentum, MomentumForm::kSum);
  EXPECT_EQ(moonlight.config.scale, ScaleRule::kMatchRmsAdamW);
  const auto dmuon = *FindPreset("dmuon");
  EXPECT_EQ(dmuon.config.newton_schulz.form, NewtonSchulzForm::kGram);
  EXPECT_EQ(dmuon.config.newton_schulz.dtype, DType::kF16);
  EXPECT_EQ(dmuon.config.newton_schulz.norm, NormRule::kExact);
  EXPECT_NEAR(dmuon.config.newton_schulz.coefficients[0][0], 8.28721201814563 / 1.05, 1e-12);
}

TEST(Presets, EveryFieldCanBeOverridden) {
  MuonPreset preset = *FindPreset("dmuon");
  const std::vector<std::pair<const char*, const char*>> overrides = {
      {"learning_rate", "0.5"}, {"momentum", "0.9"},     {"weight_decay", "0.25"},
      {"momentum_form", "ema"}, {"nesterov", "false"},   {"scale", "spectral"},
      {"ns_form", "standard"},  {"ns_restarts", "none"}, {"ns_coefficients", "jordan"},
      {"ns_steps", "7"},        {"ns_dtype", "bf16"},    {"ns_norm", "plus_eps"},
      {"ns_eps", "1e-7"}};
  ASSERT_EQ(overrides.size(), PresetFields().size());
  for (const auto& [field, value] : overrides) {
    ASSERT_TRUE(OverrideField(preset, field, value).ok()) << field;
  }
  EXPECT_EQ(preset.learning_rate, 0.5);
  EXPECT_EQ(preset.momentum, 0.9);
  EXPECT_EQ(preset.weight_decay, 0.25);
  EXPECT_EQ(preset.config.momentum, MomentumForm::kEma);
  EXPECT_FALSE(preset.config.nesterov);
  EXPECT_EQ(preset.config.scale, ScaleRule::kSpectral);
  const NewtonSchulzConfig& ns = preset.config.newton_schulz;
  EXPECT_EQ(ns.form, NewtonSchulzForm::kStandard);
  EXPECT_EQ(ns.coefficients, JordanCoefficients(7));
  EXPECT_TRUE(ns.restarts.empty());
  EXPECT_EQ(ns.dtype, DType::kBF16);
  EXPECT_EQ(ns.norm, NormRule::kPlusEps);
  EXPECT_EQ(ns.eps, 1e-7);
  ASSERT_TRUE(OverrideField(preset, "ns_coefficients", "1.5,-0.5,0;2,-1.5,0.5").ok());
  EXPECT_EQ(ns.coefficients, (Coefficients{{1.5, -0.5, 0}, {2, -1.5, 0.5}}));
}

TEST(Presets, WrongValuesAreRefusedByNameAndChangeNothing) {
  const MuonPreset original = *FindPreset("dmuon");
  const std::vector<std::pair<const char*, const char*>> wrong = {
      {"learning_rate", "fast"}, {"learning_rate", "nan"}, {"momentum", "1"},
      {"momentum", "-0.1"},      {"weight_decay", "inf"},  {"momentum_form", "max"},
      {"nesterov", "perhaps"},   {"scale", "adam"},        {"ns_form", "cubic"},
      {"ns_restarts", "2,1"},    {"ns_restarts", "x"},     {"ns_coefficients", "1,2"},
      {"ns_steps", "0"},         {"ns_steps", "4"},  // a five-step Polar Express is not cut short
      {"ns_dtype", "fp8"},       {"ns_norm", "l1"},        {"ns_eps", "-1"}};
  for (const auto& [field, value] : wrong) {
    MuonPreset preset = original;
    const absl::Status status = OverrideField(preset, field, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << "=" << value;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr(field), testing::HasSubstr(value)));
    EXPECT_EQ(preset.config, original.config);
    EXPECT_EQ(preset.learning_rate, original.learning_rate);
    EXPECT_EQ(preset.momentum, original.momentum);
  }
  MuonPreset preset = original;
  EXPECT_EQ(OverrideField(preset, "ns_stepps", "5").code(), absl::StatusCode::kNotFound);
}

TEST(Presets, GramInBF16IsRefused) {
  MuonPreset preset = *FindPreset("dmuon");
  ASSERT_TRUE(OverrideField(preset, "ns_dtype", "bf16").ok());
  EXPECT_EQ(CheckConfig(preset.config).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(OverrideField(preset, "ns_form", "standard").ok());
  EXPECT_TRUE(CheckConfig(preset.config).ok());
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
