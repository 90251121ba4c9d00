// Named sets of Muon's choices, each reproducing one original (docs/maths.md section 2).
//
//   ASSIGN_OR_RETURN(MuonConfig config, FindPreset("keller"));
//   config.newton_schulz.dtype = DType::kF32;
//   RETURN_IF_ERROR(CheckConfig(config));
#ifndef DMUOND_KERNELS_PRESETS_H_
#define DMUOND_KERNELS_PRESETS_H_

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/ops.h"

namespace dmuond::kernels {

inline constexpr std::array<const char*, 4> kPresetNames = {"dmuon", "torch", "keller",
                                                            "moonlight"};
inline constexpr char kDefaultPreset[] = "dmuon";

// NOT_FOUND names the presets that exist.
absl::StatusOr<MuonConfig> FindPreset(absl::string_view name);

// OK if the fields fit together, whatever the shape: e.g. the Gram form in bf16 is refused, it is
// wrong by up to a fifth.
absl::Status CheckConfig(const MuonConfig& config);

using Coefficients = std::vector<std::array<double, 3>>;
// (3.4445, -4.7750, 2.0315) in every step. Keller Jordan, Muon (2024).
[[nodiscard]] Coefficients JordanCoefficients(int steps);
// The five steps of Polar Express (arXiv 2505.16932), each (a/s, b/s^3, c/s^5) for safety factor s.
[[nodiscard]] Coefficients PolarExpressCoefficients(double safety);

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_PRESETS_H_
