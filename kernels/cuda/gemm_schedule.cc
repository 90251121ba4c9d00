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
constexpr int kTailTurns = 2;
// Schedules of more turns are balanced without halves.
constexpr size_t kHalvedTurns = 6;

struct PairJob {
  GemmJob first;
  GemmJob second;
  int64_t cost = 0;
};

// Cycles, as measured on an H200: a step along k and the rest (first loads, epilogue) of a tile.
// Tiles without a partner load all of B themselves; narrow ones wait for their loads. Those of the
// diagonal multiply less.
int64_t Cost(const GemmJob& job, int tile_n) {
  constexpr std::array<int64_t, 5> kPaired = {0, 400, 540, 790, 1040};
  constexpr std::array<int64_t, 5> kSingle = {0, 420, 690, 760, 920};
  constexpr std::array<int64_t, 5> kAInB = {0, 400, 550, 715, 900};
  constexpr int64_t kDoubled = 800;
  // The narrowest tiles' own kernel.
  if (tile_n == kTileUnit) return job.stages * (job.paired ? 340 : 360) + 2000;
  const auto& cycles = job.paired ? kPaired : job.a_in_b ? kAInB : kSingle;
  return job.stages * (job.doubled ? kDoubled : cycles[job.width]) + 1000 +
         int64_t{job.width} * 1000;
}

class Builder {
 public:
  // `guests`: of four tiles of the diagonal one goes to the others, block by block.
  Builder(const GemmShape& shape, int problem, int tile_n, bool guests)
      : shape_(shape),
        problem_(problem),
        tile_n_(tile_n),
        units_(tile_n / kTileUnit),
        guests_(guests) {
    steps_ = (shape.depth + kTileK - 1) / kTileK;
  }

  void Build(std::vector<PairJob>& out) {
    const int row_blocks = static_cast<int>((shape_.rows + kTileM - 1) / kTileM);
    const int col_tiles = static_cast<int>((shape_.cols + tile_n_ - 1) / tile_n_);
    for (int64_t z = 0; z < shape_.batch; ++z) {
      if (SharingOf(tile_n_) == PairSharing::kRows) {
        for (int row = 0; row < row_blocks; ++row) {
          for (int col = 0; col < col_tiles; col += 2) {
            AddSideBySide(out, static_cast<int32_t>(z), row, col);
          }
        }
        FlushSingles(out, z + 1 == shape_.batch);
        continue;
      }
      for (int strip = 0; strip < col_tiles; strip += kStripColumns) {
        for (int row = 0; row < row_blocks; row += 2) {
          for (int col = strip; col < std::min(strip + kStripColumns, col_tiles); ++col) {
            AddPair(out, static_cast<int32_t>(z), row, col, row_blocks);
          }
        }
      }
      if (guests_) PlaceGuests(static_cast<int32_t>(z));
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
    job.problem = static_cast<uint16_t>(problem_);
    job.batch = z;
    job.row = static_cast<uint16_t>(row);
    job.col = static_cast<uint16_t>(col * units_);
    job.width = static_cast<uint8_t>(width);
    job.paired = paired;
    job.a_in_b = !paired && ContainsRows(row, col, width);
    // As many loads on their way as latency asks for: a narrow tile's are small.
    job.doubled = job.a_in_b && 2 * width <= StageUnits(tile_n_);
    job.stages = static_cast<uint16_t>(job.doubled ? (steps_ + 1) / 2 : steps_);
    job.symmetric = shape_.symmetric;
    job.has_c = shape_.has_c;
    job.has_c2 = shape_.has_c2;
    job.store_lower = shape_.store_lower;
    return job;
  }

  // Whether the tile's rows are among its columns, and one load of them is enough.
  bool ContainsRows(int row, int col, int width) const {
    constexpr int kUnits = kTileM / kTileUnit;
    return shape_.same_operands && shape_.symmetric && row * kUnits >= col * units_ &&
           (row + 1) * kUnits <= col * units_ + width;
  }

  // Whether the tile's upper half has fewer columns than its lower one.
  bool OnDiagonal(int row, int col, int width) const {
    return shape_.symmetric && col * units_ + width > row * (kTileM / kTileUnit) + 1;
  }

  void AddPair(std::vector<PairJob>& out, int32_t z, int row, int col, int row_blocks) {
    const int upper = Width(row, col);
    const int lower = row + 1 < row_blocks ? Width(row + 1, col) : 0;
    if (upper > 0 && upper == lower && !OnDiagonal(row, col, upper)) {
      const GemmJob job = Job(z, row, col, upper, true);
      out.push_back({job, Job(z, row + 1, col, upper, true), Cost(job, tile_n_)});
      return;
    }
    if (upper > 0) singles_.push_back(Job(z, row, col, upper, false));
    if (lower > 0) singles_.push_back(Job(z, row + 1, col, lower, false));
  }

  void AddSideBySide(std::vector<PairJob>& out, int32_t z, int row, int col) {
    if (Width(row, col + 1) > 0) {
      const GemmJob job = Job(z, row, col, 1, true);
      out.push_back({job, Job(z, row, col + 1, 1, true), Cost(job, tile_n_)});
    } else if (Width(row, col) > 0) {
      singles_.push_back(Job(z, row, col, 1, false));
    }
  }

  // Three tiles of the diagonal take a block each of a fourth, for which the upper half of each has
  // room: as many products in each as in a tile below the diagonal.
  void PlaceGuests(int32_t z) {
    std::vector<GemmJob> diagonal;
    std::vector<GemmJob> rest;
    for (const GemmJob& job : singles_) {
      const bool takes = job.batch == z && job.a_in_b && job.width == 2 &&
                         job.col == job.row * (kTileM / kTileUnit);
      (takes ? diagonal : rest).push_back(job);
    }
    while (diagonal.size() >= 4) {
      const GemmJob guest = diagonal.back();
      diagonal.pop_back();
      for (int block = 0; block < 3; ++block) {
        GemmJob host = diagonal.back();
        diagonal.pop_back();
        host.guest = static_cast<uint16_t>(1 + 3 * guest.row + block);
        rest.push_back(host);
      }
    }
    rest.insert(rest.end(), diagonal.begin(), diagonal.end());
    singles_ = rest;
  }

  // Tiles on the diagonal and in a last odd row of blocks have no partner: two of a kind share a
  // pair of CTAs without sharing loads. One that is left over waits for the next matrix.
  void FlushSingles(std::vector<PairJob>& out, bool last) {
    std::vector<GemmJob> left;
    for (int kind = 2 * units_ + 1; kind > 1; --kind) {
      const int width = kind / 2;
      const bool doubled = kind % 2 != 0;
      std::vector<GemmJob> same;
      for (const GemmJob& job : singles_) {
        if (job.width == width && job.doubled == doubled) same.push_back(job);
      }
      size_t i = 0;
      for (; i + 1 < same.size(); i += 2)
        out.push_back(
            {same[i], same[i + 1], std::max(Cost(same[i], tile_n_), Cost(same[i + 1], tile_n_))});
      if (i == same.size()) continue;
      if (last) {
        GemmJob company = same[i];
        company.store = false;
        out.push_back({same[i], company, Cost(company, tile_n_)});
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
  const bool guests_;
  int64_t steps_ = 0;
  std::vector<GemmJob> singles_;
};

// Jobs that one cluster takes one after another.
struct Item {
  std::vector<PairJob> jobs;
  int64_t cost = 0;
};

struct Plan {
  std::vector<Item> items;
  std::vector<std::vector<const Item*>> lists;  // per cluster
  int64_t longest = 0;
};

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

// Each item to the least loaded cluster, in order.
Plan MakePlan(std::vector<PairJob> work, int tile_n, int clusters, bool doubled) {
  const size_t tail = std::min<size_t>(work.size(), static_cast<size_t>(clusters) * kTailTurns);
  std::stable_sort(work.end() - static_cast<std::ptrdiff_t>(tail), work.end(),
                   [](const PairJob& a, const PairJob& b) { return a.cost > b.cost; });
  Plan plan;
  plan.items = MakeItems(work, tail, tile_n / kTileUnit / 2, doubled);
  plan.lists.resize(clusters);
  using Load = std::tuple<int64_t, int>;  // (work so far, cluster)
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int c = 0; c < clusters; ++c) loads.emplace(0, c);
  for (const Item& item : plan.items) {
    const auto [load, cluster] = loads.top();
    loads.pop();
    plan.lists[cluster].push_back(&item);
    loads.emplace(load + item.cost, cluster);
    plan.longest = std::max(plan.longest, load + item.cost);
  }
  return plan;
}

// The last `count` pairs of the widest tiles in two halves each: dearer, but easier to fit.
std::vector<PairJob> Halved(std::vector<PairJob> work, int count, int tile_n) {
  const int units = tile_n / kTileUnit;
  for (size_t i = work.size(); i-- > 0 && count > 0;) {
    PairJob& job = work[i];
    if (!job.first.paired || job.first.width != units) continue;
    PairJob half = job;
    for (GemmJob* tile : {&job.first, &job.second}) tile->width = units / 2;
    for (GemmJob* tile : {&half.first, &half.second}) {
      tile->width = units - units / 2;
      tile->col += units / 2;
    }
    job.cost = Cost(job.first, tile_n);
    half.cost = Cost(half.first, tile_n);
    work.push_back(half);
    --count;
  }
  return work;
}

// The shortest of some plans.
Plan BestPlan(const std::vector<PairJob>& work, int tile_n, int clusters) {
  Plan best = MakePlan(work, tile_n, clusters, false);
  const auto consider = [&](Plan plan) {
    if (plan.longest < best.longest) best = std::move(plan);
  };
  consider(MakePlan(work, tile_n, clusters, true));
  const int units = tile_n / kTileUnit;
  if (units < 2 || work.size() > static_cast<size_t>(clusters) * kHalvedTurns) return best;
  for (int count = 2; count <= clusters; count += count < 16 ? 2 : 8) {
    const std::vector<PairJob> halved = Halved(work, count, tile_n);
    for (const bool doubled : {false, true}) consider(MakePlan(halved, tile_n, clusters, doubled));
  }
  return best;
}

}  // namespace

GemmSchedule MakeSchedule(std::span<const GemmShape> shapes, int tile_n, int clusters) {
  const auto build = [&](bool guests) {
    std::vector<PairJob> work;
    for (size_t i = 0; i < shapes.size(); ++i) {
      Builder(shapes[i], static_cast<int>(i), tile_n, guests).Build(work);
    }
    return work;
  };
  const std::vector<PairJob> work = build(false);
  GemmSchedule schedule;
  // Halves may keep clusters busy that whole pairs do not.
  int64_t total = 0;
  for (const PairJob& job : work) total += job.cost;
  Plan plan = BestPlan(work, tile_n, clusters);
  if (tile_n == 2 * kTileUnit) {
    Plan with_guests = BestPlan(build(true), tile_n, clusters);
    if (with_guests.longest < plan.longest) plan = std::move(with_guests);
  }
  schedule.cycles = plan.longest;
  if (total > 0) {
    schedule.imbalance = static_cast<double>(plan.longest) * clusters / static_cast<double>(total);
  }
  std::vector<std::vector<const PairJob*>> lists;
  for (const auto& list : plan.lists) {
    if (list.empty()) continue;
    lists.emplace_back();
    for (const Item* item : list) {
      for (const PairJob& job : item->jobs) lists.back().push_back(&job);
    }
  }
  schedule.clusters = std::max<int>(1, static_cast<int>(lists.size()));
  size_t turns = 0;
  for (const auto& list : lists) turns = std::max(turns, list.size());
  schedule.turns = static_cast<int>(turns);
  schedule.jobs.assign((turns + 1) * schedule.clusters * 2, GemmJob{});
  for (size_t c = 0; c < lists.size(); ++c) {
    for (size_t t = 0; t < lists[c].size(); ++t) {
      const size_t at = (t * schedule.clusters + c) * 2;
      schedule.jobs[at] = lists[c][t]->first;
      schedule.jobs[at + 1] = lists[c][t]->second;
    }
  }
  return schedule;
}

}  // namespace dmuond::kernels::cuda
