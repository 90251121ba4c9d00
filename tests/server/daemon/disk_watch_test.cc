#include "server/daemon/snapshots/disk_watch.h"

#include <optional>

#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

using std::chrono::milliseconds;
using News = DiskWatch::News;

class DiskWatchTest : public ::testing::Test {
 protected:
  News Tick(std::optional<uint64_t> operation, milliseconds later = milliseconds(100)) {
    now_ += later;
    return watch_.OnTick(now_, operation);
  }
  // The ticks that news came with, of so many.
  int TicksUntil(News news, std::optional<uint64_t> operation, int ticks) {
    for (int tick = 1; tick <= ticks; ++tick) {
      if (Tick(operation) == news) return tick;
    }
    return -1;
  }

  DiskWatch watch_{milliseconds(2'000)};
  scheduler::TimePoint now_;
};

TEST_F(DiskWatchTest, AThreadThatRestsNeverHangs) {
  EXPECT_EQ(TicksUntil(News::kHangs, std::nullopt, 1'000), -1);
}

TEST_F(DiskWatchTest, ASlowDiskWhoseOperationsEndNeverHangs) {
  for (uint64_t operation = 1; operation <= 100; ++operation) {
    EXPECT_EQ(TicksUntil(News::kHangs, operation, 20), -1) << operation;
  }
}

TEST_F(DiskWatchTest, AnOperationThatTakesTheTimeoutHangsAndIsSaidOnce) {
  EXPECT_EQ(TicksUntil(News::kHangs, 7, 100), 21) << "the first tick sees it begin";
  EXPECT_TRUE(watch_.hangs());
  EXPECT_EQ(watch_.waited(), milliseconds(2'000));
  EXPECT_EQ(TicksUntil(News::kHangs, 7, 100), -1);
  EXPECT_TRUE(watch_.hangs());
}

TEST_F(DiskWatchTest, ItAnswersAgainWhenThatOperationHasEnded) {
  ASSERT_EQ(TicksUntil(News::kHangs, 7, 100), 21);
  EXPECT_EQ(Tick(std::nullopt), News::kAnswers);
  EXPECT_FALSE(watch_.hangs());
  EXPECT_EQ(TicksUntil(News::kHangs, 8, 100), 21);
  EXPECT_EQ(Tick(9), News::kAnswers) << "another one is under way";
  EXPECT_EQ(TicksUntil(News::kHangs, 9, 100), 20) << "and may hang as well";
}

TEST_F(DiskWatchTest, ADaemonThatWasStoppedDoesNotBlameItsDisk) {
  EXPECT_EQ(Tick(7), News::kNone);
  EXPECT_EQ(Tick(7, std::chrono::minutes(10)), News::kNone);
  EXPECT_EQ(Tick(std::nullopt), News::kNone);
}

}  // namespace
}  // namespace dmuond::server
