// Named sets of Muon's choices, each reproducing one original (docs/maths.md section 2), and the
// fields that a user may override one by one.
//
//   ASSIGN_OR_RETURN(MuonPreset preset, FindPreset("keller"));
//   RETURN_IF_ERROR(OverrideField(preset, "ns_dtype", "float32"));
#ifndef DMUOND_KERNELS_PRESETS_H_
#define DMUOND_KERNELS_PRESETS_H_

#include <array>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/ops.h"

namespace dmuond::kernels {

inline constexpr std::array<const char*, 4> kPresetNames = {"dmuon", "torch", "keller",
                                                            "moonlight"};
inline constexpr char kDefaultPreset[] = "dmuon";

struct MuonPreset {
  std::string name;
  MuonConfig config;
  // Defaults of what travels with each step.
  double learning_rate = 0;
  double momentum = 0.95;
  double weight_decay = 0;
};

// NOT_FOUND names the presets that exist.
absl::StatusOr<MuonPreset> FindPreset(absl::string_view name);

// The fields that can be overridden, in the order of the documentation.
struct PresetField {
  const char* name;
  const char* values;  // what may be written, for messages and documents
};
[[nodiscard]] const std::vector<PresetField>& PresetFields();

// Sets one field from its text. NOT_FOUND for an unknown field, INVALID_ARGUMENT with field and
// value for a value that it cannot have; the preset is unchanged then.
absl::Status OverrideField(MuonPreset& preset, absl::string_view field, absl::string_view value);

// OK if the fields fit together, whatever the shape: e.g. the Gram form in bf16 is refused, it is
// wrong by up to a fifth.
absl::Status CheckConfig(const MuonConfig& config);

using Coefficients = std::vector<std::array<double, 3>>;
// (3.4445, -4.7750, 2.0315) in every step. Keller Jordan, Muon (2024).
[[nodiscard]] Coefficients JordanCoefficients(int steps);
// The five steps of Polar Express (arXiv 2505.16932), each (a/s, b/s^3, c/s^5) for safety factor s.
[[nodiscard]] Coefficients PolarExpressCoefficients(double safety);
// Five steps by You Jiacheng.
[[nodiscard]] Coefficients YouCoefficients();

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_PRESETS_H_
