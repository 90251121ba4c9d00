#include "scheduler/job/lane_set.h"

#include <chrono>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/job/impossible.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr LaneWatchOptions kWatch{.lane_timeout = milliseconds(2'000),
                                  .work_timeout = milliseconds(10'000)};
constexpr LaneIndex kFirst(0);
constexpr LaneIndex kSecond(1);

// The two lanes of node 3.
class LaneSetTest : public ::testing::Test {
 protected:
  void Start(uint32_t epoch) {
    for (const LaneIndex lane : {kFirst, kSecond}) lanes_.OnStarted(lane, epoch);
  }
  void StartAndReady(uint32_t epoch) {
    Start(epoch);
    EXPECT_FALSE(lanes_.OnReady(kFirst, "a cpu"));
    EXPECT_TRUE(lanes_.OnReady(kSecond, "a cpu"));
  }
  // Of lanes that answer nothing, and use no processor.
  std::vector<LaneSet::Order> TicksFor(milliseconds time, const LaneSet::Owed& owed = {}) {
    std::vector<LaneSet::Order> all;
    for (milliseconds passed{0}; passed < time; passed += milliseconds(100)) {
      now_ += milliseconds(100);
      for (LaneSet::Order& order : lanes_.OnTick(now_, owed, [](LaneIndex) { return kUsed; })) {
        all.push_back(std::move(order));
      }
    }
    return all;
  }
  template <typename Kind>
  static std::vector<Kind> Of(const std::vector<LaneSet::Order>& orders) {
    std::vector<Kind> of_kind;
    for (const LaneSet::Order& order : orders) {
      if (const auto* one = std::get_if<Kind>(&order)) of_kind.push_back(*one);
    }
    return of_kind;
  }

  static constexpr std::optional<milliseconds> kUsed{milliseconds(5)};
  TimePoint now_{};
  LaneSet lanes_{LaneId(6), 2, kWatch};
};

TEST_F(LaneSetTest, ALaneThatDiesIsGoneOnceAndItsSuccessorBeginsAnew) {
  EXPECT_TRUE(lanes_.all_absent());
  StartAndReady(4);
  EXPECT_TRUE(lanes_.all_ready());
  EXPECT_EQ(lanes_.epoch(), 4);
  EXPECT_EQ(lanes_[kSecond].id, LaneId(7));
  EXPECT_TRUE(lanes_.OnGone(kSecond));
  EXPECT_FALSE(lanes_.OnGone(kSecond));
  EXPECT_FALSE(lanes_.all_ready());
  lanes_.GiveUp();
  EXPECT_TRUE(lanes_.all_absent());
  StartAndReady(5);
  EXPECT_EQ(lanes_.epoch(), 5);
  EXPECT_EQ(lanes_[kSecond].starts, 2);
}

TEST_F(LaneSetTest, WhatNewLanesMapAndLoadEndsWithTheLastOfIt) {
  StartAndReady(1);
  const uint64_t before = lanes_.done();
  lanes_.BeginMapping(0, kFirst);
  lanes_.BeginMapping(0, kSecond);
  EXPECT_TRUE(lanes_.mapping());
  EXPECT_EQ(lanes_.AwaitedFrom(kFirst, {}), "to map the memory of rank 0");
  EXPECT_FALSE(lanes_.OnMapped(0, kFirst));
  EXPECT_FALSE(lanes_.OnMapped(0, kFirst)) << "said twice";
  EXPECT_TRUE(lanes_.OnMapped(0, kSecond));
  EXPECT_FALSE(lanes_.OnMapped(0, kSecond)) << "nothing is left of it";
  EXPECT_EQ(lanes_.done(), before);
  lanes_.BeginLoading();
  EXPECT_EQ(lanes_.AwaitedFrom(kSecond, {}), "to take the state of a snapshot");
  EXPECT_FALSE(lanes_.OnLoaded(kSecond));
  EXPECT_TRUE(lanes_.OnLoaded(kFirst));
  lanes_.BeginLoading();
  lanes_.GiveUp();
  EXPECT_FALSE(lanes_.loading()) << "it went with the lanes";
}

TEST_F(LaneSetTest, AnAttemptIsPublishedWhenTheLastLaneHasPublishedIt) {
  StartAndReady(1);
  lanes_.OnPublished(kFirst, 9);
  EXPECT_EQ(lanes_.published_attempt(), 0);
  lanes_.OnPublished(kSecond, 8);
  EXPECT_EQ(lanes_.published_attempt(), 8);
  lanes_.GiveUp();
  EXPECT_EQ(lanes_.published_attempt(), 8) << "it is out, whoever computes next";
  lanes_.ForgetState();
  EXPECT_EQ(lanes_.published_attempt(), 0);
}

TEST_F(LaneSetTest, ALaneThatDoesNotAnswerIsKilledAndOneThatSurvivesThatIsNamed) {
  StartAndReady(1);
  const std::vector<LaneSet::Order> orders = TicksFor(milliseconds(5'000));
  EXPECT_EQ(Of<LaneSet::Ping>(orders).size(), 2);
  const auto kills = Of<LaneSet::Kill>(orders);
  ASSERT_EQ(kills.size(), 2);
  EXPECT_THAT(kills[0].why, HasSubstr("it has not answered"));
  EXPECT_EQ(lanes_[kFirst].state, LaneSet::State::kCondemned);
  EXPECT_FALSE(lanes_.OnReady(kFirst, "late")) << "what it still says changes nothing";
  EXPECT_TRUE(lanes_.OnGone(kSecond));
  EXPECT_THAT(TicksFor(milliseconds(50'000)), IsEmpty());
  const auto stay = Of<LaneSet::Unkillable>(TicksFor(milliseconds(10'000)));
  ASSERT_FALSE(stay.empty());
  EXPECT_EQ(stay.front().lane, kFirst);
}

TEST_F(LaneSetTest, WhoKeepsAnOverdueLaneWaitingIsExpelledBeforeTheLaneIsBlamed) {
  StartAndReady(1);
  const auto say = [&](LaneIndex lane, bool awaits_rail, std::vector<int32_t> ranks) {
    LaneWatch::Answer answer;
    answer.awaits_rail = awaits_rail;
    answer.awaited_ranks = std::move(ranks);
    lanes_.OnPong(lane, answer);
  };
  say(kFirst, /*awaits_rail=*/false, {2, 5});
  say(kSecond, /*awaits_rail=*/true, {});
  std::vector<LaneSet::Order> orders = lanes_.OnGatherOverdue(now_, 7, "nothing came");
  ASSERT_EQ(orders.size(), 1) << "another node's lane keeps the second one";
  const auto expelled = Of<LaneSet::Expel>(orders);
  ASSERT_EQ(expelled.size(), 1);
  EXPECT_THAT(expelled[0].ranks, ElementsAre(2, 5));
  EXPECT_TRUE(expelled[0].else_condemn);
  lanes_.OnGathered(kFirst, 7, {});
  EXPECT_THAT(lanes_.OnGatherOverdue(now_, 7, "nothing came"), IsEmpty());
  say(kSecond, /*awaits_rail=*/false, {});
  orders = lanes_.OnGatherOverdue(now_, 7, "nothing came");
  const auto kills = Of<LaneSet::Kill>(orders);
  ASSERT_EQ(kills.size(), 1);
  EXPECT_EQ(kills[0].lane, kSecond);
  EXPECT_EQ(kills[0].awaited, "the gradients of attempt 7");
}

TEST_F(LaneSetTest, AnImpossibleEventEndsATestAndIsRefusedInTheProduct) {
  EXPECT_DEATH((void)lanes_.OnReady(kFirst, "a cpu"), "LaneSet in state Absent cannot have: ready");
  static std::string said;
  on_impossible = [](const std::string& what) { said = what; };
  EXPECT_FALSE(lanes_.OnReady(kFirst, "a cpu"));
  on_impossible = nullptr;
  EXPECT_EQ(said, "LaneSet in state Absent cannot have: ready");
  EXPECT_EQ(lanes_[kFirst].state, LaneSet::State::kAbsent);
}

}  // namespace
}  // namespace dmuond::scheduler
