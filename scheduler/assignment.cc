#include "scheduler/assignment.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/lane_filling.h"
#include "scheduler/lane_loads.h"
#include "scheduler/limits.h"
#include "scheduler/local_search.h"
#include "scheduler/lower_bound.h"

namespace dmuond::scheduler {
namespace {

absl::Status NoRoom(const AssignmentProblem& problem, const LaneLoads& lanes, int32_t k) {
  const int64_t least = *std::min_element(lanes.bytes().begin(), lanes.bytes().end());
  const MatrixClass& c = problem.classes[k];
  return absl::ResourceExhaustedError(
      absl::StrCat("a ", c.matrix.rows, "x", c.matrix.cols, " matrix needs ",
                   2 * c.slot_bytes + c.staging_bytes, " bytes of lane memory, and of the ",
                   problem.memory_bytes, " bytes per lane the emptiest lane has ",
                   std::max<int64_t>(0, problem.memory_bytes - least), " left"));
}

// Where one more matrix of class k is done soonest; -1 where no lane has room for it.
int32_t SoonestLane(const LaneLoads& lanes, int32_t k) {
  int32_t best = -1;
  Nanoseconds best_load = 0;
  for (int32_t lane = 0; lane < lanes.lanes(); ++lane) {
    const Nanoseconds load = lanes.load(lane) + lanes.Growth(lane, k, 1);
    if (best >= 0 && load >= best_load) continue;
    if (!lanes.HasRoom(lane, lanes.BytesGrowth(lane, k, 1))) continue;
    best = lane;
    best_load = load;
  }
  return best;
}

// Largest matrices first, each to the lane that is done soonest with it.
absl::Status StartGreedily(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
                           LaneLoads& lanes) {
  std::vector<int32_t> order(problem.classes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return costs[a].Cost(1) > costs[b].Cost(1); });
  for (int32_t k : order) {
    for (int32_t i = 0; i < problem.classes[k].count; ++i) {
      const int32_t lane = SoonestLane(lanes, k);
      if (lane < 0) return NoRoom(problem, lanes, k);
      lanes.Add(lane, k, 1);
    }
  }
  return absl::OkStatus();
}

// Bisects for the least makespan that FillLanes reaches; keeps the best of that and `lanes`.
void ImproveByFilling(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
                      Nanoseconds lower_bound, LaneLoads& lanes) {
  constexpr int kTries = 10;
  Nanoseconds low = lower_bound;
  for (int i = 0; i < kTries && low < lanes.slowest(); ++i) {
    // The bound itself first: regular models often reach it.
    const Nanoseconds makespan = i == 0 ? low + low / 1000 : low + (lanes.slowest() - low) / 2;
    LaneLoads filled(problem, costs);
    const bool worked = makespan < lanes.slowest() && FillLanes(problem, costs, makespan, filled);
    if (worked) ImproveSlowestLane(lower_bound, filled);
    if (worked && filled.slowest() < lanes.slowest()) {
      lanes = std::move(filled);
    } else {
      low = makespan + 1;
    }
  }
}

std::vector<BatchCost> CostsFor(const AssignmentProblem& problem, int32_t halvings, bool& batches) {
  std::vector<BatchCost> costs;
  batches = false;
  for (const MatrixClass& c : problem.classes) {
    const int32_t preferred =
        PreferredBatch(*problem.model, c.matrix, c.count, problem.batch_slack);
    const int32_t batch = std::max(1, preferred >> halvings);
    batches = batches || batch > 1;
    costs.emplace_back(*problem.model, c.matrix, c.count, batch);
  }
  return costs;
}

}  // namespace

absl::StatusOr<Assignment> Assign(const AssignmentProblem& problem) {
  // Smaller batches need fewer spare slots.
  for (int32_t halvings = 0;; ++halvings) {
    bool batches = false;
    Assignment assignment;
    assignment.costs = CostsFor(problem, halvings, batches);
    LaneLoads lanes(problem, assignment.costs);
    if (absl::Status status = StartGreedily(problem, assignment.costs, lanes); !status.ok()) {
      if (batches) continue;
      return status;
    }
    assignment.lower_bound = LowerBound(problem);
    // Closer than this is within what the choice of batch sizes leaves open.
    const Nanoseconds target = assignment.lower_bound + assignment.lower_bound / 1000;
    ImproveSlowestLane(target, lanes);
    // A single lane has everything, however it is filled.
    if (lanes.lanes() > 1 && lanes.slowest() > target) {
      ImproveByFilling(problem, assignment.costs, assignment.lower_bound, lanes);
    }
    assignment.counts = lanes.counts();
    assignment.load = lanes.loads();
    assignment.bytes = lanes.bytes();
    return assignment;
  }
}

}  // namespace dmuond::scheduler
