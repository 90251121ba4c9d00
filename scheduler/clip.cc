#include "scheduler/clip.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// One number to add: where it belongs in the order of summation.
struct Term {
  int32_t parameter = 0;
  bool whole = false;  // not counted in blocks of the tensor: after those, by unit
  int64_t place = 0;   // block, or unit
  int64_t sub = 0;     // within the place: first element, or block of the unit
  double sum = 0;
  [[nodiscard]] auto Key() const { return std::tie(parameter, whole, place, sub); }
  [[nodiscard]] bool SharesBlock(const Term& other) const {
    return !whole && !other.whole && parameter == other.parameter && place == other.place;
  }
};

Term TermOf(const Unit& unit, const UnitNorm& norm, size_t i) {
  const int64_t block = norm.first_block + static_cast<int64_t>(i);
  if (!unit.flat) return {unit.parameter, true, norm.unit.value(), block, norm.sums[i]};
  return {unit.parameter, false, block, std::max(norm.first_element, unit.first_element),
          norm.sums[i]};
}

bool ComesBefore(const Term& a, const Term& b) { return a.Key() < b.Key(); }

absl::Status CheckComplete(const Layout& layout, const Plan& plan, const std::vector<bool>& active,
                           const std::vector<const UnitNorm*>& of_unit) {
  for (const Unit& unit : plan.units) {
    const size_t index = unit.id.value();
    if (of_unit[index] != nullptr || !active[index] || Empty(unit.box)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("no sum of squares for unit ", index, " of parameter \"",
                     layout.parameters[unit.parameter].name, "\""));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GradientNorm> TotalNorm(const Layout& layout, const Plan& plan,
                                       const std::vector<bool>& active,
                                       const std::vector<UnitNorm>& norms) {
  GradientNorm result;
  // The order of units is that of summation in every plan. The decision waits for this function,
  // and sorting the sums of ten thousand units would take milliseconds.
  std::vector<const UnitNorm*> of_unit(plan.units.size());
  size_t sums = 0;
  for (const UnitNorm& norm : norms) {
    const int32_t id = norm.unit.value();
    if (id < 0 || id >= static_cast<int32_t>(plan.units.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("sum of squares for unit ", id, " of ", plan.units.size()));
    }
    if (norm.sums.empty()) continue;
    if (std::exchange(of_unit[id], &norm) != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("two lists of sums of squares for unit ", id));
    }
    sums += norm.sums.size();
  }
  absl::Status complete = CheckComplete(layout, plan, active, of_unit);
  if (!complete.ok()) return complete;
  std::vector<Term> terms;
  terms.reserve(sums);
  for (const UnitNorm* norm : of_unit) {
    if (norm == nullptr) continue;
    for (size_t i = 0; i < norm->sums.size(); ++i) {
      terms.push_back(TermOf(plan.units[norm->unit.value()], *norm, i));
      if (!result.first_infinite.has_value() && !std::isfinite(norm->sums[i])) {
        result.first_infinite = norm->unit;
      }
    }
  }
  // Terms are out of order only where units share more than a block, which no plan has.
  if (!std::is_sorted(terms.begin(), terms.end(), ComesBefore)) {
    std::sort(terms.begin(), terms.end(), ComesBefore);
  }
  const auto twice = std::adjacent_find(
      terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.Key() == b.Key(); });
  if (twice != terms.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("two sums of squares for one block of parameter \"",
                     layout.parameters[twice->parameter].name, "\""));
  }
  double total = 0;
  for (size_t i = 0; i < terms.size();) {
    double block = terms[i].sum;
    size_t next = i + 1;
    while (next < terms.size() && terms[next].SharesBlock(terms[i])) block += terms[next++].sum;
    total += block;
    i = next;
  }
  result.norm = std::sqrt(total);
  return result;
}

double ClipCoefficient(double norm, double max_grad_norm) {
  if (!(max_grad_norm > 0)) return 1;
  return std::min(1.0, max_grad_norm / (norm + 1e-6));
}

std::vector<bool> ActiveUnits(const Layout& layout, const Plan& plan,
                              const std::vector<AbsentFragment>& absent) {
  std::vector<bool> active(plan.units.size(), true);
  if (absent.empty()) return active;
  for (const Unit& unit : plan.units) {
    const auto present = [&](int32_t fragment) {
      return !std::binary_search(absent.begin(), absent.end(),
                                 AbsentFragment{layout.fragments[fragment].rank, unit.parameter});
    };
    const std::vector<Cell>& cells = plan.cells[unit.id.value()];
    active[unit.id.value()] = std::any_of(cells.begin(), cells.end(), [&](const Cell& cell) {
      return std::any_of(cell.fragments.begin(), cell.fragments.end(), present);
    });
  }
  return active;
}

}  // namespace dmuond::scheduler
