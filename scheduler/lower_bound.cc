#include "scheduler/lower_bound.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "scheduler/limits.h"

namespace dmuond::scheduler {
namespace {

struct ClassBound {
  int64_t count = 0;
  Nanoseconds fixed = 0;          // s
  Nanoseconds per_matrix = 0;     // t
  std::vector<Nanoseconds> cost;  // f(0 … count)
};

ClassBound Bound(const CostModel& model, const MatrixClass& c) {
  const BatchCost cost(model, c.matrix, c.count, kBatchMax);
  ClassBound bound;
  bound.count = c.count;
  for (int32_t x = 0; x <= c.count; ++x) bound.cost.push_back(cost.Cost(x));
  bound.per_matrix = bound.cost[1];
  for (int32_t x = 2; x <= c.count; ++x) {
    bound.per_matrix = std::min(bound.per_matrix, (bound.cost[x] - bound.cost[1]) / (x - 1));
  }
  bound.fixed = bound.cost[1] - bound.per_matrix;
  return bound;
}

// The conditions of the header, for one T.
class Feasibility {
 public:
  explicit Feasibility(const AssignmentProblem& problem)
      : base_(problem.base_load), divisible_(problem.divisible) {
    for (const MatrixClass& c : problem.classes) {
      if (c.count > 0) classes_.push_back(Bound(*problem.model, c));
    }
    std::sort(classes_.begin(), classes_.end(),
              [](const ClassBound& a, const ClassBound& b) { return a.per_matrix > b.per_matrix; });
    least_base_ = *std::min_element(base_.begin(), base_.end());
  }

  // Conditions 1 and 2.
  [[nodiscard]] Nanoseconds Least() const {
    Nanoseconds least = *std::max_element(base_.begin(), base_.end());
    for (const ClassBound& c : classes_) least = std::max(least, least_base_ + c.cost[1]);
    return least;
  }

  // A makespan that is enough by all conditions: everything on one lane.
  [[nodiscard]] Nanoseconds Enough() const {
    Nanoseconds enough = *std::max_element(base_.begin(), base_.end()) + divisible_;
    for (const ClassBound& c : classes_) enough += (c.fixed + c.per_matrix) * c.count;
    return enough;
  }

  [[nodiscard]] bool Possible(Nanoseconds makespan) const {
    return AreaSuffices(makespan) && PigeonsFit(makespan);
  }

 private:
  [[nodiscard]] bool AreaSuffices(Nanoseconds makespan) const {
    __int128 work = divisible_;
    for (const ClassBound& c : classes_) {
      const auto beyond = std::upper_bound(c.cost.begin(), c.cost.end(), makespan - least_base_);
      const int64_t per_lane = beyond - c.cost.begin() - 1;
      if (per_lane <= 0) return false;
      const int64_t lanes = (c.count + per_lane - 1) / per_lane;
      work +=
          static_cast<__int128>(c.per_matrix) * c.count + static_cast<__int128>(c.fixed) * lanes;
    }
    __int128 room = 0;
    for (Nanoseconds base : base_) room += std::max<Nanoseconds>(0, makespan - base);
    return work <= room;
  }

  [[nodiscard]] bool PigeonsFit(Nanoseconds makespan) const {
    int64_t pigeons = 0;
    Nanoseconds least_fixed = std::numeric_limits<Nanoseconds>::max();
    for (const ClassBound& c : classes_) {
      pigeons += c.count;
      least_fixed = std::min(least_fixed, c.fixed);
      if (c.per_matrix == 0) break;
      int64_t holes = 0;
      for (Nanoseconds base : base_) {
        const Nanoseconds room = makespan - base - least_fixed;
        if (room > 0) holes += room / c.per_matrix;
        if (holes >= pigeons) break;
      }
      if (holes < pigeons) return false;
    }
    return true;
  }

  std::vector<ClassBound> classes_;  // largest per_matrix first
  const std::vector<Nanoseconds>& base_;
  Nanoseconds divisible_;
  Nanoseconds least_base_ = 0;
};

}  // namespace

Nanoseconds LowerBound(const AssignmentProblem& problem) {
  const Feasibility feasibility(problem);
  Nanoseconds low = feasibility.Least();
  Nanoseconds high = std::max(low, feasibility.Enough());
  while (low < high) {
    const Nanoseconds middle = low + (high - low) / 2;
    if (feasibility.Possible(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace dmuond::scheduler
