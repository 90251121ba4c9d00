#include "scheduler/restore_plan.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "scheduler/box.h"

namespace dmuond::scheduler {
namespace {

std::string PartName(const Parameter& parameter, const Box& box) {
  return absl::StrCat("parameter '", parameter.name, "' box ", ToString(box));
}

// The saved boxes of one parameter, in an order in which those that meet a given box are found
// without looking at all: sorted along the dimension in which they differ most.
class SavedBoxes {
 public:
  SavedBoxes(const std::vector<SavedUnit>& saved, std::vector<int32_t> members)
      : saved_(saved), members_(std::move(members)) {
    const size_t dims = saved_[members_[0]].box.begin.size();
    size_t most = 0;
    for (size_t d = 0; d < dims; ++d) {
      std::set<int64_t> begins;
      for (int32_t member : members_) begins.insert(saved_[member].box.begin[d]);
      if (begins.size() <= most) continue;
      most = begins.size();
      axis_ = d;
    }
    if (dims == 0) return;
    std::stable_sort(members_.begin(), members_.end(),
                     [&](int32_t a, int32_t b) { return Begin(a) < Begin(b); });
    int64_t end = 0;
    for (int32_t member : members_) {
      end = std::max(end, saved_[member].box.end[axis_]);
      ends_.push_back(end);
    }
  }

  // Calls `found` with each member that has an element of `box`.
  void ForEach(const Box& box, absl::FunctionRef<void(int32_t)> found) const {
    if (box.begin.empty()) {
      for (int32_t member : members_) found(member);
      return;
    }
    const auto first = std::upper_bound(ends_.begin(), ends_.end(), box.begin[axis_]);
    for (size_t i = first - ends_.begin();
         i < members_.size() && Begin(members_[i]) < box.end[axis_]; ++i) {
      if (Intersects(saved_[members_[i]].box, box)) found(members_[i]);
    }
  }

  [[nodiscard]] const std::vector<int32_t>& members() const { return members_; }

 private:
  [[nodiscard]] int64_t Begin(int32_t member) const { return saved_[member].box.begin[axis_]; }

  const std::vector<SavedUnit>& saved_;
  std::vector<int32_t> members_;
  size_t axis_ = 0;
  std::vector<int64_t> ends_;  // the largest end of all up to here
};

absl::Status CheckSaved(const Layout& layout, const SavedUnit& unit) {
  if (unit.parameter < 0 || unit.parameter >= layout.parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "saved state of parameter number ", unit.parameter, " of ", layout.parameters.size()));
  }
  const Parameter& parameter = layout.parameters[unit.parameter];
  if (unit.box.begin.size() != parameter.shape.size() ||
      unit.box.end.size() != parameter.shape.size() || Empty(unit.box) ||
      !Contains(WholeBox(parameter.shape), unit.box)) {
    return absl::InvalidArgumentError(absl::StrCat("saved state of ", PartName(parameter, unit.box),
                                                   " is not inside the shape ",
                                                   ShapeToString(parameter.shape)));
  }
  return absl::OkStatus();
}

absl::Status CheckDisjoint(const Parameter& parameter, const std::vector<SavedUnit>& saved,
                           const SavedBoxes& boxes) {
  absl::Status status;
  for (int32_t member : boxes.members()) {
    boxes.ForEach(saved[member].box, [&](int32_t other) {
      if (other <= member || !status.ok()) return;
      status = absl::InvalidArgumentError(
          absl::StrCat("saved state of ", PartName(parameter, saved[member].box), " and box ",
                       ToString(saved[other].box), " overlaps"));
    });
  }
  return status;
}

// Adds the reads of one unit.
absl::Status PlanUnit(const Parameter& parameter, const Unit& unit,
                      const std::vector<SavedUnit>& saved, const SavedBoxes& boxes,
                      RestorePlan& plan) {
  int64_t elements = 0;
  int32_t first = -1;
  absl::Status status;
  std::vector<RestorePart>& lane = plan.lanes[unit.owner.value()];
  boxes.ForEach(unit.box, [&](int32_t member) {
    const SavedUnit& from = saved[member];
    if (!status.ok()) return;
    if (from.kind != unit.kind) {
      status = absl::FailedPreconditionError(
          absl::StrCat("saved state of ", PartName(parameter, from.box), " is of a ",
                       from.kind == UnitKind::kMatrix ? "matrix" : "piece", ", unit ",
                       ToString(unit.box), " is not"));
      return;
    }
    if (first >= 0 && saved[first].updates != from.updates) {
      status = absl::FailedPreconditionError(
          absl::StrCat("saved state of ", PartName(parameter, saved[first].box), " has had ",
                       saved[first].updates, " updates, that of box ", ToString(from.box), " ",
                       from.updates, "; box ", ToString(unit.box),
                       " cannot join them: restore with the boxes that were saved"));
      return;
    }
    if (first < 0) first = member;
    Box part = Intersect(from.box, unit.box);
    elements += Elements(part);
    lane.push_back({member, unit.id, std::move(part)});
  });
  if (!status.ok()) return status;
  if (elements != Elements(unit.box)) {
    return absl::FailedPreconditionError(
        absl::StrCat("saved state of ", PartName(parameter, unit.box), " has ", elements, " of ",
                     Elements(unit.box), " elements"));
  }
  plan.updates[unit.id.value()] = saved[first].updates;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RestorePlan> PlanRestore(const Layout& layout, const Plan& plan,
                                        const std::vector<SavedUnit>& saved) {
  std::vector<std::vector<int32_t>> members(layout.parameters.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    if (absl::Status status = CheckSaved(layout, saved[i]); !status.ok()) return status;
    members[saved[i].parameter].push_back(static_cast<int32_t>(i));
  }
  RestorePlan out;
  out.updates.resize(plan.units.size());
  out.lanes.resize(plan.lane_load_us.size());
  for (size_t u = 0; u < plan.units.size();) {  // units are sorted by parameter
    const int32_t index = plan.units[u].parameter;
    const Parameter& parameter = layout.parameters[index];
    if (members[index].empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("there is no saved state of parameter '", parameter.name, "'"));
    }
    const SavedBoxes boxes(saved, std::move(members[index]));
    if (absl::Status status = CheckDisjoint(parameter, saved, boxes); !status.ok()) return status;
    for (; u < plan.units.size() && plan.units[u].parameter == index; ++u) {
      absl::Status status = PlanUnit(parameter, plan.units[u], saved, boxes, out);
      if (!status.ok()) return status;
    }
  }
  for (std::vector<RestorePart>& lane : out.lanes) {
    std::stable_sort(lane.begin(), lane.end(), [](const RestorePart& a, const RestorePart& b) {
      return std::pair(a.saved, a.unit) < std::pair(b.saved, b.unit);
    });
  }
  return out;
}

}  // namespace dmuond::scheduler
