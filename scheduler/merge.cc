// MergeRegistrations(): one layout out of what all trainers of a world say.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "scheduler/fragment_algebra.h"
#include "scheduler/layout.h"
#include "scheduler/matrix_view.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// "3, 5-7": at most so many ranges that a message stays readable.
std::string Ranges(const std::vector<int32_t>& ranks) {
  constexpr int kRangesMax = 32;
  std::string text;
  int ranges = 0;
  for (size_t i = 0; i < ranks.size(); ++ranges) {
    if (ranges == kRangesMax) return absl::StrCat(text, ", ... (", ranks.size(), " in all)");
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    absl::StrAppend(&text, i == 0 ? "" : ", ", ranks[i]);
    if (j > i) absl::StrAppend(&text, "-", ranks[j]);
    i = j + 1;
  }
  return text;
}

// Ranks 0 … world-1, each once. `sorted` by rank.
absl::Status CheckWorld(const std::vector<Trainer>& sorted, int32_t world_size) {
  if (world_size < 1 || world_size > kWorldMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("world size ", world_size, " is not within 1 and ", kWorldMax));
  }
  std::vector<int32_t> missing;
  int32_t expected = 0;
  for (const Trainer& trainer : sorted) {
    const int32_t rank = trainer.rank.value();
    if (rank >= world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("trainer ", rank, " is outside the world of ", world_size));
    }
    if (rank < expected) {
      return absl::InvalidArgumentError(absl::StrCat("trainer ", rank, " has registered twice"));
    }
    for (; expected < rank; ++expected) missing.push_back(expected);
    expected = rank + 1;
  }
  for (; expected < world_size; ++expected) missing.push_back(expected);
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("missing from the world of ", world_size, ": trainer(s) ", Ranges(missing)));
}

// Names what differs between the parameter as its first holder and as another trainer has it.
absl::Status CheckSame(const Parameter& a, TrainerRank rank_a, const Parameter& b,
                       TrainerRank rank_b) {
  const auto differ = [&](const char* what, const auto& value_a, const auto& value_b) {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_DIFFERS",
                 Say("parameter '", Named("parameter", a.name), "': trainers ",
                     Named("rank", rank_a.value()), " and ", Named("other_rank", rank_b.value()),
                     " register different ", Named("field", what), ": ", Named("value", value_a),
                     " and ", Named("other_value", value_b)));
  };
  if (a.shape != b.shape) {
    return differ("shapes", ShapeToString(a.shape), ShapeToString(b.shape));
  }
  if (a.route != b.route) return differ("routes", Name(a.route), Name(b.route));
  if (a.route == Route::kTrainer) return absl::OkStatus();
  if (a.weight_type != b.weight_type) {
    return differ("weight types", Name(a.weight_type), Name(b.weight_type));
  }
  if (a.gradient_type != b.gradient_type) {
    return differ("gradient types", Name(a.gradient_type), Name(b.gradient_type));
  }
  if (a.route == Route::kMuon && !(a.view == b.view)) {
    return differ("matrix views", ToString(a.view), ToString(b.view));
  }
  if (a.group != b.group) return differ("parameter groups", a.group, b.group);
  if (a.reduce_factor != b.reduce_factor) {
    return differ("reduce factors", a.reduce_factor, b.reduce_factor);
  }
  return absl::OkStatus();
}

// What must hold of the layout of a whole world. Fragments are sorted by parameter.
class WholeCheck {
 public:
  explicit WholeCheck(const Layout& layout) : layout_(layout) {}

  [[nodiscard]] absl::Status Run() const {
    if (absl::Status status = CheckElements(); !status.ok()) return status;
    const int64_t fragments = std::ssize(layout_.fragments);
    Budget budget = {.work = kArrangeWorkMin + kArrangeWorkPerFragment * fragments,
                     .cells = kCellsMin + kCellsPerFragment * fragments};
    size_t begin = 0;
    for (size_t p = 0; p < layout_.parameters.size(); ++p) {
      size_t end = begin;
      while (end < layout_.fragments.size() && layout_.fragments[end].parameter == p) ++end;
      if (layout_.parameters[p].route != Route::kTrainer) {
        if (absl::Status status = CheckParameter(layout_.parameters[p], begin, end, budget);
            !status.ok()) {
          return status;
        }
      }
      begin = end;
    }
    return absl::OkStatus();
  }

 private:
  // What arranging all boxes may cost yet.
  struct Budget {
    int64_t work = 0;
    int64_t cells = 0;
  };

  absl::Status CheckElements() const {
    int64_t elements = 0;
    for (const Parameter& parameter : layout_.parameters) {
      if (parameter.route == Route::kTrainer) continue;
      const int64_t its = Elements(WholeBox(parameter.shape));
      if (its > kJobElementsMax - elements) {
        return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                     Say("the parameters up to '", Named("parameter", parameter.name),
                         "' of shape ", Named("shape", ShapeToString(parameter.shape)), " have ",
                         Named("elements", elements + its), " elements in all; at most ",
                         Named("at_most", kJobElementsMax), " are allowed in a job"));
      }
      elements += its;
    }
    return absl::OkStatus();
  }

  absl::Status CheckParameter(const Parameter& parameter, size_t begin, size_t end,
                              Budget& budget) const {
    if (absl::Status status = CheckHeldByAll(parameter, begin, end); !status.ok()) return status;
    std::vector<Holding> holdings;
    holdings.reserve(end - begin);
    for (size_t f = begin; f < end; ++f) {
      const LayoutFragment& first = layout_.fragments[begin];
      const LayoutFragment& fragment = layout_.fragments[f];
      if ((fragment.contribution == Contribution::kSame) !=
          (first.contribution == Contribution::kSame)) {
        return Error(
            absl::StatusCode::kInvalidArgument, "LAYOUT_DIFFERS",
            Say("parameter '", Named("parameter", parameter.name), "': trainers ",
                Named("rank", first.rank.value()), " and ",
                Named("other_rank", fragment.rank.value()),
                " register different contributions: ", Named("value", Name(first.contribution)),
                " and ", Named("other_value", Name(fragment.contribution))));
      }
      holdings.push_back({fragment.box, static_cast<int32_t>(f)});
    }
    const std::vector<HeldBox> held = GroupEqualBoxes(std::move(holdings));
    auto cells = ArrangeWithin(budget.work, WholeBox(parameter.shape), held);
    if (!cells.ok()) {
      return Error(
          cells.status().code(), "LAYOUT_INVALID",
          Say("parameter '", Named("parameter", parameter.name), "': ", cells.status().message()));
    }
    budget.cells -= std::ssize(*cells);
    if (budget.cells < 0) {
      return Error(
          absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
          Say("up to parameter '", Named("parameter", parameter.name),
              "' the boxes of all trainers fall apart into more than ",
              Named("at_most", kCellsMin + kCellsPerFragment * std::ssize(layout_.fragments)),
              " cells: shards that are rows, columns or tiles of one grid do not"));
    }
    std::vector<bool> gives;  // by held box: whether one of its holders gives a gradient
    gives.reserve(held.size());
    for (const HeldBox& box : held) {
      gives.push_back(std::any_of(box.labels.begin(), box.labels.end(), [&](int32_t f) {
        return layout_.fragments[f].contribution != Contribution::kNone;
      }));
    }
    for (const ArrangedCell& cell : *cells) {
      if (cell.held.empty()) {
        return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                     Say("parameter '", Named("parameter", parameter.name), "' of shape ",
                         Named("shape", ShapeToString(parameter.shape)), ": no trainer holds ",
                         Named("hole", ToString(cell.box))));
      }
      if (std::none_of(cell.held.begin(), cell.held.end(), [&](int32_t h) { return gives[h]; })) {
        return Error(
            absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
            Say("parameter '", Named("parameter", parameter.name), "': of ",
                Named("box", ToString(cell.box)), " no trainer gives a gradient; trainer(s) ",
                Named("ranks", Ranges(RanksOf(LabelsOf(cell, held)))),
                " register the contribution none"));
      }
    }
    return absl::OkStatus();
  }

  // Whoever divides by the world's size has taken every rank for a holder of the whole.
  absl::Status CheckHeldByAll(const Parameter& parameter, size_t begin, size_t end) const {
    if (!parameter.held_by_all) return absl::OkStatus();
    const Box all = WholeBox(parameter.shape);
    Indices whole;
    for (size_t f = begin; f < end; ++f) {
      if (layout_.fragments[f].box == all) whole.push_back(static_cast<int32_t>(f));
    }
    const size_t world_size = layout_.trainers.size();
    if (whole.size() == world_size) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "DIVISOR_UNKNOWN",
                 Say("parameter '", Named("parameter", parameter.name), "' is held whole by ",
                     Named("holders", whole.size()), " of ", Named("world_size", world_size),
                     " trainers (", Named("ranks", Ranges(RanksOf(whole))),
                     "), and nothing says what its gradient is divided by: a stage of a pipeline "
                     "and an expert look alike here. Say what reduce_factor is"));
  }

  [[nodiscard]] std::vector<int32_t> RanksOf(const Indices& fragments) const {
    std::vector<int32_t> ranks;
    ranks.reserve(fragments.size());
    for (int32_t f : fragments) ranks.push_back(layout_.fragments[f].rank.value());
    return ranks;
  }

  const Layout& layout_;
};

}  // namespace

absl::StatusOr<std::vector<int32_t>> RegistrationMerger::Add(const Registration& registration) {
  std::vector<int32_t> indices(registration.parameters.size());
  for (size_t p = 0; p < registration.parameters.size(); ++p) {
    const Parameter& parameter = registration.parameters[p];
    const auto [found, added] =
        index_.emplace(parameter.name, static_cast<int32_t>(layout_.parameters.size()));
    indices[p] = found->second;
    if (added) {
      layout_.parameters.push_back(parameter);
      fragments_.emplace_back();
      first_rank_.push_back(registration.rank);
    } else if (absl::Status status =
                   CheckSame(layout_.parameters[indices[p]], first_rank_[indices[p]], parameter,
                             registration.rank);
               !status.ok()) {
      return status;
    }
    layout_.parameters[indices[p]].held_by_all |= parameter.held_by_all;
  }
  AddLike(indices, registration);
  return indices;
}

void RegistrationMerger::AddLike(const std::vector<int32_t>& indices,
                                 const Registration& registration) {
  layout_.trainers.push_back({registration.rank, registration.node, registration.home});
  for (const Fragment& fragment : registration.fragments) {
    const int32_t p = indices[fragment.parameter];
    std::vector<LayoutFragment>& held = fragments_[p];
    Places places{fragment.gradient, fragment.weight};
    int32_t index = 0;
    // Mostly those of the trainer before.
    if (!held.empty() && layout_.places[held.back().places] == places) {
      index = held.back().places;
    } else {
      const auto [found, added] =
          places_.try_emplace(std::move(places), static_cast<int32_t>(layout_.places.size()));
      if (added) layout_.places.push_back(found->first);
      index = found->second;
    }
    held.push_back({fragment.rank, p, fragment.box, fragment.contribution, index});
  }
}

absl::Status RegistrationMerger::Finish(Layout& layout) {
  if (absl::Status status = CheckWorld(layout_.trainers, world_size_); !status.ok()) return status;
  size_t fragments = 0;
  for (const std::vector<LayoutFragment>& of : fragments_) fragments += of.size();
  layout_.fragments.reserve(fragments);
  for (std::vector<LayoutFragment>& of : fragments_) {
    for (auto begin = of.begin(); begin != of.end();) {
      const auto end = std::find_if(begin, of.end(),
                                    [&](const LayoutFragment& f) { return f.rank != begin->rank; });
      std::sort(begin, end, [](const LayoutFragment& a, const LayoutFragment& b) {
        return Before(a.box, b.box);
      });
      begin = end;
    }
    std::move(of.begin(), of.end(), std::back_inserter(layout_.fragments));
    of = {};
  }
  if (absl::Status status = WholeCheck(layout_).Run(); !status.ok()) return status;
  layout = std::move(layout_);
  return absl::OkStatus();
}

absl::Status MergeRegistrations(const std::vector<Registration>& registrations, int32_t world_size,
                                Layout& layout) {
  std::vector<const Registration*> sorted;
  sorted.reserve(registrations.size());
  for (const Registration& registration : registrations) sorted.push_back(&registration);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Registration* a, const Registration* b) { return a->rank < b->rank; });
  for (const Registration* registration : sorted) {
    if (absl::Status status = Validate(*registration); !status.ok()) return status;
  }
  RegistrationMerger merger(world_size);
  for (const Registration* registration : sorted) {
    if (auto added = merger.Add(*registration); !added.ok()) return added.status();
  }
  return merger.Finish(layout);
}

}  // namespace dmuond::scheduler
