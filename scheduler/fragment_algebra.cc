#include "scheduler/fragment_algebra.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// Cuts space into slabs along one dimension after the other. Within a slab the set of boxes that
// reach into it is constant in the dimensions cut so far, so each step only looks at those.
class Arranger {
 public:
  Arranger(const Box& within, const std::vector<HeldBox>& held, bool presence_only, int64_t work)
      : within_(within), held_(held), presence_only_(presence_only), work_(work) {}

  // Appends the cells of the part of `within` that lies in the dimensions from `dim` on; begins and
  // ends of their boxes in earlier dimensions are the caller's to set. `reaching` ascending.
  void Cut(size_t dim, const std::vector<int32_t>& reaching, std::vector<ArrangedCell>& cells) {
    const size_t dims = within_.begin.size();
    // Where all boxes go from end to end nothing is cut in the dimensions that are left.
    const bool uncut = std::all_of(reaching.begin(), reaching.end(),
                                   [&](int32_t i) { return Spans(held_[i].box, dim); });
    const auto steps = static_cast<int64_t>(uncut && !reaching.empty() ? dims - dim + 1 : 1);
    work_ -= (static_cast<int64_t>(reaching.size()) + 1) * steps;
    if (work_ < 0) too_many_ = true;
    if (too_many_) return;
    if (uncut) {
      AddRest(reaching, cells.emplace_back());
      return;
    }
    std::vector<int32_t> by_begin = reaching;
    const auto begins_before = [&](int32_t a, int32_t b) {
      return held_[a].box.begin[dim] < held_[b].box.begin[dim];
    };
    if (!std::is_sorted(by_begin.begin(), by_begin.end(), begins_before)) {
      std::stable_sort(by_begin.begin(), by_begin.end(), begins_before);
    }
    FindCoordinates(dim, reaching);
    const size_t first = cells.size();
    size_t previous = first;       // where the cells of the slab before begin
    std::vector<int32_t> current;  // boxes that reach into the slab, ascending
    size_t next = 0;
    for (size_t i = 0; i + 1 < coordinates_[dim].size(); ++i) {
      const int64_t from = coordinates_[dim][i];
      const int64_t to = coordinates_[dim][i + 1];
      std::erase_if(current, [&](int32_t h) { return held_[h].box.end[dim] <= from; });
      bool grew = false;
      for (; next < by_begin.size() && held_[by_begin[next]].box.begin[dim] <= from; ++next) {
        if (held_[by_begin[next]].box.end[dim] <= from) continue;
        current.push_back(by_begin[next]);
        grew = true;
      }
      if (grew) std::sort(current.begin(), current.end());
      const size_t slab = cells.size();
      Cut(dim + 1, current, cells);
      if (too_many_) return;
      const bool same = SameSlabs(cells, previous, slab, dim + 1);
      if (same) cells.resize(slab);
      for (size_t c = same ? previous : slab; c < cells.size(); ++c) {
        if (!same) cells[c].box.begin[dim] = from;
        cells[c].box.end[dim] = to;
      }
      if (same) continue;
      previous = slab;
      if (static_cast<int64_t>(cells.size() - first) > kCellsPerParameterMax) {
        too_many_ = true;
        return;
      }
    }
  }

  [[nodiscard]] bool too_many() const { return too_many_; }
  [[nodiscard]] int64_t work() const { return work_; }

 private:
  // Whether the box goes through all of `within` in the dimensions from `dim` on.
  [[nodiscard]] bool Spans(const Box& box, size_t dim) const {
    for (size_t d = dim; d < within_.begin.size(); ++d) {
      if (box.begin[d] > within_.begin[d] || box.end[d] < within_.end[d]) return false;
    }
    return true;
  }

  void AddRest(const std::vector<int32_t>& reaching, ArrangedCell& cell) const {
    cell.box = within_;
    if (presence_only_ && !reaching.empty()) {
      cell.held.assign(1, 0);
    } else {
      cell.held.assign(reaching.begin(), reaching.end());
    }
  }

  // Where slabs of this dimension begin, and the end of `within`. Kept per dimension: a deeper
  // call only touches deeper ones.
  void FindCoordinates(size_t dim, const std::vector<int32_t>& reaching) {
    if (coordinates_.empty()) coordinates_.resize(within_.begin.size());
    std::vector<int64_t>& c = coordinates_[dim];
    c = {within_.begin[dim], within_.end[dim]};
    for (int32_t i : reaching) {
      for (int64_t x : {held_[i].box.begin[dim], held_[i].box.end[dim]}) {
        if (x > within_.begin[dim] && x < within_.end[dim]) c.push_back(x);
      }
    }
    std::sort(c.begin(), c.end());
    c.erase(std::unique(c.begin(), c.end()), c.end());
  }

  // Whether cells [a, b) and [b, …) are alike in holders and in the dimensions from `from_dim` on.
  static bool SameSlabs(const std::vector<ArrangedCell>& cells, size_t a, size_t b,
                        size_t from_dim) {
    if (a == b || cells.size() - b != b - a) return false;
    for (size_t i = 0; i < b - a; ++i) {
      const ArrangedCell& before = cells[a + i];
      const ArrangedCell& here = cells[b + i];
      if (before.held != here.held) return false;
      for (size_t d = from_dim; d < here.box.begin.size(); ++d) {
        if (before.box.begin[d] != here.box.begin[d] || before.box.end[d] != here.box.end[d]) {
          return false;
        }
      }
    }
    return true;
  }

  const Box& within_;
  const std::vector<HeldBox>& held_;
  const bool presence_only_;
  int64_t work_;  // that is left
  std::vector<std::vector<int64_t>> coordinates_;
  bool too_many_ = false;
};

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

absl::StatusOr<std::vector<ArrangedCell>> ArrangeImpl(const Box& within,
                                                      const std::vector<HeldBox>& held,
                                                      const std::vector<int32_t>& candidates,
                                                      bool presence_only, int64_t& work) {
  if (Empty(within)) return std::vector<ArrangedCell>{};
  std::vector<int32_t> reaching;
  for (const int32_t i : candidates) {
    if (Intersects(held[i].box, within)) reaching.push_back(i);
  }
  Arranger arranger(within, held, presence_only, work);
  std::vector<ArrangedCell> cells;
  arranger.Cut(0, reaching, cells);
  work = arranger.work();
  if (work < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the ", held.size(),
                     " different boxes of its holders lie so that too many have to be "
                     "compared; shards that are rows, columns or tiles of one grid take little"));
  }
  if (arranger.too_many()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the boxes of its holders fall apart into more than ", kCellsPerParameterMax, " cells"));
  }
  return cells;
}

std::vector<int32_t> All(const std::vector<HeldBox>& held) {
  std::vector<int32_t> all(held.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

std::vector<HeldBox> GroupEqualBoxes(std::vector<Holding> holdings) {
  std::erase_if(holdings, [](const Holding& h) { return Empty(h.box); });
  const auto before = [](const Holding& a, const Holding& b) {
    if (a.box == b.box) return a.label < b.label;
    return Before(a.box, b.box);
  };
  if (!std::is_sorted(holdings.begin(), holdings.end(), before)) {
    std::sort(holdings.begin(), holdings.end(), before);
  }
  std::vector<HeldBox> held;
  for (Holding& h : holdings) {
    if (held.empty() || held.back().box != h.box) held.emplace_back().box = std::move(h.box);
    held.back().labels.push_back(h.label);
  }
  return held;
}

size_t MostDifferent(const std::vector<Box>& boxes) {
  size_t best = 0;
  size_t most = 0;
  for (size_t d = 0; d < boxes[0].begin.size(); ++d) {
    std::vector<int64_t> begins;
    begins.reserve(boxes.size());
    for (const Box& box : boxes) begins.push_back(box.begin[d]);
    std::sort(begins.begin(), begins.end());
    const auto different =
        static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (different > most) {
      most = different;
      best = d;
    }
  }
  return best;
}

std::optional<std::pair<int32_t, int32_t>> FindOverlap(const std::vector<Box>& boxes) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!Empty(boxes[i])) order.push_back(static_cast<int32_t>(i));
  }
  // Of scalars any two are the same.
  if (order.size() > 1 && boxes[0].begin.empty()) return std::pair(order[0], order[1]);
  if (order.size() < 2) return std::nullopt;
  const size_t along = MostDifferent(boxes);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return boxes[a].begin[along] < boxes[b].begin[along];
  });
  std::vector<int32_t> reaching;  // those before that do not end before this one
  for (const int32_t i : order) {
    std::erase_if(reaching,
                  [&](int32_t j) { return boxes[j].end[along] <= boxes[i].begin[along]; });
    for (const int32_t j : reaching) {
      if (Intersects(boxes[j], boxes[i])) return std::minmax(i, j);
    }
    reaching.push_back(i);
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<ArrangedCell>> Arrange(const Box& within,
                                                  const std::vector<HeldBox>& held) {
  return Arrange(within, held, All(held));
}

absl::StatusOr<std::vector<ArrangedCell>> Arrange(const Box& within,
                                                  const std::vector<HeldBox>& held,
                                                  const std::vector<int32_t>& candidates) {
  int64_t work = kNoLimit;
  return ArrangeImpl(within, held, candidates, /*presence_only=*/false, work);
}

absl::StatusOr<std::vector<ArrangedCell>> ArrangeWithin(int64_t& work, const Box& within,
                                                        const std::vector<HeldBox>& held) {
  return ArrangeImpl(within, held, All(held), /*presence_only=*/false, work);
}

Indices LabelsOf(const ArrangedCell& cell, const std::vector<HeldBox>& held) {
  Indices labels;
  for (int32_t i : cell.held) {
    labels.insert(labels.end(), held[i].labels.begin(), held[i].labels.end());
  }
  if (cell.held.size() > 1) std::sort(labels.begin(), labels.end());
  return labels;
}

absl::StatusOr<std::vector<Box>> Union(const Box& within, const std::vector<Box>& boxes) {
  std::vector<Holding> holdings;
  holdings.reserve(boxes.size());
  for (const Box& box : boxes) holdings.push_back({box, 0});
  const std::vector<HeldBox> held = GroupEqualBoxes(std::move(holdings));
  int64_t work = kNoLimit;
  auto cells = ArrangeImpl(within, held, All(held), /*presence_only=*/true, work);
  if (!cells.ok()) return cells.status();
  std::vector<Box> covered;
  for (ArrangedCell& cell : *cells) {
    if (!cell.held.empty()) covered.push_back(std::move(cell.box));
  }
  return covered;
}

}  // namespace dmuond::scheduler
