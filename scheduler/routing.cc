#include "scheduler/routing.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "scheduler/matrix_view.h"

namespace dmuond::scheduler {
namespace {

// How the parameter is split, in words; empty where it is not.
std::string Split(const Parameter& parameter, int64_t units) {
  if (parameter.route == Route::kAdamW) {
    return units > 1 ? absl::StrCat(units, " pieces") : "";
  }
  if (parameter.route != Route::kMuon || units <= 1) return "";
  if (parameter.view.kind == MatrixView::Kind::kWhole) {
    return absl::StrCat("batch of ", units, " matrices");
  }
  return ToString(parameter.view);
}

}  // namespace

std::vector<RoutingRow> RoutingTable(const Layout& layout, const Plan& plan) {
  std::vector<RoutingRow> rows;
  std::vector<int64_t> units(layout.parameters.size(), 0);
  for (const Parameter& parameter : layout.parameters) {
    rows.push_back({.parameter = parameter.name,
                    .shape = parameter.shape,
                    .route = parameter.route,
                    .group = parameter.group});
  }
  for (const Unit& unit : plan.units) {
    rows[unit.parameter].owners.push_back(unit.owner);
    ++units[unit.parameter];
    if (unit.kind == UnitKind::kMatrix) ++rows[unit.parameter].matrices;
  }
  for (size_t p = 0; p < rows.size(); ++p) {
    std::vector<LaneId>& owners = rows[p].owners;
    std::sort(owners.begin(), owners.end());
    owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
    const std::string split = Split(layout.parameters[p], units[p]);
    const std::string& reason = layout.parameters[p].route_reason;
    rows[p].why = absl::StrCat(reason, reason.empty() || split.empty() ? "" : "; ", split);
  }
  return rows;
}

}  // namespace dmuond::scheduler
