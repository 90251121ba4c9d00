#include "scheduler/unit_cells.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/fragment_algebra.h"

namespace dmuond::scheduler {
namespace {

// Units of one parameter, and the boxes near each of them.
class Sweep {
 public:
  // Units [first, last) of the plan. Goes along the dimension in which most boxes begin at places
  // of their own, so that few boxes are near a unit however the tensor is sharded.
  Sweep(const std::vector<Unit>& units, size_t first, size_t last, const std::vector<HeldBox>& held)
      : held_(held), scalar_(units[first].box.begin.empty()) {
    std::vector<Box> boxes;
    boxes.reserve(held.size());
    for (const HeldBox& box : held) boxes.push_back(box.box);
    if (!scalar_) dim_ = MostDifferent(boxes);
    for (size_t u = first; u < last; ++u) units_.push_back(u);
    for (size_t h = 0; h < held.size(); ++h) boxes_.push_back(static_cast<int32_t>(h));
    if (scalar_ || dim_ == 0) return;  // both are in that order already
    std::stable_sort(units_.begin(), units_.end(), [&](size_t a, size_t b) {
      return units[a].box.begin[dim_] < units[b].box.begin[dim_];
    });
    std::stable_sort(boxes_.begin(), boxes_.end(), [&](int32_t a, int32_t b) {
      return held[a].box.begin[dim_] < held[b].box.begin[dim_];
    });
  }

  [[nodiscard]] const std::vector<size_t>& units() const { return units_; }

  // Boxes that may reach into the unit, ascending: all that do. REQUIRES: called for units() in
  // their order.
  const std::vector<int32_t>& Near(const Unit& unit) {
    if (!scalar_) {
      std::erase_if(near_,
                    [&](int32_t h) { return held_[h].box.end[dim_] <= unit.box.begin[dim_]; });
    }
    for (; next_ < boxes_.size(); ++next_) {
      const int32_t h = boxes_[next_];
      if (!scalar_ && held_[h].box.begin[dim_] >= unit.box.end[dim_]) break;
      near_.insert(std::upper_bound(near_.begin(), near_.end(), h), h);
    }
    return near_;
  }

 private:
  const std::vector<HeldBox>& held_;
  const bool scalar_;
  size_t dim_ = 0;
  std::vector<size_t> units_;   // by begin in dim_
  std::vector<int32_t> boxes_;  // likewise
  size_t next_ = 0;             // of boxes_
  std::vector<int32_t> near_;   // ascending
};

// Fills the cells of the units [first, last), all of one parameter whose fragments are [begin,
// end).
absl::Status FillParameter(const Layout& layout, int32_t begin, int32_t end, size_t first,
                           size_t last, Plan& plan) {
  std::vector<Holding> holdings;
  holdings.reserve(end - begin);
  for (int32_t f = begin; f < end; ++f) holdings.push_back({layout.fragments[f].box, f});
  const std::vector<HeldBox> held = GroupEqualBoxes(std::move(holdings));
  Sweep sweep(plan.units, first, last, held);
  for (const size_t u : sweep.units()) {
    const Unit& unit = plan.units[u];
    const std::vector<int32_t>& near = sweep.Near(unit);
    auto cells = Arrange(unit.box, held, near);
    if (!cells.ok()) {
      return absl::Status(cells.status().code(),
                          absl::StrCat("parameter '", layout.parameters[unit.parameter].name,
                                       "': ", cells.status().message()));
    }
    plan.cells[u].reserve(cells->size());
    for (ArrangedCell& cell : *cells) {
      Indices fragments = LabelsOf(cell, held);
      const int32_t lowest = fragments.front();
      if (layout.fragments[lowest].contribution == Contribution::kSame) {
        fragments.resize(1);
      } else {
        fragments.erase(
            std::remove_if(
                fragments.begin(), fragments.end(),
                [&](int32_t f) { return layout.fragments[f].contribution == Contribution::kNone; }),
            fragments.end());
      }
      Cell& of_unit = plan.cells[u].emplace_back();
      of_unit.box = std::move(cell.box);
      of_unit.fragments = std::move(fragments);
      of_unit.lowest = lowest;
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
  plan.cells.assign(plan.units.size(), {});
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
