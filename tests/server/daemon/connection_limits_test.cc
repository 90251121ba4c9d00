#include "server/daemon/calls/connection_limits.h"

#include <chrono>
#include <optional>
#include <set>

#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

constexpr uint64_t kOne = 1000;
constexpr uint64_t kOther = 1001;

TEST(ConnectionLimitsTest, TheOldestStrangerOfTheSameUserMakesRoom) {
  ConnectionLimits limits({.all = 9, .per_holder = 5, .strangers_per_holder = 2});
  EXPECT_TRUE(limits.Add(1, kOther).taken);
  EXPECT_TRUE(limits.Add(2, kOne).taken);
  EXPECT_EQ(limits.Add(3, kOne).instead, std::nullopt);
  const auto verdict = limits.Add(4, kOne);
  EXPECT_TRUE(verdict.taken);
  EXPECT_EQ(verdict.instead, 2);
  limits.MakeKnown(3, kOne);
  EXPECT_EQ(limits.Add(5, kOne).instead, std::nullopt) << "one that is known is no stranger";
}

TEST(ConnectionLimitsTest, WhoeverIsKnownStaysAndTheNewestIsRefused) {
  ConnectionLimits limits({.all = 9, .per_holder = 2, .strangers_per_holder = 2});
  for (const uint64_t id : {1, 2}) {
    EXPECT_TRUE(limits.Add(id, kOne).taken);
    limits.MakeKnown(id, kOne);
  }
  EXPECT_FALSE(limits.Add(3, kOne).taken);
  EXPECT_TRUE(limits.Add(4, kOther).taken) << "what one user has is another's business";
  limits.Remove(1, kOne);
  EXPECT_TRUE(limits.Add(5, kOne).taken);
}

TEST(ConnectionLimitsTest, OfAllUsersTogetherNoStrangerOfAnotherGoes) {
  ConnectionLimits limits({.all = 2, .per_holder = 2, .strangers_per_holder = 2});
  EXPECT_TRUE(limits.Add(1, kOne).taken);
  EXPECT_TRUE(limits.Add(2, kOne).taken);
  EXPECT_FALSE(limits.Add(3, kOther).taken);
  limits.Remove(1, kOne);
  limits.Remove(1, kOne);  // twice does no harm
  EXPECT_TRUE(limits.Add(4, kOther).taken);
  EXPECT_EQ(limits.Add(5, kOne).instead, 2);
}

TEST(ConnectionLimitsTest, WhereAllStrangersAreCountedTogetherOneOfTheHolderWithMostMakesRoom) {
  ConnectionLimits limits({.all = 9, .per_holder = 9, .strangers_per_holder = 2, .strangers = 3});
  EXPECT_TRUE(limits.Add(1, kOne).taken);
  EXPECT_TRUE(limits.Add(2, kOther).taken);
  EXPECT_TRUE(limits.Add(3, kOther).taken);
  EXPECT_EQ(limits.Add(4, kOther).instead, 2) << "one's own first";
  const std::optional<uint64_t> instead = limits.Add(5, 3).instead;
  EXPECT_TRUE(instead == 3U || instead == 4U) << "not the oldest, which has one";
  limits.MakeKnown(1, kOne);
  EXPECT_EQ(limits.Add(6, 4).instead, std::nullopt) << "one that is known is no stranger";
}

TEST(ConnectionLimitsTest, AmongEqualsAnyStrangerMakesRoomAndNotAlwaysTheOldest) {
  ConnectionLimits limits({.all = 99, .per_holder = 9, .strangers_per_holder = 2, .strangers = 4});
  std::set<uint64_t> there;
  bool another = false;
  for (uint64_t id = 1; id <= 64; ++id) {
    const ConnectionLimits::Verdict verdict = limits.Add(id, /*holder=*/id);
    if (verdict.instead.has_value()) {
      another = another || *verdict.instead != *there.begin();
      EXPECT_EQ(there.erase(*verdict.instead), 1U);
    }
    there.insert(id);
  }
  EXPECT_EQ(there.size(), 4U);
  EXPECT_TRUE(another);
}

TEST(ConnectionRateTest, EachHasSoManyInASecond) {
  using std::chrono::milliseconds;
  ConnectionRate rate(2);
  const auto take = [&](int at_ms, uint64_t holder) {
    return rate.Take(ConnectionRate::TimePoint(milliseconds(at_ms)), holder);
  };
  EXPECT_TRUE(take(5000, kOne));
  EXPECT_TRUE(take(5001, kOne));
  EXPECT_FALSE(take(5002, kOne));
  EXPECT_TRUE(take(5003, kOther));
  EXPECT_FALSE(take(5999, kOne));
  EXPECT_TRUE(take(6000, kOne));
}

}  // namespace
}  // namespace dmuond::server
