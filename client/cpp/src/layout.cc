#include "dmuond/client/layout.h"

#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace dmuond::client {
namespace {

absl::Status CheckBox(const ParameterSpec& spec, const Box& box) {
  const size_t dims = spec.shape.size();
  bool inside = box.begin.size() == dims && box.end.size() == dims;
  for (size_t d = 0; inside && d < dims; ++d) {
    inside = 0 <= box.begin[d] && box.begin[d] <= box.end[d] && box.end[d] <= spec.shape[d];
  }
  if (inside) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", spec.name, "': box [", absl::StrJoin(box.begin, ", "), "] to [",
                   absl::StrJoin(box.end, ", "), "] is not inside shape [",
                   absl::StrJoin(spec.shape, ", "), "]"));
}

// Elements of a box; INVALID_ARGUMENT where they cannot be counted.
absl::StatusOr<int64_t> CountElements(const ParameterSpec& spec, const Box& box) {
  constexpr int64_t kElementsMax = std::numeric_limits<int64_t>::max() / 16;
  int64_t count = 1;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    const int64_t extent = box.end[d] - box.begin[d];
    if (extent == 0) return 0;
    if (count > kElementsMax / extent) {
      return absl::InvalidArgumentError(absl::StrCat("parameter '", spec.name, "': shape [",
                                                     absl::StrJoin(spec.shape, ", "),
                                                     "] has too many elements"));
    }
    count *= extent;
  }
  return count;
}

Extents DenseStrides(const Box& box) {
  Extents strides(box.begin.size(), 1);
  for (size_t d = strides.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * (box.end[d] - box.begin[d]);
  }
  return strides;
}

// Takes the next aligned place in an arena.
Slice Place(ArenaSpec& arena, const Box& box, int64_t bytes) {
  Slice slice{arena.id, arena.size_bytes, DenseStrides(box)};
  arena.size_bytes += (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  return slice;
}

}  // namespace

int32_t LayoutBuilder::AddGroup(GroupConfig group) {
  groups_.push_back(std::move(group));
  return static_cast<int32_t>(groups_.size()) - 1;
}

int32_t LayoutBuilder::Add(ParameterSpec spec) {
  specs_.push_back(std::move(spec));
  return static_cast<int32_t>(specs_.size()) - 1;
}

absl::StatusOr<Layout> LayoutBuilder::Build() const {
  Layout layout;
  layout.bucket_bytes = bucket_bytes_;
  layout.groups = groups_;
  if (layout.groups.empty()) layout.groups.emplace_back();
  ArenaSpec gradients{kGradientArena, 0};
  ArenaSpec weights{kWeightArena, 0};
  for (size_t i = 0; i < specs_.size(); ++i) {
    const ParameterSpec& spec = specs_[i];
    const bool sums_replicas = !spec.box.has_value() && spec.contribution == Contribution::kSum;
    Parameter parameter;
    parameter.name = spec.name;
    parameter.shape = spec.shape;
    parameter.weight_type = spec.type;
    parameter.gradient_type = spec.gradient_type.value_or(spec.type);
    parameter.route = spec.route;
    parameter.route_reason = spec.route_reason.empty() ? "named by the trainer" : spec.route_reason;
    parameter.view = spec.view;
    parameter.group = spec.group;
    parameter.reduce_factor = spec.reduce_factor.value_or(sums_replicas ? 1.0 / world_size_ : 1.0);
    parameter.held_by_all = sums_replicas && !spec.reduce_factor.has_value();
    parameter.ready_order = spec.ready_order.value_or(static_cast<int32_t>(specs_.size() - 1 - i));

    Fragment fragment;
    fragment.parameter = static_cast<int32_t>(i);
    fragment.box = spec.box.value_or(Box{Extents(spec.shape.size(), 0), spec.shape});
    fragment.contribution = spec.contribution;
    absl::Status status = CheckBox(spec, fragment.box);
    if (!status.ok()) return status;
    ASSIGN_OR_RETURN(int64_t elements, CountElements(spec, fragment.box));
    if (spec.route != Route::kTrainer) {
      fragment.gradient =
          Place(gradients, fragment.box, elements * SizeOf(parameter.gradient_type));
      fragment.weight = Place(weights, fragment.box, elements * SizeOf(parameter.weight_type));
    }
    layout.parameters.push_back(std::move(parameter));
    layout.fragments.push_back(std::move(fragment));
  }
  // A trainer may hold nothing but empty boxes.
  if (gradients.size_bytes > 0) layout.arenas = {gradients, weights};
  return layout;
}

}  // namespace dmuond::client
