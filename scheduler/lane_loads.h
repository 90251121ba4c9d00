// How many matrices of each class every lane has, with the loads and bytes that follow: the state
// on which the search for a better assignment works.
#ifndef DMUOND_SCHEDULER_LANE_LOADS_H_
#define DMUOND_SCHEDULER_LANE_LOADS_H_

#include <cstdint>
#include <vector>

#include "scheduler/assignment.h"

namespace dmuond::scheduler {

class LaneLoads {
 public:
  // No matrix on any lane. `problem` and `costs` must outlive this.
  LaneLoads(const AssignmentProblem& problem, const std::vector<BatchCost>& costs);

  [[nodiscard]] int32_t lanes() const { return static_cast<int32_t>(load_.size()); }
  [[nodiscard]] int32_t classes() const { return static_cast<int32_t>(problem_->classes.size()); }
  [[nodiscard]] int32_t count(int32_t lane, int32_t k) const { return counts_[lane][k]; }
  [[nodiscard]] Nanoseconds load(int32_t lane) const { return load_[lane]; }
  [[nodiscard]] Nanoseconds slowest() const;
  [[nodiscard]] const std::vector<std::vector<int32_t>>& counts() const { return counts_; }
  [[nodiscard]] const std::vector<Nanoseconds>& loads() const { return load_; }
  [[nodiscard]] const std::vector<int64_t>& bytes() const { return bytes_; }

  // What the lane's load and bytes grow by with `more` (or, negative, fewer) matrices of class k.
  [[nodiscard]] Nanoseconds Growth(int32_t lane, int32_t k, int32_t more) const;
  [[nodiscard]] int64_t BytesGrowth(int32_t lane, int32_t k, int32_t more) const;
  [[nodiscard]] bool HasRoom(int32_t lane, int64_t more_bytes) const {
    return problem_->memory_bytes == 0 || bytes_[lane] + more_bytes <= problem_->memory_bytes;
  }
  void Add(int32_t lane, int32_t k, int32_t more);

 private:
  // State, spare slots for the largest batch, staging.
  [[nodiscard]] int64_t BytesOf(int32_t k, int32_t matrices) const;

  const AssignmentProblem* problem_;
  const std::vector<BatchCost>* costs_;
  std::vector<std::vector<int32_t>> counts_;
  std::vector<Nanoseconds> load_;
  std::vector<int64_t> bytes_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LANE_LOADS_H_
