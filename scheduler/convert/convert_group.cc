// Hyperparameter groups: a preset and what overrides it, and what that costs.
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/presets.h"
#include "scheduler/convert/convert.h"
#include "scheduler/limits.h"

namespace dmuond {
namespace {

static_assert(static_cast<int>(kernels::MomentumForm::kSum) == v1::GroupConfig::MOMENTUM_SUM);
static_assert(static_cast<int>(kernels::MomentumForm::kEma) == v1::GroupConfig::MOMENTUM_EMA);
static_assert(static_cast<int>(kernels::NewtonSchulzForm::kStandard) ==
              v1::GroupConfig::FORM_STANDARD);
static_assert(static_cast<int>(kernels::NewtonSchulzForm::kGram) == v1::GroupConfig::FORM_GRAM);
static_assert(static_cast<int>(kernels::NormRule::kExact) == v1::GroupConfig::NORM_EXACT);
static_assert(static_cast<int>(kernels::NormRule::kPlusEps) == v1::GroupConfig::NORM_PLUS_EPS);
static_assert(static_cast<int>(kernels::NormRule::kClampedEps) ==
              v1::GroupConfig::NORM_CLAMPED_EPS);
static_assert(static_cast<int>(kernels::NormRule::kSchatten4) == v1::GroupConfig::NORM_SCHATTEN4);
static_assert(static_cast<int>(kernels::ScaleRule::kMatchRmsAdamW) ==
              v1::GroupConfig::SCALE_MATCH_RMS_ADAMW);
static_assert(static_cast<int>(kernels::ScaleRule::kOriginal) == v1::GroupConfig::SCALE_ORIGINAL);
static_assert(static_cast<int>(kernels::ScaleRule::kSpectral) == v1::GroupConfig::SCALE_SPECTRAL);
static_assert(static_cast<int>(kernels::ScaleRule::kNone) == v1::GroupConfig::SCALE_NONE);
static_assert(static_cast<int>(kernels::DType::kF32) == v1::ELEMENT_TYPE_FLOAT32);
static_assert(static_cast<int>(kernels::DType::kBF16) == v1::ELEMENT_TYPE_BFLOAT16);
static_assert(static_cast<int>(kernels::DType::kF16) == v1::ELEMENT_TYPE_FLOAT16);

// 0 is "unset" in every enum of the message: the preset's value stays.
template <typename Value>
absl::Status Override(const char* field, int from, int last, Value& to) {
  if (from == 0) return absl::OkStatus();
  if (from < 0 || from > last) {
    return absl::InvalidArgumentError(
        absl::StrCat("GroupConfig.", field, " has the unknown value ", from));
  }
  to = static_cast<Value>(from);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<kernels::MuonConfig> FromProto(const v1::GroupConfig& config) {
  absl::StatusOr<kernels::MuonConfig> out =
      kernels::FindPreset(config.preset().empty() ? kernels::kDefaultPreset : config.preset());
  if (!out.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("GroupConfig.preset: ", std::string(out.status().message())));
  }
  kernels::NewtonSchulzConfig& newton_schulz = out->newton_schulz;
  absl::Status status =
      Override("momentum", config.momentum(), v1::GroupConfig::MOMENTUM_EMA, out->momentum);
  if (status.ok()) {
    status = Override("scale", config.scale(), v1::GroupConfig::SCALE_NONE, out->scale);
  }
  if (status.ok()) {
    status = Override("form", config.form(), v1::GroupConfig::FORM_GRAM, newton_schulz.form);
  }
  if (status.ok()) {
    status = Override("norm", config.norm(), v1::GroupConfig::NORM_SCHATTEN4, newton_schulz.norm);
  }
  if (status.ok()) {
    status = Override("newton_schulz_type", config.newton_schulz_type(), v1::ELEMENT_TYPE_FLOAT16,
                      newton_schulz.dtype);
  }
  if (!status.ok()) return status;
  if (config.has_nesterov()) out->nesterov = config.nesterov();
  if (config.has_eps()) newton_schulz.eps = config.eps();
  for (const auto& [field, count] : {std::pair("coefficients", config.coefficients_size()),
                                     std::pair("restarts", config.restarts_size())}) {
    if (count <= scheduler::kNewtonSchulzStepsMax) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("GroupConfig.", field, " has ", count, " entries; at most ",
                     scheduler::kNewtonSchulzStepsMax, " are allowed"));
  }
  if (config.coefficients_size() > 0) {
    newton_schulz.coefficients.clear();
    for (const v1::Coefficients& step : config.coefficients()) {
      newton_schulz.coefficients.push_back({step.a(), step.b(), step.c()});
    }
  }
  // The preset's own restarts belong to its own coefficients.
  if (config.coefficients_size() > 0 || config.restarts_size() > 0) {
    newton_schulz.restarts.assign(config.restarts().begin(), config.restarts().end());
    newton_schulz.restarts_near_square.clear();
  }
  if (config.restarts_size() > 0 && newton_schulz.form == kernels::NewtonSchulzForm::kStandard) {
    return absl::InvalidArgumentError(
        absl::StrCat("ns_restarts=", absl::StrJoin(config.restarts(), ","),
                     ": ns_form=standard has no restarts, X is made anew in every step"));
  }
  if (status = kernels::CheckConfig(*out); !status.ok()) return status;
  return out;
}

scheduler::Iteration IterationOf(const kernels::NewtonSchulzConfig& config) {
  const auto steps = static_cast<int32_t>(config.coefficients.size());
  const bool gram = config.form == kernels::NewtonSchulzForm::kGram;
  return {steps, gram ? 1 + static_cast<int32_t>(config.restarts.size()) : steps};
}

}  // namespace dmuond
