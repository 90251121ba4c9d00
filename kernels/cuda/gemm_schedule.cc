#include "kernels/cuda/gemm_schedule.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <queue>
#include <tuple>
#include <utility>

namespace dmuond::kernels::cuda {
namespace {

// Columns of pairs that run side by side: 8 x 8 pairs fill most of the chip and read 8 panels of
// each operand.
constexpr int kStripColumns = 8;
// The last so many turns are sorted by length, so that short tiles fill the gaps.
constexpr int kTailTurns = 3;

struct PairJob {
  GemmJob first;
  GemmJob second;
  int64_t cost = 0;
};

class Builder {
 public:
  Builder(const GemmShape& shape, int problem, int tile_n)
      : shape_(shape), problem_(problem), tile_n_(tile_n), units_(tile_n / kTileUnit) {
    steps_ = (shape.depth + 63) / 64;
  }

  void Build(std::vector<PairJob>& out) {
    const int row_blocks = static_cast<int>((shape_.rows + kTileM - 1) / kTileM);
    const int col_tiles = static_cast<int>((shape_.cols + tile_n_ - 1) / tile_n_);
    for (int64_t z = 0; z < shape_.batch; ++z) {
      for (int strip = 0; strip < col_tiles; strip += kStripColumns) {
        for (int row = 0; row < row_blocks; row += 2) {
          for (int col = strip; col < std::min(strip + kStripColumns, col_tiles); ++col) {
            AddPair(out, static_cast<int32_t>(z), row, col, row_blocks);
          }
        }
      }
      FlushSingles(out, z + 1 == shape_.batch);
    }
  }

 private:
  // Units of columns that a tile of row block `row` needs: none right of the diagonal.
  int Width(int row, int col) const {
    int64_t end = shape_.cols;
    if (shape_.symmetric) end = std::min<int64_t>(end, int64_t{row + 1} * kTileM);
    const int64_t left = end - int64_t{col} * tile_n_;
    return static_cast<int>(std::clamp<int64_t>((left + kTileUnit - 1) / kTileUnit, 0, units_));
  }

  GemmJob Job(int32_t z, int row, int col, int width, bool paired) const {
    GemmJob job;
    job.problem = problem_;
    job.batch = z;
    job.row = static_cast<uint16_t>(row);
    job.col = static_cast<uint16_t>(col * units_);
    job.width = static_cast<uint8_t>(width);
    job.paired = paired ? 1 : 0;
    return job;
  }

  // Cycles, as measured on an H200: a step along k and the rest (first loads, epilogue) of a tile.
  // Tiles without a partner load all of B themselves; narrow ones are bound by that. Those of the
  // diagonal multiply less.
  int64_t Cost(int width, bool paired) const {
    constexpr std::array<int64_t, 5> kPaired = {0, 400, 540, 770, 1024};
    constexpr std::array<int64_t, 5> kSingle = {0, 420, 620, 740, 920};
    return steps_ * (paired ? kPaired : kSingle)[width] + 1000 + int64_t{width} * 1000;
  }

  // Whether the tile's upper half has fewer columns than its lower one.
  bool OnDiagonal(int row, int col, int width) const {
    return shape_.symmetric && col * units_ + width > row * (kTileM / kTileUnit) + 1;
  }

  void AddPair(std::vector<PairJob>& out, int32_t z, int row, int col, int row_blocks) {
    const int upper = Width(row, col);
    const int lower = row + 1 < row_blocks ? Width(row + 1, col) : 0;
    if (upper > 0 && upper == lower && !OnDiagonal(row, col, upper)) {
      out.push_back(
          {Job(z, row, col, upper, true), Job(z, row + 1, col, upper, true), Cost(upper, true)});
      return;
    }
    if (upper > 0) singles_.push_back(Job(z, row, col, upper, false));
    if (lower > 0) singles_.push_back(Job(z, row + 1, col, lower, false));
  }

  // Tiles on the diagonal and in a last odd row of blocks have no partner: two of a width share a
  // pair of CTAs without sharing loads. One that is left over waits for the next matrix.
  void FlushSingles(std::vector<PairJob>& out, bool last) {
    std::vector<GemmJob> left;
    for (int width = units_; width > 0; --width) {
      std::vector<GemmJob> same;
      for (const GemmJob& job : singles_) {
        if (job.width == width) same.push_back(job);
      }
      size_t i = 0;
      for (; i + 1 < same.size(); i += 2) out.push_back({same[i], same[i + 1], Cost(width, false)});
      if (i == same.size()) continue;
      if (last) {
        GemmJob company = same[i];
        company.store = 0;
        out.push_back({same[i], company, Cost(width, false)});
      } else {
        left.push_back(same[i]);
      }
    }
    singles_ = left;
  }

  const GemmShape& shape_;
  const int problem_;
  const int tile_n_;
  const int units_;
  int64_t steps_ = 0;
  std::vector<GemmJob> singles_;
};

// Jobs that one cluster takes one after another.
struct Item {
  std::vector<PairJob> jobs;
  int64_t cost = 0;
};

struct Assignment {
  std::vector<std::vector<const Item*>> lists;  // per cluster
  int64_t longest = 0;
};

// Each item to the least loaded cluster, in order.
Assignment Assign(const std::vector<Item>& items, int clusters) {
  Assignment result;
  result.lists.resize(clusters);
  using Load = std::tuple<int64_t, int>;  // (work so far, cluster)
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int c = 0; c < clusters; ++c) loads.emplace(0, c);
  for (const Item& item : items) {
    const auto [load, cluster] = loads.top();
    loads.pop();
    result.lists[cluster].push_back(&item);
    loads.emplace(load + item.cost, cluster);
    result.longest = std::max(result.longest, load + item.cost);
  }
  return result;
}

// Only the end of the list is sorted by length: before it, a matrix's tiles stay together for L2's
// sake. `doubled`: the sorted short tiles go two by two, which fits better when two of them and a
// longer one make a turn or two.
std::vector<Item> MakeItems(const std::vector<PairJob>& work, size_t tail, int short_width,
                            bool doubled) {
  std::vector<Item> items;
  const size_t sorted_from = work.size() - tail;
  for (size_t i = 0; i < work.size(); ++i) {
    const bool join = doubled && i > sorted_from && work[i].first.width <= short_width &&
                      !items.empty() && items.back().jobs.size() == 1 &&
                      items.back().jobs[0].first.width <= short_width;
    if (!join) items.emplace_back();
    items.back().jobs.push_back(work[i]);
    items.back().cost += work[i].cost;
  }
  std::stable_sort(items.begin() + static_cast<std::ptrdiff_t>(std::min(sorted_from, items.size())),
                   items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return items;
}

}  // namespace

GemmSchedule MakeSchedule(std::span<const GemmShape> shapes, int tile_n, int clusters) {
  std::vector<PairJob> work;
  for (size_t i = 0; i < shapes.size(); ++i) {
    Builder(shapes[i], static_cast<int>(i), tile_n).Build(work);
  }
  const size_t tail = std::min<size_t>(work.size(), static_cast<size_t>(clusters) * kTailTurns);
  std::stable_sort(work.end() - static_cast<std::ptrdiff_t>(tail), work.end(),
                   [](const PairJob& a, const PairJob& b) { return a.cost > b.cost; });

  GemmSchedule schedule;
  schedule.clusters = std::max(1, std::min<int>(clusters, static_cast<int>(work.size())));
  const int short_width = tile_n / kTileUnit / 2;
  const std::vector<Item> single = MakeItems(work, tail, short_width, false);
  const std::vector<Item> doubled = MakeItems(work, tail, short_width, true);
  Assignment assignment = Assign(single, schedule.clusters);
  if (Assignment other = Assign(doubled, schedule.clusters); other.longest < assignment.longest) {
    assignment = std::move(other);
  }
  schedule.cycles = assignment.longest;
  int64_t total = 0;
  for (const PairJob& job : work) total += job.cost;
  if (total > 0) {
    schedule.imbalance =
        static_cast<double>(assignment.longest) * clusters / static_cast<double>(total);
  }
  std::vector<std::vector<const PairJob*>> lists(schedule.clusters);
  for (int c = 0; c < schedule.clusters; ++c) {
    for (const Item* item : assignment.lists[c]) {
      for (const PairJob& job : item->jobs) lists[c].push_back(&job);
    }
  }
  size_t turns = 0;
  for (const auto& list : lists) turns = std::max(turns, list.size());
  schedule.turns = static_cast<int>(turns);
  schedule.jobs.assign((turns + 1) * schedule.clusters * 2, GemmJob{});
  for (int c = 0; c < schedule.clusters; ++c) {
    for (size_t t = 0; t < lists[c].size(); ++t) {
      const size_t at = (t * schedule.clusters + c) * 2;
      schedule.jobs[at] = lists[c][t]->first;
      schedule.jobs[at + 1] = lists[c][t]->second;
    }
  }
  return schedule;
}

}  // namespace dmuond::kernels::cuda
