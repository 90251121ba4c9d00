#include "kernels/cuda/tile_choices.h"

#include <cstdint>
#include <iterator>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace dmuond::kernels::cuda {
namespace {

// Type, layout, symmetric, same_operands, addends, four sizes, tile; then microseconds.
constexpr size_t kNumbers = 10;

std::optional<TileTuner::Choice> ChoiceOf(absl::string_view line) {
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  if (words.size() != kNumbers + 1) return std::nullopt;
  int64_t numbers[kNumbers];
  for (size_t i = 0; i < kNumbers; ++i) {
    if (!absl::SimpleAtoi(words[i], &numbers[i]) || numbers[i] < 0) return std::nullopt;
  }
  TileTuner::Choice choice;
  if (!absl::SimpleAtod(words[kNumbers], &choice.microseconds)) return std::nullopt;
  const auto within = [&](size_t i, int64_t low, int64_t high) {
    return numbers[i] >= low && numbers[i] <= high;
  };
  if (!within(0, 1, static_cast<int64_t>(GemmType::kBF16)) ||
      !within(1, 1, static_cast<int64_t>(GemmLayout::kSS)) || !within(2, 0, 1) ||
      !within(3, 0, 1) || !within(4, 0, 2) ||
      !within(kNumbers - 1, 1, static_cast<int64_t>(std::size(kGemmTiles)))) {
    return std::nullopt;
  }
  choice.type = static_cast<GemmType>(numbers[0]);
  choice.layout = static_cast<GemmLayout>(numbers[1]);
  choice.symmetric = numbers[2] != 0;
  choice.same_operands = numbers[3] != 0;
  choice.addends = static_cast<int>(numbers[4]);
  for (size_t i = 0; i < choice.sizes.size(); ++i) choice.sizes[i] = numbers[5 + i];
  choice.tile = static_cast<GemmTile>(numbers[kNumbers - 1]);
  return choice;
}

}  // namespace

std::string ToText(std::span<const TileTuner::Choice> choices) {
  std::string text;
  for (const TileTuner::Choice& choice : choices) {
    absl::StrAppend(&text, static_cast<int>(choice.type), " ", static_cast<int>(choice.layout), " ",
                    choice.symmetric ? 1 : 0, " ", choice.same_operands ? 1 : 0, " ",
                    choice.addends, " ", absl::StrJoin(choice.sizes, " "), " ",
                    static_cast<int>(choice.tile), " ", choice.microseconds, "\n");
  }
  return text;
}

std::vector<TileTuner::Choice> ChoicesOf(absl::string_view text) {
  std::vector<TileTuner::Choice> choices;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::optional<TileTuner::Choice> choice = ChoiceOf(line);
    if (!choice.has_value() || choices.size() == kTileChoicesMax) return {};
    choices.push_back(*choice);
  }
  return choices;
}

}  // namespace dmuond::kernels::cuda
