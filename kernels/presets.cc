#include "kernels/presets.h"

#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/newton_schulz.h"

namespace dmuond::kernels {
namespace {

constexpr int kStepsMax = 64;
constexpr double kSafety = 1.05;

// The names of an enum's values, for reading and for messages.
template <typename Value>
using NamedValues = std::vector<std::pair<const char*, Value>>;

absl::Status CannotBe(absl::string_view field, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("preset field '", field, "' cannot be '", value, "': ", allowed));
}

template <typename Value>
absl::Status SetNamed(absl::string_view field, absl::string_view value,
                      const NamedValues<Value>& names, Value& target) {
  for (const auto& [name, named] : names) {
    if (value == name) {
      target = named;
      return absl::OkStatus();
    }
  }
  return CannotBe(field, value,
                  absl::StrCat("one of ", absl::StrJoin(names, ", ", [](std::string* out, auto& n) {
                                 absl::StrAppend(out, n.first);
                               })));
}

absl::Status SetNumber(absl::string_view field, absl::string_view value, double& target) {
  double number = 0;
  if (!absl::SimpleAtod(value, &number) || !std::isfinite(number) || number < 0) {
    return CannotBe(field, value, "a finite number of at least 0");
  }
  target = number;
  return absl::OkStatus();
}

absl::Status SetBool(absl::string_view field, absl::string_view value, bool& target) {
  bool truth = false;
  if (!absl::SimpleAtob(value, &truth)) return CannotBe(field, value, "true or false");
  target = truth;
  return absl::OkStatus();
}

// "a,b,c;a,b,c;…"
absl::StatusOr<Coefficients> ParseCoefficients(absl::string_view field, absl::string_view value) {
  Coefficients result;
  for (const absl::string_view step : absl::StrSplit(value, ';')) {
    const std::vector<std::string> numbers = absl::StrSplit(step, ',');
    std::array<double, 3> parsed{};
    bool good = numbers.size() == parsed.size();
    for (size_t i = 0; good && i < parsed.size(); ++i) {
      good = absl::SimpleAtod(numbers[i], &parsed[i]) && std::isfinite(parsed[i]);
    }
    if (!good || result.size() >= kStepsMax) {
      return CannotBe(field, value,
                      "jordan, polar_express, you, or up to 64 steps as 'a,b,c;a,b,c;…'");
    }
    result.push_back(parsed);
  }
  return result;
}

absl::Status SetCoefficients(absl::string_view field, absl::string_view value,
                             NewtonSchulzConfig& config) {
  if (value == "jordan") {
    config.coefficients = JordanCoefficients(5);
  } else if (value == "polar_express") {
    config.coefficients = PolarExpressCoefficients(kSafety);
  } else if (value == "you") {
    config.coefficients = YouCoefficients();
  } else {
    absl::StatusOr<Coefficients> parsed = ParseCoefficients(field, value);
    if (!parsed.ok()) return parsed.status();
    config.coefficients = *std::move(parsed);
  }
  return absl::OkStatus();
}

// Only a list that says the same in every step has other lengths: the steps of the others are made
// for one another.
absl::Status SetSteps(absl::string_view field, absl::string_view value,
                      NewtonSchulzConfig& config) {
  int steps = 0;
  if (!absl::SimpleAtoi(value, &steps) || steps < 1 || steps > kStepsMax) {
    return CannotBe(field, value, absl::StrCat("a number from 1 to ", kStepsMax));
  }
  if (static_cast<size_t>(steps) == config.coefficients.size()) return absl::OkStatus();
  for (const auto& step : config.coefficients) {
    if (step != config.coefficients.front()) {
      return CannotBe(field, value,
                      absl::StrCat("the coefficients are made for ", config.coefficients.size(),
                                   " steps; give ns_coefficients for another number"));
    }
  }
  config.coefficients.assign(static_cast<size_t>(steps),
                             std::array<double, 3>(config.coefficients.front()));
  return absl::OkStatus();
}

absl::Status SetRestarts(absl::string_view field, absl::string_view value,
                         NewtonSchulzConfig& config) {
  std::vector<int> restarts;
  if (!value.empty() && value != "none") {
    for (const absl::string_view text : absl::StrSplit(value, ',')) {
      int step = 0;
      if (!absl::SimpleAtoi(text, &step) || step < 1 ||
          (!restarts.empty() && step <= restarts.back())) {
        return CannotBe(field, value, "none, or increasing numbers of steps, '2' or '2,4'");
      }
      restarts.push_back(step);
    }
  }
  config.restarts = std::move(restarts);
  config.restarts_near_square.clear();
  return absl::OkStatus();
}

NewtonSchulzConfig JordanInBF16(NormRule norm) {
  NewtonSchulzConfig config;
  config.form = NewtonSchulzForm::kStandard;
  config.coefficients = JordanCoefficients(5);
  config.dtype = DType::kBF16;
  config.norm = norm;
  config.eps = 1e-7;
  return config;
}

MuonPreset DmuonPreset() {
  MuonPreset preset{.name = "dmuon", .learning_rate = 5e-3};
  preset.config.newton_schulz.coefficients = PolarExpressCoefficients(kSafety);
  // Before step 3 is more accurate on most matrices and overflows on some (docs/maths.md).
  preset.config.newton_schulz.restarts = {2};
  preset.config.newton_schulz.restarts_near_square = {2, 4};
  return preset;
}

MuonPreset TorchPreset() {
  MuonPreset preset{.name = "torch", .learning_rate = 1e-3, .weight_decay = 0.1};
  preset.config.momentum = MomentumForm::kEma;
  preset.config.scale = ScaleRule::kOriginal;
  preset.config.newton_schulz = JordanInBF16(NormRule::kClampedEps);
  return preset;
}

MuonPreset KellerPreset() {
  MuonPreset preset{.name = "keller", .learning_rate = 0.02};
  preset.config.momentum = MomentumForm::kEma;
  preset.config.scale = ScaleRule::kOriginal;
  preset.config.newton_schulz = JordanInBF16(NormRule::kPlusEps);
  return preset;
}

MuonPreset MoonlightPreset() {
  MuonPreset preset{.name = "moonlight", .learning_rate = 1e-3, .weight_decay = 0.1};
  preset.config.newton_schulz = JordanInBF16(NormRule::kPlusEps);
  return preset;
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

Coefficients YouCoefficients() {
  return {{4.0848, -6.8946, 2.9270},
          {3.9505, -6.3029, 2.6377},
          {3.7418, -5.5913, 2.3037},
          {2.8769, -3.1427, 1.2046},
          {2.8366, -3.0525, 1.2012}};
}

absl::StatusOr<MuonPreset> FindPreset(absl::string_view name) {
  if (name == "dmuon") return DmuonPreset();
  if (name == "torch") return TorchPreset();
  if (name == "keller") return KellerPreset();
  if (name == "moonlight") return MoonlightPreset();
  return absl::NotFoundError(absl::StrCat("no preset is called '", name,
                                          "'; there are: ", absl::StrJoin(kPresetNames, ", ")));
}

const std::vector<PresetField>& PresetFields() {
  static const auto* const kFields = new std::vector<PresetField>{
      {"learning_rate", "a number"},
      {"momentum", "a number below 1"},
      {"weight_decay", "a number"},
      {"momentum_form", "sum, ema"},
      {"nesterov", "true, false"},
      {"scale", "match_rms_adamw, original, spectral, none"},
      {"ns_form", "standard, gram"},
      {"ns_coefficients", "jordan, polar_express, you, or 'a,b,c;a,b,c;…'"},
      {"ns_steps", "a number, where the coefficients are the same in every step"},
      {"ns_restarts", "none, or numbers of steps: '2', '2,4'"},
      {"ns_dtype", "float32, bfloat16, float16 (or fp32, bf16, fp16)"},
      {"ns_norm", "exact, plus_eps, clamped_eps"},
      {"ns_eps", "a number"},
  };
  return *kFields;
}

absl::Status OverrideField(MuonPreset& preset, absl::string_view field, absl::string_view value) {
  MuonConfig& config = preset.config;
  NewtonSchulzConfig& ns = config.newton_schulz;
  if (field == "learning_rate") return SetNumber(field, value, preset.learning_rate);
  if (field == "weight_decay") return SetNumber(field, value, preset.weight_decay);
  if (field == "momentum") {
    double momentum = 0;
    if (absl::Status status = SetNumber(field, value, momentum); !status.ok()) return status;
    if (momentum >= 1) return CannotBe(field, value, "a number below 1");
    preset.momentum = momentum;
    return absl::OkStatus();
  }
  if (field == "momentum_form") {
    return SetNamed(field, value, {{"sum", MomentumForm::kSum}, {"ema", MomentumForm::kEma}},
                    config.momentum);
  }
  if (field == "nesterov") return SetBool(field, value, config.nesterov);
  if (field == "scale") {
    return SetNamed(field, value,
                    {{"match_rms_adamw", ScaleRule::kMatchRmsAdamW},
                     {"original", ScaleRule::kOriginal},
                     {"spectral", ScaleRule::kSpectral},
                     {"none", ScaleRule::kNone}},
                    config.scale);
  }
  if (field == "ns_form") {
    return SetNamed(field, value,
                    {{"standard", NewtonSchulzForm::kStandard}, {"gram", NewtonSchulzForm::kGram}},
                    ns.form);
  }
  if (field == "ns_coefficients") return SetCoefficients(field, value, ns);
  if (field == "ns_steps") return SetSteps(field, value, ns);
  if (field == "ns_restarts") return SetRestarts(field, value, ns);
  if (field == "ns_dtype") {
    return SetNamed(field, value,
                    {{"float32", DType::kF32},
                     {"bfloat16", DType::kBF16},
                     {"float16", DType::kF16},
                     {"fp32", DType::kF32},
                     {"bf16", DType::kBF16},
                     {"fp16", DType::kF16}},
                    ns.dtype);
  }
  if (field == "ns_norm") {
    return SetNamed(field, value,
                    {{"exact", NormRule::kExact},
                     {"plus_eps", NormRule::kPlusEps},
                     {"clamped_eps", NormRule::kClampedEps}},
                    ns.norm);
  }
  if (field == "ns_eps") return SetNumber(field, value, ns.eps);
  return absl::NotFoundError(absl::StrCat(
      "presets have no field '", field, "'; there are: ",
      absl::StrJoin(PresetFields(), ", ",
                    [](std::string* out, const PresetField& f) { absl::StrAppend(out, f.name); })));
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
