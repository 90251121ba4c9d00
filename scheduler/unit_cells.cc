#include "scheduler/unit_cells.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/fragment_algebra.h"

namespace dmuond::scheduler {
namespace {

// Fills the cells of the units [first, last), all of one parameter whose fragments are [begin,
// end).
absl::Status FillParameter(const Layout& layout, int32_t begin, int32_t end, size_t first,
                           size_t last, Plan& plan) {
  std::vector<Holding> holdings;
  for (int32_t f = begin; f < end; ++f) holdings.push_back({layout.fragments[f].box, f});
  const std::vector<HeldBox> held = GroupEqualBoxes(std::move(holdings));
  // Units and boxes are in order of where they begin: a box that ends before a unit begins reaches
  // into no later one.
  std::vector<int32_t> near;
  size_t next = 0;
  for (size_t u = first; u < last; ++u) {
    const Unit& unit = plan.units[u];
    if (!unit.box.begin.empty()) {
      std::erase_if(near, [&](int32_t h) { return held[h].box.end[0] <= unit.box.begin[0]; });
    }
    while (next < held.size() &&
           (unit.box.begin.empty() || held[next].box.begin[0] < unit.box.end[0])) {
      near.push_back(static_cast<int32_t>(next++));
    }
    auto cells = Arrange(unit.box, held, near);
    if (!cells.ok()) {
      return absl::Status(cells.status().code(),
                          absl::StrCat("parameter '", layout.parameters[unit.parameter].name,
                                       "': ", cells.status().message()));
    }
    for (ArrangedCell& cell : *cells) {
      std::vector<int32_t> fragments = LabelsOf(cell, held);
      plan.weight_cells[u].push_back({cell.box, {fragments.front()}});
      if (layout.fragments[fragments.front()].contribution == Contribution::kSame) {
        fragments.resize(1);
      } else {
        std::erase_if(fragments, [&](int32_t f) {
          return layout.fragments[f].contribution == Contribution::kNone;
        });
      }
      plan.gradient_cells[u].push_back({std::move(cell.box), std::move(fragments)});
    }
    ArrangedCell all;
    for (const int32_t h : near) {
      if (Intersects(held[h].box, unit.box)) all.held.push_back(h);
    }
    plan.holders[u] = LabelsOf(all, held);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::pair<int32_t, int32_t>> FragmentRanges(const Layout& layout) {
  std::vector<std::pair<int32_t, int32_t>> ranges(layout.parameters.size());
  int32_t f = 0;
  for (size_t p = 0; p < ranges.size(); ++p) {
    ranges[p].first = f;
    while (f < static_cast<int32_t>(layout.fragments.size()) &&
           layout.fragments[f].parameter == static_cast<int32_t>(p)) {
      ++f;
    }
    ranges[p].second = f;
  }
  return ranges;
}

absl::Status FillCells(const Layout& layout, Plan& plan) {
  plan.gradient_cells.assign(plan.units.size(), {});
  plan.weight_cells.assign(plan.units.size(), {});
  plan.holders.assign(plan.units.size(), {});
  const auto ranges = FragmentRanges(layout);
  for (size_t first = 0; first < plan.units.size();) {
    const int32_t p = plan.units[first].parameter;
    size_t last = first;
    while (last < plan.units.size() && plan.units[last].parameter == p) ++last;
    absl::Status status =
        FillParameter(layout, ranges[p].first, ranges[p].second, first, last, plan);
    if (!status.ok()) return status;
    first = last;
  }
  return absl::OkStatus();
}

}  // namespace dmuond::scheduler
