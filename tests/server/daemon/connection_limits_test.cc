#include "server/daemon/calls/connection_limits.h"

#include <optional>

#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

constexpr uid_t kOne = 1000;
constexpr uid_t kOther = 1001;

TEST(ConnectionLimitsTest, TheOldestStrangerOfTheSameUserMakesRoom) {
  ConnectionLimits limits({.all = 9, .per_uid = 5, .strangers_per_uid = 2});
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
  ConnectionLimits limits({.all = 9, .per_uid = 2, .strangers_per_uid = 2});
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
  ConnectionLimits limits({.all = 2, .per_uid = 2, .strangers_per_uid = 2});
  EXPECT_TRUE(limits.Add(1, kOne).taken);
  EXPECT_TRUE(limits.Add(2, kOne).taken);
  EXPECT_FALSE(limits.Add(3, kOther).taken);
  limits.Remove(1, kOne);
  limits.Remove(1, kOne);  // twice does no harm
  EXPECT_TRUE(limits.Add(4, kOther).taken);
  EXPECT_EQ(limits.Add(5, kOne).instead, 2);
}

}  // namespace
}  // namespace dmuond::server
