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
    if (job.width == 0 || job.store == 0) continue;
    const GemmShape& shape = shapes[job.problem];
    const int64_t row = int64_t{job.row} * 2;
    const int64_t col = job.col;
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
      ASSERT_EQ(a.paired, b.paired);
      if (a.paired != 0) {
        ASSERT_EQ(a.col, b.col);
        ASSERT_EQ(a.batch, b.batch);
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
  const std::vector<GemmShape> shapes = {{4096, 4096, 4096, 1, true}};
  EXPECT_LT(MakeSchedule(shapes, 256, kClusters).imbalance, 1.08);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
