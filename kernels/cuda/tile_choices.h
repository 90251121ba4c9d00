// Tiles that a TileTuner has measured, as text for a later process on the same device. One line a
// kind of product, numbers in the order of TileTuner::Choice.
#ifndef DMUOND_KERNELS_CUDA_TILE_CHOICES_H_
#define DMUOND_KERNELS_CUDA_TILE_CHOICES_H_

#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/cuda/tile_tuner.h"

namespace dmuond::kernels::cuda {

[[nodiscard]] std::string ToText(std::span<const TileTuner::Choice> choices);
// Reads what ToText() wrote. It returns nothing for text with any other line in it, or with more
// than kTileChoicesMax lines: the tiles are then measured again.
inline constexpr size_t kTileChoicesMax = 4096;
[[nodiscard]] std::vector<TileTuner::Choice> ChoicesOf(absl::string_view text);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_TILE_CHOICES_H_
