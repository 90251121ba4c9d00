#include "kernels/presets.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/newton_schulz.h"

namespace dmuond::kernels {
namespace {

constexpr double kSafety = 1.05;

NewtonSchulzConfig JordanInBF16(NormRule norm) {
  NewtonSchulzConfig config;
  config.form = NewtonSchulzForm::kStandard;
  config.coefficients = JordanCoefficients(5);
  config.dtype = DType::kBF16;
  config.norm = norm;
  config.eps = 1e-7;
  return config;
}

MuonConfig DmuonPreset() {
  MuonConfig config;
  config.newton_schulz.coefficients = PolarExpressCoefficients(kSafety);
  // Before step 3 is more accurate on most matrices and overflows on some (docs/maths.md).
  config.newton_schulz.restarts = {2};
  config.newton_schulz.restarts_near_square = {2, 4};
  return config;
}

MuonConfig TorchPreset() {
  MuonConfig config;
  config.momentum = MomentumForm::kEma;
  config.scale = ScaleRule::kOriginal;
  config.newton_schulz = JordanInBF16(NormRule::kClampedEps);
  return config;
}

MuonConfig KellerPreset() {
  MuonConfig config;
  config.momentum = MomentumForm::kEma;
  config.scale = ScaleRule::kOriginal;
  config.newton_schulz = JordanInBF16(NormRule::kPlusEps);
  return config;
}

MuonConfig MoonlightPreset() {
  MuonConfig config;
  config.newton_schulz = JordanInBF16(NormRule::kPlusEps);
  return config;
}

}  // namespace

Coefficients JordanCoefficients(int steps) {
  return Coefficients(static_cast<size_t>(steps), {3.4445, -4.7750, 2.0315});
}

Coefficients PolarExpressCoefficients(double safety) {
  Coefficients steps = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                        {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                        {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                        {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                        {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
  for (auto& [a, b, c] : steps) {
    a /= safety;
    b /= std::pow(safety, 3);
    c /= std::pow(safety, 5);
  }
  return steps;
}

absl::StatusOr<MuonConfig> FindPreset(absl::string_view name) {
  if (name == "dmuon") return DmuonPreset();
  if (name == "torch") return TorchPreset();
  if (name == "keller") return KellerPreset();
  if (name == "moonlight") return MoonlightPreset();
  return absl::NotFoundError(absl::StrCat("no preset is called '", name,
                                          "'; there are: ", absl::StrJoin(kPresetNames, ", ")));
}

absl::Status CheckConfig(const MuonConfig& config) {
  const NewtonSchulzConfig& ns = config.newton_schulz;
  if (ns.form == NewtonSchulzForm::kGram && ns.dtype == DType::kBF16) {
    return absl::InvalidArgumentError(
        "ns_form=gram cannot be computed in ns_dtype=bfloat16 (it would be wrong by up to 0.2): "
        "use "
        "float16 or float32, or ns_form=standard");
  }
  return BuildNewtonSchulz(ns, 64, 64).status();
}

}  // namespace dmuond::kernels
