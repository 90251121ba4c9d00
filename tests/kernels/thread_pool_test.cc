#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "kernels/cpu/core_type.h"
#include "kernels/cpu/pieces.h"

namespace dmuond::kernels::cpu {
namespace {

TEST(ThreadPool, EveryIndexRunsOnceAndIsSeenAfterwards) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int round = 0; round < 200; ++round) {
      const int64_t count = round % 7 == 0 ? round : 13;
      std::vector<int> runs(static_cast<size_t>(count));  // plain: the pool must order accesses
      pool.ParallelFor(count, [&](int64_t index, int) { ++runs[index]; });
      for (const int n : runs) ASSERT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, AWorkersNumberIsNeverUsedByTwoAtATime) {
  ThreadPool pool(4);
  std::vector<int> inside(4);  // plain: two at a time would be a race
  std::atomic<bool> collided{false};
  pool.ParallelFor(2000, [&](int64_t, int worker) {
    if (++inside[worker] != 1) collided = true;
    --inside[worker];
  });
  EXPECT_FALSE(collided);
}

TEST(Pieces, NumbersThePiecesOfAllItemsInARow) {
  Pieces pieces;
  EXPECT_EQ(pieces.total(), 0);
  pieces.Add(2);
  pieces.Add(0);
  pieces.AddElements(kPieceElements + 1);
  ASSERT_EQ(pieces.total(), 4);
  const std::vector<std::pair<size_t, int64_t>> expected = {{0, 0}, {0, 1}, {2, 0}, {2, 1}};
  for (int64_t i = 0; i < pieces.total(); ++i) {
    EXPECT_EQ(pieces.Locate(i).item, expected[i].first);
    EXPECT_EQ(pieces.Locate(i).piece, expected[i].second);
  }
  pieces.Clear();
  EXPECT_EQ(pieces.total(), 0);
}

TEST(CoreType, IsOneThatOpenBlasKnows) {
  const std::string type = OpenBlasCoreType();
  const std::vector<std::string> known = {"", "SkylakeX", "Haswell", "Zen", "Sandybridge"};
  EXPECT_NE(std::find(known.begin(), known.end(), type), known.end()) << type;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    EXPECT_NE(type, "");
  }
#endif
}

}  // namespace
}  // namespace dmuond::kernels::cpu
