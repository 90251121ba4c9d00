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

  // Cells of the part of `within` that lies in the dimensions from `dim` on; boxes of the result
  // have their begins and ends of earlier dimensions unset. `reaching` ascending.
  std::vector<ArrangedCell> Cut(size_t dim, const std::vector<int32_t>& reaching) {
    work_ -= static_cast<int64_t>(reaching.size()) + 1;
    if (work_ < 0) {
      too_many_ = true;
      return {};
    }
    if (dim == within_.begin.size() || reaching.empty()) return {Rest(dim, reaching)};
    std::vector<int32_t> by_begin = reaching;
    std::stable_sort(by_begin.begin(), by_begin.end(), [&](int32_t a, int32_t b) {
      return held_[a].box.begin[dim] < held_[b].box.begin[dim];
    });
    std::vector<ArrangedCell> cells;
    std::vector<ArrangedCell> previous;  // of the slab before, for merging
    std::vector<int32_t> current;        // boxes that reach into the slab, ascending
    size_t next = 0;
    for (int64_t from : Coordinates(dim, reaching)) {
      if (from == within_.end[dim]) break;
      const int64_t to =
          *std::upper_bound(coordinates_[dim].begin(), coordinates_[dim].end(), from);
      std::erase_if(current, [&](int32_t i) { return held_[i].box.end[dim] <= from; });
      bool grew = false;
      for (; next < by_begin.size() && held_[by_begin[next]].box.begin[dim] <= from; ++next) {
        if (held_[by_begin[next]].box.end[dim] <= from) continue;
        current.push_back(by_begin[next]);
        grew = true;
      }
      if (grew) std::sort(current.begin(), current.end());
      std::vector<ArrangedCell> slab = Cut(dim + 1, current);
      if (SameSlab(slab, previous, dim + 1)) {
        for (size_t i = cells.size() - slab.size(); i < cells.size(); ++i) {
          cells[i].box.end[dim] = to;
        }
        continue;
      }
      previous = slab;
      for (ArrangedCell& cell : slab) {
        cell.box.begin[dim] = from;
        cell.box.end[dim] = to;
        cells.push_back(std::move(cell));
      }
      if (static_cast<int64_t>(cells.size()) > kCellsPerParameterMax) {
        too_many_ = true;
        return {};
      }
      if (too_many_) return {};
    }
    return cells;
  }

  [[nodiscard]] bool too_many() const { return too_many_; }
  [[nodiscard]] int64_t work() const { return work_; }

 private:
  [[nodiscard]] ArrangedCell Rest(size_t dim, const std::vector<int32_t>& reaching) const {
    ArrangedCell cell{within_, reaching};
    if (presence_only_ && !reaching.empty()) cell.held = {0};
    for (size_t d = 0; d < dim; ++d) cell.box.begin[d] = cell.box.end[d] = 0;
    return cell;
  }

  // Where slabs of this dimension begin, and the end of `within`. Kept per dimension: a deeper
  // call only touches deeper ones.
  std::vector<int64_t> Coordinates(size_t dim, const std::vector<int32_t>& reaching) {
    if (coordinates_.size() <= dim) coordinates_.resize(within_.begin.size());
    std::vector<int64_t>& c = coordinates_[dim];
    c = {within_.begin[dim], within_.end[dim]};
    for (int32_t i : reaching) {
      for (int64_t x : {held_[i].box.begin[dim], held_[i].box.end[dim]}) {
        if (x > within_.begin[dim] && x < within_.end[dim]) c.push_back(x);
      }
    }
    std::sort(c.begin(), c.end());
    c.erase(std::unique(c.begin(), c.end()), c.end());
    return c;
  }

  static bool SameSlab(const std::vector<ArrangedCell>& a, const std::vector<ArrangedCell>& b,
                       size_t from_dim) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i].held != b[i].held) return false;
      for (size_t d = from_dim; d < a[i].box.begin.size(); ++d) {
        if (a[i].box.begin[d] != b[i].box.begin[d] || a[i].box.end[d] != b[i].box.end[d]) {
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
  std::vector<ArrangedCell> cells = arranger.Cut(0, reaching);
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

// The dimension in which most boxes begin at places of their own.
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

}  // namespace

std::vector<HeldBox> GroupEqualBoxes(std::vector<Holding> holdings) {
  std::erase_if(holdings, [](const Holding& h) { return Empty(h.box); });
  std::sort(holdings.begin(), holdings.end(), [](const Holding& a, const Holding& b) {
    if (a.box == b.box) return a.label < b.label;
    return Before(a.box, b.box);
  });
  std::vector<HeldBox> held;
  for (Holding& h : holdings) {
    if (held.empty() || held.back().box != h.box) held.push_back({std::move(h.box), {}});
    held.back().labels.push_back(h.label);
  }
  return held;
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

std::vector<int32_t> LabelsOf(const ArrangedCell& cell, const std::vector<HeldBox>& held) {
  std::vector<int32_t> labels;
  for (int32_t i : cell.held) {
    labels.insert(labels.end(), held[i].labels.begin(), held[i].labels.end());
  }
  std::sort(labels.begin(), labels.end());
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
