#include "kernels/cuda/gemm_schedule.h"

#include <map>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kClusters = 66;

// How often each 64 x 64 block of D is written, mirror images not counted.
using Blocks = std::map<std::tuple<int, int, int64_t, int64_t>, int>;

Blocks Written(const GemmSchedule& schedule, const std::vector<GemmShape>& shapes) {
  Blocks blocks;
  for (const GemmJob& job : schedule.jobs) {
    if (job.width == 0 || !job.store) continue;
    const GemmShape& shape = shapes[job.problem];
    const int64_t row = int64_t{job.row} * 2;
    const int64_t col = job.col;
    if (job.guest != 0) {
      const int block = (job.guest - 1) % 3;
      const int64_t first = int64_t{(job.guest - 1) / 3} * 2;
      ++blocks[{job.problem, job.batch, first + (block > 0 ? 1 : 0), first + (block > 1 ? 1 : 0)}];
    }
    for (int64_t r = row; r < row + 2; ++r) {
      for (int64_t c = col; c < col + int64_t{job.width}; ++c) {
        if (r * 64 >= shape.rows || c * 64 >= shape.cols) continue;
        if (shape.symmetric && c > r) continue;
        ++blocks[{job.problem, job.batch, r, c}];
      }
    }
  }
  return blocks;
}

TEST(GemmScheduleTest, EveryBlockIsWrittenOnce) {
  for (const int tile_n : {256, 192, 128, 64}) {
    for (const int64_t n : {1, 64, 65, 128, 192, 256, 300, 511, 1024, 2568, 4096}) {
      const std::vector<GemmShape> shapes = {
          {n, n, n, 3, true}, {n, 2 * n + 7, n, 2, false}, {n / 2 + 1, n / 2 + 1, 4 * n, 1, true}};
      const GemmSchedule schedule = MakeSchedule(shapes, tile_n, kClusters);
      const Blocks blocks = Written(schedule, shapes);
      size_t expected = 0;
      for (const GemmShape& shape : shapes) {
        const int64_t rows = (shape.rows + 63) / 64;
        const int64_t cols = (shape.cols + 63) / 64;
        expected += shape.batch * (shape.symmetric ? rows * (rows + 1) / 2 : rows * cols);
      }
      EXPECT_EQ(blocks.size(), expected) << "n = " << n << ", tile_n = " << tile_n;
      for (const auto& [block, count] : blocks) ASSERT_EQ(count, 1);
    }
  }
}

TEST(GemmScheduleTest, PartnersTakeTheSameSteps) {
  const std::vector<GemmShape> shapes = {{1000, 1000, 1000, 5, true}, {256, 256, 4096, 3, true}};
  for (const int tile_n : {256, 192, 128, 64}) {
    const GemmSchedule schedule = MakeSchedule(shapes, tile_n, kClusters);
    for (size_t i = 0; i < schedule.jobs.size(); i += 2) {
      const GemmJob& a = schedule.jobs[i];
      const GemmJob& b = schedule.jobs[i + 1];
      ASSERT_EQ(a.problem, b.problem);
      ASSERT_EQ(a.width, b.width);
      ASSERT_EQ(a.stages, b.stages);
      ASSERT_EQ(a.paired, b.paired);
      if (a.paired != 0) {
        if (SharingOf(tile_n) == PairSharing::kRows) {
          ASSERT_EQ(a.row, b.row);
        } else {
          ASSERT_EQ(a.col, b.col);
        }
        ASSERT_EQ(a.batch, b.batch);
      }
    }
  }
}

// A's rows are loaded once where they are among B's columns; two steps along k then fit a stage.
TEST(GemmScheduleTest, NarrowTilesOfTheDiagonalTakeTwoStepsAStage) {
  GemmShape shape{300, 300, 800, 3, true};
  for (const bool same : {false, true}) {
    shape.same_operands = same;
    for (const int tile_n : {256, 192, 128, 64}) {
      const GemmSchedule schedule = MakeSchedule({&shape, 1}, tile_n, kClusters);
      for (size_t i = 0; i < schedule.jobs.size(); ++i) {
        const GemmJob& job = schedule.jobs[i];
        if (job.width == 0) continue;
        EXPECT_TRUE(same || !job.a_in_b);
        EXPECT_EQ(job.stages, job.doubled ? 7 : 13);
        EXPECT_EQ(job.stages, schedule.jobs[i ^ 1].stages);
        if (!job.a_in_b) continue;
        EXPECT_LE(job.col, job.row * 2);
        EXPECT_GE(job.col + job.width, job.row * 2 + 2);
      }
    }
  }
}

TEST(GemmScheduleTest, EveryTileKnowsThatNoMoreThanTheLowerFormIsStored) {
  for (const bool lower : {false, true}) {
    GemmShape shape{300, 300, 300, 3, /*symmetric=*/true};
    shape.store_lower = lower;
    for (const int tile_n : {256, 192, 128, 64}) {
      for (const GemmJob& job : MakeSchedule({&shape, 1}, tile_n, kClusters).jobs) {
        EXPECT_EQ(job.store_lower, lower && job.width != 0);
      }
    }
  }
}

TEST(GemmScheduleTest, EveryListEnds) {
  const std::vector<GemmShape> shapes = {{4096, 4096, 4096, 1, true}};
  const GemmSchedule schedule = MakeSchedule(shapes, 256, kClusters);
  for (int c = 0; c < schedule.clusters; ++c) {
    EXPECT_EQ(schedule.jobs[(schedule.turns * schedule.clusters + c) * 2].width, 0);
  }
}

TEST(GemmScheduleTest, ATriangleOf4096FillsTheChip) {
  GemmShape shape{4096, 4096, 4096, 1, true};
  EXPECT_LT(MakeSchedule({&shape, 1}, 256, kClusters).imbalance, 1.1);
  shape.same_operands = true;
  EXPECT_LT(MakeSchedule({&shape, 1}, 256, kClusters).imbalance, 1.03);
}

// 120 tiles of 128 x 128 below the diagonal and 16 on it are 68 pairs, but only 132 tiles'
// products.
TEST(GemmScheduleTest, GuestsMakeATriangleOf2048OneTurn) {
  GemmShape shape{2048, 2048, 2048, 1, true};
  EXPECT_EQ(MakeSchedule({&shape, 1}, 128, kClusters).turns, 2);
  shape.same_operands = true;
  for (const int64_t n : {2048, 2040}) {
    shape.rows = shape.cols = n;
    const GemmSchedule schedule = MakeSchedule({&shape, 1}, 128, kClusters);
    EXPECT_EQ(schedule.turns, 1);
    int guests = 0;
    for (const GemmJob& job : schedule.jobs) {
      if (job.guest == 0) continue;
      ++guests;
      EXPECT_TRUE(job.a_in_b);
      EXPECT_EQ(job.width, 2);
      EXPECT_EQ(job.col, job.row * 2);
    }
    EXPECT_GT(guests, 0);
    EXPECT_EQ(guests % 3, 0);
    const int64_t rows = (n + 63) / 64;
    const Blocks blocks = Written(schedule, {shape});
    EXPECT_EQ(static_cast<int64_t>(blocks.size()), rows * (rows + 1) / 2);
    for (const auto& [block, count] : blocks) ASSERT_EQ(count, 1);
  }
}

// 36 pairs of whole tiles would leave 30 clusters idle.
TEST(GemmScheduleTest, PairsAreHalvedWhereClustersAreLeft) {
  const GemmShape shape{2048, 2048, 2048, 1, true};
  const GemmSchedule schedule = MakeSchedule({&shape, 1}, 256, kClusters);
  EXPECT_EQ(schedule.turns, 1);
  EXPECT_GT(schedule.clusters, 60);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
