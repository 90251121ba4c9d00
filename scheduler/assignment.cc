#include "scheduler/assignment.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/limits.h"
#include "scheduler/lower_bound.h"

namespace dmuond::scheduler {
namespace {

// Largest matrices first, each to the lane that is done soonest with it.
class Greedy {
 public:
  Greedy(const AssignmentProblem& problem, std::vector<BatchCost> costs)
      : problem_(problem), lanes_(problem.base_load.size()) {
    assignment_.costs = std::move(costs);
    assignment_.counts.assign(lanes_, std::vector<int32_t>(problem.classes.size(), 0));
    assignment_.load = problem.base_load;
    bytes_ = problem.base_bytes;
  }

  absl::StatusOr<Assignment> Run() {
    for (size_t k : LargestFirst()) {
      for (int32_t i = 0; i < problem_.classes[k].count; ++i) {
        const size_t lane = BestLane(k);
        if (lane == lanes_) return NoRoom(k);
        assignment_.load[lane] += Growth(lane, k);
        bytes_[lane] += Bytes(lane, k);
        ++assignment_.counts[lane][k];
      }
    }
    assignment_.bytes = std::move(bytes_);
    return std::move(assignment_);
  }

 private:
  [[nodiscard]] std::vector<size_t> LargestFirst() const {
    std::vector<size_t> order(problem_.classes.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return assignment_.costs[a].Cost(1) > assignment_.costs[b].Cost(1);
    });
    return order;
  }

  [[nodiscard]] Nanoseconds Growth(size_t lane, size_t k) const {
    const int32_t have = assignment_.counts[lane][k];
    return assignment_.costs[k].Cost(have + 1) - assignment_.costs[k].Cost(have);
  }

  // One more matrix: its state and staging, and a spare slot while batches still grow.
  [[nodiscard]] int64_t Bytes(size_t lane, size_t k) const {
    const MatrixClass& c = problem_.classes[k];
    const bool batch_grows = assignment_.counts[lane][k] < assignment_.costs[k].batch_max();
    return c.slot_bytes + c.staging_bytes + (batch_grows ? c.slot_bytes : 0);
  }

  [[nodiscard]] size_t BestLane(size_t k) const {
    size_t best = lanes_;
    Nanoseconds best_load = 0;
    for (size_t lane = 0; lane < lanes_; ++lane) {
      if (problem_.memory_bytes > 0 && bytes_[lane] + Bytes(lane, k) > problem_.memory_bytes) {
        continue;
      }
      const Nanoseconds load = assignment_.load[lane] + Growth(lane, k);
      if (best == lanes_ || load < best_load) {
        best = lane;
        best_load = load;
      }
    }
    return best;
  }

  [[nodiscard]] absl::Status NoRoom(size_t k) const {
    const int64_t least = *std::min_element(bytes_.begin(), bytes_.end());
    const MatrixClass& c = problem_.classes[k];
    return absl::ResourceExhaustedError(
        absl::StrCat("a ", c.rows, "x", c.cols, " matrix needs ",
                     2 * c.slot_bytes + c.staging_bytes, " bytes of lane memory, and of the ",
                     problem_.memory_bytes, " bytes per lane the emptiest lane has ",
                     std::max<int64_t>(0, problem_.memory_bytes - least), " left"));
  }

  const AssignmentProblem& problem_;
  const size_t lanes_;
  Assignment assignment_;
  std::vector<int64_t> bytes_;
};

}  // namespace

absl::StatusOr<Assignment> Assign(const AssignmentProblem& problem) {
  absl::StatusOr<Assignment> assignment;
  // Smaller batches need fewer spare slots.
  for (int32_t halvings = 0;; ++halvings) {
    std::vector<BatchCost> costs;
    bool batches = false;
    for (const MatrixClass& c : problem.classes) {
      const int32_t batch =
          std::max(1, PreferredBatch(*problem.model, c.rows, c.cols, c.count) >> halvings);
      batches = batches || batch > 1;
      costs.emplace_back(*problem.model, c.rows, c.cols, c.count, batch);
    }
    assignment = Greedy(problem, std::move(costs)).Run();
    if (assignment.ok() || !batches) break;
  }
  if (!assignment.ok()) return assignment;
  assignment->lower_bound = LowerBound(problem);
  return assignment;
}

}  // namespace dmuond::scheduler
