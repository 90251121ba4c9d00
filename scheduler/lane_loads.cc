#include "scheduler/lane_loads.h"

#include <algorithm>

namespace dmuond::scheduler {

LaneLoads::LaneLoads(const AssignmentProblem& problem, const std::vector<BatchCost>& costs)
    : problem_(&problem),
      costs_(&costs),
      counts_(problem.base_load.size(), std::vector<int32_t>(problem.classes.size(), 0)),
      load_(problem.base_load),
      bytes_(problem.base_bytes) {}

Nanoseconds LaneLoads::slowest() const { return *std::max_element(load_.begin(), load_.end()); }

Nanoseconds LaneLoads::Growth(int32_t lane, int32_t k, int32_t more) const {
  const int32_t have = counts_[lane][k];
  return (*costs_)[k].Cost(have + more) - (*costs_)[k].Cost(have);
}

int64_t LaneLoads::BytesOf(int32_t k, int32_t matrices) const {
  const MatrixClass& c = problem_->classes[k];
  const int64_t spare = std::min(matrices, (*costs_)[k].batch_max());
  return matrices * (c.slot_bytes + c.staging_bytes) + spare * c.slot_bytes;
}

int64_t LaneLoads::BytesGrowth(int32_t lane, int32_t k, int32_t more) const {
  const int32_t have = counts_[lane][k];
  return BytesOf(k, have + more) - BytesOf(k, have);
}

void LaneLoads::Add(int32_t lane, int32_t k, int32_t more) {
  load_[lane] += Growth(lane, k, more);
  bytes_[lane] += BytesGrowth(lane, k, more);
  counts_[lane][k] += more;
}

}  // namespace dmuond::scheduler
