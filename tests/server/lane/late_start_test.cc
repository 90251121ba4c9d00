#include "server/lane/late_start.h"

#include <gtest/gtest.h>

#include <chrono>

namespace dmuond::server::lane {
namespace {

using std::chrono::milliseconds;

// A step of ten buckets, one each 10 ms, whose gradients take `busy` to come. How many are ready
// when they may begin.
int Step(LateStart& start, milliseconds busy, int buckets = 10) {
  static Clock::time_point now{std::chrono::hours(1)};
  start.Arm();
  int begun_at = start.due() ? 0 : -1;
  for (int b = 1; b <= buckets; ++b) {
    now += milliseconds(10);
    start.OnReady(now);
    if (begun_at < 0 && start.due()) begun_at = b;
  }
  start.OnBusy(now);
  now += busy;
  start.OnIdle(now);
  return begun_at;
}

TEST(LateStartTest, BeginsSoThatTwiceTheTimeAndMoreIsLeftUntilTheLastGradient) {
  LateStart start(10);
  EXPECT_EQ(Step(start, milliseconds(10)), 0);  // knows nothing
  EXPECT_EQ(Step(start, milliseconds(3)), 7);   // 23 ms before the tenth: the seventh was there
  EXPECT_EQ(Step(start, milliseconds(40)), 9);
  EXPECT_EQ(Step(start, milliseconds(60)), 1);
  EXPECT_EQ(Step(start, milliseconds(3)), 0);  // before the first one
}

TEST(LateStartTest, LearnsNothingFromAStepThatDidNotEnd) {
  LateStart start(10);
  Step(start, milliseconds(10));
  EXPECT_EQ(Step(start, milliseconds(60), /*buckets=*/4), -1);  // the others never come
  EXPECT_EQ(Step(start, milliseconds(10)), 7);
  // All are ready, and the step is given up while they come.
  start.Arm();
  for (int b = 0; b < 10; ++b) start.OnReady(Clock::time_point(milliseconds(b)));
  start.OnBusy(Clock::time_point(milliseconds(10)));
  EXPECT_EQ(Step(start, milliseconds(10)), 7);
  // Or before any has come.
  start.Arm();
  for (int b = 0; b < 10; ++b) start.OnReady(Clock::time_point(milliseconds(b)));
  EXPECT_EQ(Step(start, milliseconds(10)), 7);
}

TEST(LateStartTest, ABucketThatIsReadyAgainCountsNoMoreThanAllBuckets) {
  LateStart start(2);
  start.Arm();
  for (int i = 0; i < 3; ++i) start.OnReady(Clock::time_point(milliseconds(i)));
  EXPECT_TRUE(start.due());
}

}  // namespace
}  // namespace dmuond::server::lane
