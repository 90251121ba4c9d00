#include "scheduler/lane_filling.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace dmuond::scheduler {
namespace {

constexpr int32_t kSteps = 2048;

class Filler {
 public:
  Filler(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
         Nanoseconds makespan)
      : costs_(costs),
        makespan_(makespan),
        step_(std::max<Nanoseconds>(1, (makespan + kSteps - 1) / kSteps)) {
    for (const MatrixClass& c : problem.classes) left_.push_back(c.count);
    order_.resize(left_.size());
    std::iota(order_.begin(), order_.end(), 0);
    // Large ones last, so that among equal fillings the one with more of them is found.
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int32_t a, int32_t b) { return costs_[a].Cost(1) < costs_[b].Cost(1); });
  }

  bool Run(LaneLoads& lanes) {
    std::vector<int32_t> by_room(lanes.lanes());
    std::iota(by_room.begin(), by_room.end(), 0);
    std::stable_sort(by_room.begin(), by_room.end(),
                     [&](int32_t a, int32_t b) { return lanes.load(a) > lanes.load(b); });
    std::vector<int32_t> pattern;
    Nanoseconds pattern_room = -1;
    for (int32_t lane : by_room) {
      const Nanoseconds room = makespan_ - lanes.load(lane);
      if (room < 0) return false;
      // The best filling stays the best while there is enough of everything for it.
      if (room != pattern_room || !Enough(pattern)) {
        pattern = BestFilling(room);
        pattern_room = room;
      }
      for (size_t k = 0; k < pattern.size(); ++k) {
        if (pattern[k] == 0) continue;
        if (!lanes.HasRoom(lane, lanes.BytesGrowth(lane, k, pattern[k]))) return false;
        lanes.Add(lane, static_cast<int32_t>(k), pattern[k]);
        left_[k] -= pattern[k];
      }
    }
    return std::all_of(left_.begin(), left_.end(), [](int32_t n) { return n == 0; });
  }

 private:
  [[nodiscard]] bool Enough(const std::vector<int32_t>& pattern) const {
    for (size_t k = 0; k < pattern.size(); ++k) {
      if (pattern[k] > left_[k]) return false;
    }
    return true;
  }

  // What a matrix is worth: its time in a full batch, so that launches are not.
  [[nodiscard]] int64_t Worth(int32_t k) const {
    const int32_t batch = costs_[k].batch_max();
    return costs_[k].Cost(batch) / batch;
  }

  [[nodiscard]] std::vector<int32_t> BestFilling(Nanoseconds room) const {
    const auto steps = static_cast<int32_t>(room / step_);
    std::vector<int64_t> worth(steps + 1, 0);
    std::vector<std::vector<int32_t>> chosen;  // per class of order_, per steps
    for (int32_t k : order_) {
      std::vector<int64_t> with = worth;
      std::vector<int32_t>& chose = chosen.emplace_back(steps + 1, 0);
      for (int32_t x = 1; x <= left_[k]; ++x) {
        const Nanoseconds cost = costs_[k].Cost(x);
        if (cost > room) break;
        const auto needs = static_cast<int32_t>((cost + step_ - 1) / step_);
        for (int32_t r = needs; r <= steps; ++r) {
          const int64_t value = worth[r - needs] + x * Worth(k);
          if (value >= with[r]) {
            with[r] = value;
            chose[r] = x;
          }
        }
      }
      worth = std::move(with);
    }
    std::vector<int32_t> filling(left_.size(), 0);
    int32_t r = steps;
    for (size_t i = order_.size(); i-- > 0;) {
      const int32_t k = order_[i];
      filling[k] = chosen[i][r];
      r -= static_cast<int32_t>((costs_[k].Cost(filling[k]) + step_ - 1) / step_);
    }
    return filling;
  }

  const std::vector<BatchCost>& costs_;
  const Nanoseconds makespan_;
  const Nanoseconds step_;
  std::vector<int32_t> left_;
  std::vector<int32_t> order_;
};

}  // namespace

bool FillLanes(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
               Nanoseconds makespan, LaneLoads& lanes) {
  return Filler(problem, costs, makespan).Run(lanes);
}

}  // namespace dmuond::scheduler
