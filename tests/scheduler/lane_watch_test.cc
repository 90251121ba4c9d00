#include "scheduler/job/lane_watch.h"

#include <optional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr LaneWatchOptions kOptions{.lane_timeout = milliseconds(2'000),
                                    .work_timeout = milliseconds(10'000)};

// A lane and who watches it, tick by tick.
class LaneWatchTest : public ::testing::Test {
 protected:
  LaneWatch::Look Tick() {
    now_ += milliseconds(100);
    if (computes_) used_ += milliseconds(100);
    LaneWatch::Look look =
        watch_.OnTick(now_, owes_, [this] { return std::optional<milliseconds>(used_); });
    if (look.ping.has_value() && answers_) {
      answer_.number = *look.ping;
      watch_.OnAnswer(answer_);
    }
    if (look.ping.has_value()) ++pings_;
    return look;
  }
  // How it hangs, if it does so within the time.
  std::string Within(milliseconds time) {
    for (milliseconds passed{0}; passed < time; passed += milliseconds(100)) {
      const LaneWatch::Look look = Tick();
      overdue_ = overdue_ || look.overdue;
      if (!look.hangs.empty()) return look.hangs;
    }
    return "";
  }

  LaneWatch watch_{kOptions};
  TimePoint now_;
  LaneWatch::Answer answer_;
  bool answers_ = true;
  bool computes_ = false;
  bool owes_ = false;
  bool overdue_ = false;
  int pings_ = 0;
  milliseconds used_{0};
};

TEST_F(LaneWatchTest, OneThatAnswersMayRestForEver) {
  EXPECT_THAT(Within(std::chrono::minutes(10)), IsEmpty());
  EXPECT_GT(pings_, 600);
  EXPECT_TRUE(watch_.answers());
}

TEST_F(LaneWatchTest, OneThatIsStoppedHangs) {
  EXPECT_THAT(Within(milliseconds(5'000)), IsEmpty());
  answers_ = false;
  EXPECT_THAT(Within(milliseconds(1'900)), IsEmpty());
  EXPECT_THAT(Within(milliseconds(1'000)), HasSubstr("not answered"));
  EXPECT_FALSE(watch_.answers());
}

TEST_F(LaneWatchTest, OneThatWakesInTimeLives) {
  answers_ = false;
  EXPECT_THAT(Within(milliseconds(1'900)), IsEmpty());
  watch_.OnReport();
  EXPECT_THAT(Within(milliseconds(1'900)), IsEmpty());
}

TEST_F(LaneWatchTest, OneThatComputesHasTheLongerTime) {
  answers_ = false;
  computes_ = true;
  EXPECT_THAT(Within(milliseconds(10'000)), IsEmpty());
  EXPECT_THAT(Within(milliseconds(1'000)), HasSubstr("computed for 10 s"));
}

TEST_F(LaneWatchTest, ADeviceThatGetsNothingDoneHangsThoughItsLaneAnswers) {
  answer_.device_busy = true;
  EXPECT_THAT(Within(milliseconds(9'000)), IsEmpty());
  ++answer_.progress;
  EXPECT_THAT(Within(milliseconds(9'000)), IsEmpty());
  EXPECT_THAT(Within(milliseconds(2'500)), HasSubstr("device has been busy"));
}

TEST_F(LaneWatchTest, WhatItOwesHasADeadlineWithoutProgress) {
  owes_ = true;
  EXPECT_THAT(Within(milliseconds(9'000)), IsEmpty());
  ++answer_.progress;
  EXPECT_THAT(Within(milliseconds(9'000)), IsEmpty());
  EXPECT_THAT(Within(milliseconds(2'500)), HasSubstr("got nothing done"));
}

TEST_F(LaneWatchTest, OneThatOthersKeepWaitingHasTwiceTheTime) {
  owes_ = true;
  answer_.awaits_rail = true;
  EXPECT_THAT(Within(milliseconds(10'500)), IsEmpty());
  EXPECT_TRUE(overdue_);
  EXPECT_THAT(Within(milliseconds(8'500)), IsEmpty());
  EXPECT_THAT(Within(milliseconds(1'500)), HasSubstr("got nothing done for 20"));
}

TEST_F(LaneWatchTest, TheDaemonsOwnPauseIsNotTheLanes) {
  answers_ = false;
  EXPECT_THAT(Within(milliseconds(1'000)), IsEmpty());
  now_ += std::chrono::hours(1);  // stopped, and its lanes' answers lie unread
  EXPECT_THAT(Tick().hangs, IsEmpty());
}

TEST_F(LaneWatchTest, WithoutALaneTimeoutItIsNotAsked) {
  LaneWatch watch({.lane_timeout = milliseconds(0), .work_timeout = milliseconds(10'000)});
  for (int i = 0; i < 1'000; ++i) {
    now_ += milliseconds(100);
    const LaneWatch::Look look = watch.OnTick(now_, false, [] { return std::nullopt; });
    EXPECT_FALSE(look.ping.has_value());
    EXPECT_THAT(look.hangs, IsEmpty());
  }
}

}  // namespace
}  // namespace dmuond::scheduler
