// Validate(): what can be said of one trainer's registration without the others'.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "scheduler/fragment_algebra.h"
#include "scheduler/layout.h"
#include "scheduler/matrix_view.h"
#include "scheduler/reason.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {
namespace {

template <typename... Words>
absl::Status Refuse(const Registration& registration, const Words&... words) {
  return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
               Say("trainer ", Named("rank", registration.rank.value()), ": ", words...));
}

absl::Status ValidatePlace(const Registration& registration) {
  if (registration.rank.value() >= 0 && registration.node.value() >= 0 &&
      registration.home.value() >= 0) {
    return absl::OkStatus();
  }
  return Refuse(registration, "negative rank, node ", registration.node.value(), " or lane ",
                registration.home.value());
}

absl::Status ValidateShape(const Registration& registration, const Parameter& parameter) {
  if (parameter.shape.size() > kDimsMax) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' has ",
                  Named("dimensions", parameter.shape.size()), " dimensions; at most ", kDimsMax,
                  " are allowed");
  }
  int64_t elements = 1;
  for (int64_t extent : parameter.shape) {
    if (extent < 0) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                    "' has the negative extent ", Named("extent", extent));
    }
    if (extent == 0 && parameter.route != Route::kTrainer) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' of shape ",
                    Named("shape", ShapeToString(parameter.shape)),
                    " has no elements; route it to trainer");
    }
    if (extent > 0 && elements > kElementsMax / extent) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' of shape ",
                    Named("shape", ShapeToString(parameter.shape)), " has more than ",
                    Named("elements_max", kElementsMax), " elements");
    }
    elements *= std::max<int64_t>(extent, 1);
  }
  return absl::OkStatus();
}

bool Known(ElementType type) {
  return type == ElementType::kF32 || type == ElementType::kBF16 || type == ElementType::kF16;
}

absl::Status ValidateParameter(const Registration& registration, const Parameter& parameter) {
  if (parameter.name.empty()) return Refuse(registration, "a parameter without a name");
  if (static_cast<int64_t>(parameter.name.size()) > kNameBytesMax) {
    return Refuse(registration, "a parameter name of ", Named("bytes", parameter.name.size()),
                  " bytes; at most ", kNameBytesMax, " are allowed");
  }
  if (parameter.route != Route::kMuon && parameter.route != Route::kAdamW &&
      parameter.route != Route::kTrainer) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                  "' has the unknown route ", Named("route", static_cast<int>(parameter.route)));
  }
  if (absl::Status status = ValidateShape(registration, parameter); !status.ok()) return status;
  if (parameter.route == Route::kTrainer) return absl::OkStatus();
  for (ElementType type : {parameter.weight_type, parameter.gradient_type}) {
    if (!Known(type)) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                    "' has the unknown element type ", Named("type", static_cast<int>(type)));
    }
  }
  if (!std::isfinite(parameter.reduce_factor) || parameter.reduce_factor == 0) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                  "' has the reduce factor ", Named("reduce_factor", parameter.reduce_factor));
  }
  if (parameter.group < 0) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' is in group ",
                  parameter.group);
  }
  if (parameter.route == Route::kMuon) {
    if (absl::Status status = ValidateView(parameter); !status.ok()) {
      return Refuse(registration, MessageOf(status));
    }
  }
  return absl::OkStatus();
}

// Whether no two elements of the box lie at the same address: sorted by stride, each step jumps
// over everything that the smaller strides reach.
bool AddressesDiffer(const Slice& slice, const Box& box) {
  absl::InlinedVector<std::pair<int64_t, int64_t>, 4> steps;  // stride, extent
  for (size_t d = 0; d < box.begin.size(); ++d) {
    const int64_t extent = box.end[d] - box.begin[d];
    if (extent > 1) steps.emplace_back(slice.strides[d], extent);
  }
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto& [stride, extent] : steps) {
    if (stride <= reach) return false;
    reach += stride * (extent - 1);
  }
  return true;
}

absl::Status ValidateSlice(const Registration& registration, const Parameter& parameter,
                           const Box& box, const char* what, const Slice& slice, ElementType type) {
  const auto refuse = [&](const auto&... words) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' box ",
                  Named("box", ToString(box)), ": ", Named("tensor", what), " ", words...);
  };
  int64_t end_bytes = 0;
  if (absl::Status status = SliceEnd(slice, box, type, end_bytes); !status.ok()) {
    return refuse(MessageOf(status));
  }
  if (slice.offset_bytes % SizeOf(type) != 0) {
    return refuse("offset ", Named("offset_bytes", slice.offset_bytes),
                  " is not a multiple of the ", SizeOf(type), " bytes of ", Name(type));
  }
  if (!Empty(box) && !AddressesDiffer(slice, box)) {
    return refuse("strides (", Named("strides", ShapeToString(slice.strides)),
                  ") put several elements at one address");
  }
  return absl::OkStatus();
}

absl::Status ValidateFragment(const Registration& registration, const Fragment& fragment) {
  if (fragment.rank != registration.rank) {
    return Refuse(registration, "a fragment that names trainer ",
                  Named("fragments_rank", fragment.rank.value()));
  }
  if (fragment.parameter < 0 ||
      fragment.parameter >= static_cast<int64_t>(registration.parameters.size())) {
    return Refuse(registration, "a fragment of parameter number ", fragment.parameter, " of ",
                  registration.parameters.size());
  }
  const Parameter& parameter = registration.parameters[fragment.parameter];
  const Box& box = fragment.box;
  if (box.begin.size() != parameter.shape.size() || box.end.size() != parameter.shape.size()) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name), "' of shape ",
                  Named("shape", ShapeToString(parameter.shape)), ": a box of ",
                  Named("dimensions", box.begin.size()), " dimensions");
  }
  for (size_t d = 0; d < box.begin.size(); ++d) {
    if (box.begin[d] < 0 || box.begin[d] > box.end[d] || box.end[d] > parameter.shape[d]) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name), "': box ",
                    Named("box", ToString(box)), " is not inside its shape ",
                    Named("shape", ShapeToString(parameter.shape)));
    }
  }
  if (parameter.route == Route::kTrainer) return absl::OkStatus();
  if (fragment.contribution != Contribution::kSum && fragment.contribution != Contribution::kSame &&
      fragment.contribution != Contribution::kNone) {
    return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                  "' has the unknown contribution ",
                  Named("contribution", static_cast<int>(fragment.contribution)));
  }
  if (absl::Status status = ValidateSlice(registration, parameter, box, "gradient",
                                          fragment.gradient, parameter.gradient_type);
      !status.ok()) {
    return status;
  }
  return ValidateSlice(registration, parameter, box, "weight", fragment.weight,
                       parameter.weight_type);
}

// Counts, before anything is done whose time grows faster than they do.
absl::Status ValidateCounts(const Registration& registration) {
  const auto most = [&](size_t count, const char* what, int64_t count_max) {
    return Refuse(registration, Named(what, count), " ", what, "; at most ",
                  Named("at_most", count_max), " are allowed");
  };
  if (registration.parameters.size() > kParametersMax) {
    return most(registration.parameters.size(), "parameters", kParametersMax);
  }
  if (registration.fragments.size() > kFragmentsMax) {
    return most(registration.fragments.size(), "fragments", kFragmentsMax);
  }
  std::vector<int32_t> boxes(registration.parameters.size(), 0);
  for (const Fragment& fragment : registration.fragments) {
    const bool known = fragment.parameter >= 0 && fragment.parameter < std::ssize(boxes);
    if (known) ++boxes[fragment.parameter];  // others are refused by name
  }
  for (size_t p = 0; p < boxes.size(); ++p) {
    if (boxes[p] <= kBoxesPerParameterMax) continue;
    return Refuse(registration, "parameter '", Named("parameter", registration.parameters[p].name),
                  "' has ", Named("fragments", boxes[p]), " fragments; at most ",
                  Named("at_most", kBoxesPerParameterMax), " are allowed for one trainer");
  }
  return absl::OkStatus();
}

absl::Status ValidateNoOverlap(const Registration& registration) {
  std::vector<int32_t> count(registration.parameters.size(), 0);
  for (const Fragment& fragment : registration.fragments) ++count[fragment.parameter];
  std::map<int32_t, std::vector<Box>> several;  // of parameters with more than one box
  for (const Fragment& fragment : registration.fragments) {
    if (count[fragment.parameter] > 1) several[fragment.parameter].push_back(fragment.box);
  }
  for (const auto& [p, boxes] : several) {
    const auto overlap = FindOverlap(boxes);
    if (!overlap.has_value()) continue;
    const Parameter& parameter = registration.parameters[p];
    const Box& a = boxes[overlap->first];
    const Box& b = boxes[overlap->second];
    if (a == b) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name), "': box ",
                    Named("box", ToString(a)), " is registered ",
                    Named("times", std::count(boxes.begin(), boxes.end(), a)), " times");
    }
    return Refuse(registration, "parameter '", Named("parameter", parameter.name), "': its boxes ",
                  Named("box", ToString(a)), " and ", Named("other_box", ToString(b)),
                  " overlap in ", Named("overlap", ToString(Intersect(a, b))));
  }
  return absl::OkStatus();
}

// A consecutive stretch of an arena.
struct Stretch {
  uint32_t arena = 0;
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  bool weight = false;
  const std::string* parameter = nullptr;
};

// Weights are written every step: no byte of one may belong to another weight or to a gradient.
// Looked at where slices are consecutive memory; interleaved ones may lie between each other.
absl::Status ValidateArenas(const Registration& registration) {
  std::vector<Stretch> stretches;
  stretches.reserve(2 * registration.fragments.size());
  for (const Fragment& fragment : registration.fragments) {
    const Parameter& parameter = registration.parameters[fragment.parameter];
    if (parameter.route == Route::kTrainer || Empty(fragment.box)) continue;
    for (const bool weight : {false, true}) {
      const Slice& slice = weight ? fragment.weight : fragment.gradient;
      if (!IsContiguous({0, ShapeOf(fragment.box), slice.strides})) continue;
      const ElementType type = weight ? parameter.weight_type : parameter.gradient_type;
      stretches.push_back({slice.arena, slice.offset_bytes,
                           slice.offset_bytes + Elements(fragment.box) * SizeOf(type), weight,
                           &parameter.name});
    }
  }
  std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) {
    return std::tie(a.arena, a.begin_bytes) < std::tie(b.arena, b.begin_bytes);
  });
  // The stretches so far that reach furthest: of all, and of weights alone.
  const Stretch* furthest = nullptr;
  const Stretch* furthest_weight = nullptr;
  for (const Stretch& s : stretches) {
    const Stretch* before = s.weight ? furthest : furthest_weight;
    if (before != nullptr && before->arena == s.arena && before->end_bytes > s.begin_bytes) {
      return Refuse(registration, "arena ", Named("arena", s.arena), ": the ",
                    before->weight ? "weight" : "gradient", " of parameter '",
                    Named("parameter", *before->parameter), "' ends at byte ",
                    Named("end_bytes", before->end_bytes), ", behind the beginning of the ",
                    s.weight ? "weight" : "gradient", " of '",
                    Named("other_parameter", *s.parameter), "' at byte ",
                    Named("begin_bytes", s.begin_bytes));
    }
    const auto further = [&](const Stretch* than) {
      return than == nullptr || than->arena != s.arena || than->end_bytes < s.end_bytes;
    };
    if (further(furthest)) furthest = &s;
    if (s.weight && further(furthest_weight)) furthest_weight = &s;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const Registration& registration) {
  if (absl::Status status = ValidatePlace(registration); !status.ok()) return status;
  if (absl::Status status = ValidateCounts(registration); !status.ok()) return status;
  absl::flat_hash_map<absl::string_view, const Parameter*> names;
  names.reserve(registration.parameters.size());
  for (const Parameter& parameter : registration.parameters) {
    if (absl::Status status = ValidateParameter(registration, parameter); !status.ok()) {
      return status;
    }
    const auto [other, added] = names.emplace(parameter.name, &parameter);
    if (!added) {
      return Refuse(registration, "parameter '", Named("parameter", parameter.name),
                    "' is registered twice, with shapes ",
                    Named("other_shape", ShapeToString(other->second->shape)), " and ",
                    Named("shape", ShapeToString(parameter.shape)));
    }
  }
  return ValidateFragments(registration);
}

absl::Status ValidateFragments(const Registration& registration) {
  if (absl::Status status = ValidatePlace(registration); !status.ok()) return status;
  for (const Fragment& fragment : registration.fragments) {
    if (absl::Status status = ValidateFragment(registration, fragment); !status.ok()) {
      return status;
    }
  }
  if (absl::Status status = ValidateNoOverlap(registration); !status.ok()) return status;
  return ValidateArenas(registration);
}

}  // namespace dmuond::scheduler
