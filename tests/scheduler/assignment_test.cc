#include "scheduler/assignment.h"

#include <algorithm>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/limits.h"
#include "scheduler/lower_bound.h"
#include "tests/sanitized.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using testing::ForAll;
using ::testing::HasSubstr;
using testing::Pick;

CostModel RandomModel() {
  CostTable table;
  table.tflops = 0.0001;
  table.launch_us = static_cast<double>(Pick(0, 50));
  return CostModel(table);
}

AssignmentProblem RandomProblem(const CostModel& model, int64_t classes, int64_t count_max,
                                int64_t lanes) {
  AssignmentProblem problem;
  problem.model = &model;
  for (int64_t k = 0; k < classes; ++k) {
    const int64_t rows = Pick(1, 40);
    const int64_t cols = Pick(1, 40);
    problem.classes.push_back(
        {{rows, cols}, static_cast<int32_t>(Pick(1, count_max)), rows * cols * 8, rows * cols * 6});
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    problem.base_load.push_back(Pick(0, 3) == 0 ? Pick(0, 200000) : 0);
    problem.base_bytes.push_back(0);
  }
  return problem;
}

// The best makespan over all assignments, by trying them.
Nanoseconds BestMakespan(const AssignmentProblem& problem) {
  std::vector<BatchCost> costs;
  for (const MatrixClass& c : problem.classes) {
    costs.emplace_back(*problem.model, c.matrix, c.count, kBatchMax);
  }
  std::vector<Nanoseconds> load = problem.base_load;
  Nanoseconds best = INT64_MAX;
  const std::function<void(size_t, size_t, int32_t)> place = [&](size_t k, size_t lane,
                                                                 int32_t left) {
    if (k == problem.classes.size()) {
      best = std::min(best, *std::max_element(load.begin(), load.end()));
      return;
    }
    const int32_t from = lane + 1 == load.size() ? left : 0;
    for (int32_t x = from; x <= left; ++x) {
      load[lane] += costs[k].Cost(x);
      if (lane + 1 == load.size()) {
        place(k + 1, 0, k + 1 < problem.classes.size() ? problem.classes[k + 1].count : 0);
      } else {
        place(k, lane + 1, left - x);
      }
      load[lane] -= costs[k].Cost(x);
    }
  };
  place(0, 0, problem.classes[0].count);
  return best;
}

TEST(AssignmentTest, LowerBoundNeverExceedsTheBestAndTheResultIsNearIt) {
  double worst = 0;
  ForAll(3000, [&worst] {
    const CostModel model = RandomModel();
    const AssignmentProblem problem = RandomProblem(model, Pick(1, 3), 4, Pick(1, 3));
    const auto assignment = Assign(problem);
    RC_ASSERT(assignment.ok());
    const Nanoseconds makespan =
        *std::max_element(assignment->load.begin(), assignment->load.end());
    const Nanoseconds best = BestMakespan(problem);
    RC_ASSERT(assignment->lower_bound <= best);
    RC_ASSERT(best <= makespan);
    worst = std::max(worst, static_cast<double>(makespan) / static_cast<double>(best));
    RC_ASSERT(static_cast<double>(makespan) <= 1.35 * static_cast<double>(best));
  });
  RecordProperty("worst_ratio_to_optimum", std::to_string(worst));
}

TEST(AssignmentTest, CountsAddUpAndLoadsAreTheirCosts) {
  ForAll(3000, [] {
    const CostModel model = RandomModel();
    const AssignmentProblem problem = RandomProblem(model, Pick(1, 4), 30, Pick(1, 9));
    const auto assignment = Assign(problem);
    RC_ASSERT(assignment.ok());
    for (size_t k = 0; k < problem.classes.size(); ++k) {
      int32_t sum = 0;
      for (const auto& counts : assignment->counts) sum += counts[k];
      RC_ASSERT(sum == problem.classes[k].count);
    }
    for (size_t lane = 0; lane < assignment->load.size(); ++lane) {
      Nanoseconds load = problem.base_load[lane];
      for (size_t k = 0; k < problem.classes.size(); ++k) {
        load += assignment->costs[k].Cost(assignment->counts[lane][k]);
      }
      RC_ASSERT(load == assignment->load[lane]);
      RC_ASSERT(load <= *std::max_element(assignment->load.begin(), assignment->load.end()));
    }
    RC_ASSERT(assignment->lower_bound <=
              *std::max_element(assignment->load.begin(), assignment->load.end()));
  });
}

TEST(AssignmentTest, MemoryLimitIsKeptOrBothValuesAreNamed) {
  int fitted = 0;
  int refused = 0;
  ForAll(3000, [&] {
    const CostModel model = RandomModel();
    AssignmentProblem problem = RandomProblem(model, Pick(1, 3), 10, Pick(1, 4));
    int64_t all = 0;
    for (const MatrixClass& c : problem.classes) {
      all += c.count * (c.slot_bytes + c.staging_bytes) + c.slot_bytes;
    }
    const auto lanes = static_cast<int64_t>(problem.base_load.size());
    problem.memory_bytes = std::max<int64_t>(1, all / lanes * Pick(70, 250) / 100);
    const auto assignment = Assign(problem);
    if (!assignment.ok()) {
      ++refused;
      RC_ASSERT(assignment.status().code() == absl::StatusCode::kResourceExhausted);
      const std::string message(assignment.status().message());
      RC_ASSERT(message.find(std::to_string(problem.memory_bytes)) != std::string::npos);
      return;
    }
    ++fitted;
    for (int64_t bytes : assignment->bytes) RC_ASSERT(bytes <= problem.memory_bytes);
  });
  EXPECT_GT(fitted, 100 / dmuond::testing::kSlowdown);
  EXPECT_GT(refused, 100 / dmuond::testing::kSlowdown);
}

TEST(AssignmentTest, LittleMemoryMakesBatchesSmaller) {
  CostTable table;
  table.launch_us = 1000;  // large batches are wanted
  const CostModel model(table);
  AssignmentProblem problem;
  problem.model = &model;
  problem.classes = {{{64, 64}, 16, 1000, 0}};
  problem.base_load = {0};
  problem.base_bytes = {0};
  EXPECT_EQ(Assign(problem)->costs[0].Split(16).front(), 16);
  problem.memory_bytes = 21000;
  EXPECT_LE(Assign(problem)->costs[0].Split(16).front(), 5);
  problem.memory_bytes = 16500;
  EXPECT_THAT(std::string(Assign(problem).status().message()),
              HasSubstr("a 64x64 matrix needs 2000 bytes of lane memory, and of the 16500"));
}

TEST(AssignmentTest, RegularPatternsAreFound) {
  // 5.06 matrices per lane: some have six, and those must be of one shape to share a launch.
  const CostModel model{CostTable{}};
  AssignmentProblem problem;
  problem.model = &model;
  problem.classes = {{{1408, 2048}, 3456, 1, 1}, {{2048, 1408}, 1728, 1, 1}};
  problem.base_load.assign(1024, 0);
  problem.base_bytes.assign(1024, 0);
  const auto assignment = Assign(problem);
  const Nanoseconds makespan = *std::max_element(assignment->load.begin(), assignment->load.end());
  EXPECT_LE(static_cast<double>(makespan), 1.0001 * static_cast<double>(assignment->lower_bound));
}

}  // namespace
}  // namespace dmuond::scheduler
