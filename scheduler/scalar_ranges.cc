#include "scheduler/scalar_ranges.h"

#include <array>
#include <charconv>
#include <cstddef>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// Learning rates and decays beyond this are mistakes; their product, and a learning rate over the
// smallest 1 - beta1 that a double can have, are far from what fp32 cannot hold.
constexpr double kRateMax = 1e6;
// A normal number in fp32, and its inverse too.
constexpr double kSmallest = 1e-37;
constexpr double kLargest = 1e37;

struct Range {
  double least = 0;
  double most = 0;
  bool below_most = false;  // `most` itself is outside

  // False of NaN.
  [[nodiscard]] bool Holds(double value) const {
    return value >= least && (below_most ? value < most : value <= most);
  }
};

std::string Shortest(double value) {
  std::array<char, 32> text{};
  const std::to_chars_result end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

std::string Words(const Range& range) {
  return absl::StrCat("at least ", Shortest(range.least),
                      range.below_most ? " and less than " : " and at most ", Shortest(range.most));
}

std::vector<bool> GroupsOnAdamW(size_t groups, const std::vector<Parameter>& parameters) {
  std::vector<bool> on_adamw(groups);
  for (const Parameter& parameter : parameters) {
    const auto group = static_cast<size_t>(parameter.group);
    if (parameter.route == Route::kAdamW && group < groups) on_adamw[group] = true;
  }
  return on_adamw;
}

}  // namespace

std::optional<ScalarOutOfRange> FindOutOfRange(const StepScalars& scalars,
                                               const std::vector<Parameter>& parameters) {
  constexpr Range kRate{.least = 0, .most = kRateMax};
  constexpr Range kMean{.least = 0, .most = 1, .below_most = true};
  const std::vector<bool> on_adamw = GroupsOnAdamW(scalars.groups.size(), parameters);
  struct Field {
    std::string name;
    double value;
    Range range;
  };
  const auto check = [](const Field& field) -> std::optional<ScalarOutOfRange> {
    if (field.range.Holds(field.value)) return std::nullopt;
    return ScalarOutOfRange{field.name, Shortest(field.value), Words(field.range)};
  };
  for (size_t g = 0; g < scalars.groups.size(); ++g) {
    const GroupScalars& group = scalars.groups[g];
    const auto named = [g](const char* name) { return absl::StrCat("groups[", g, "].", name); };
    // Without eps AdamW divides 0 by 0 where a gradient has always been 0.
    const Range eps{.least = on_adamw[g] ? kSmallest : 0, .most = kRateMax};
    for (const Field& field :
         {Field{named("learning_rate"), group.learning_rate, kRate},
          Field{named("weight_decay"), group.weight_decay, kRate},
          Field{named("momentum"), group.momentum, kMean},
          Field{named("beta1"), group.beta1, kMean}, Field{named("beta2"), group.beta2, kMean},
          Field{named("eps"), group.eps, eps}}) {
      if (auto wrong = check(field)) return wrong;
    }
  }
  if (auto wrong =
          check({"loss_scale", scalars.loss_scale, {.least = kSmallest, .most = kLargest}})) {
    return wrong;
  }
  return check({"max_grad_norm", scalars.max_grad_norm, {.least = 0, .most = kLargest}});
}

}  // namespace dmuond::scheduler
