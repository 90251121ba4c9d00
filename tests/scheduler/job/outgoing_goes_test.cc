// GOs on their way to the nodes: who gets which, and when.
#include "scheduler/job/outgoing_goes.h"

#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/convert/convert.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Attempt kAttempt = MakeAttempt(GroupEpoch(1), 7);
constexpr microseconds kGather = milliseconds(5);

NodeSet Nodes(const std::vector<int32_t>& nodes) {
  NodeSet set;
  for (const int32_t node : nodes) set.Add(NodeRank(node));
  return set;
}

Go Collect(int32_t first, int32_t count) {
  return {.attempt = kAttempt, .rail = LaneIndex(0), .buckets = {{BucketId(first), count}}};
}

// One rail and three buckets; node 2 has no part in the second one.
RailTables Tables() {
  RailTables tables;
  tables.partials = {{Nodes({0, 1, 2}), Nodes({0, 1}), Nodes({0, 1, 2})}};
  tables.weights = tables.adopts = {{NodeSet(), NodeSet(), NodeSet()}};
  return tables;
}

class OutgoingGoesTest : public ::testing::Test {
 protected:
  const RailTables tables_ = Tables();
  OutgoingGoes goes_{tables_, /*nodes=*/3};
  TimePoint now_{std::chrono::hours(1)};
};

TEST_F(OutgoingGoesTest, AGoWaitsForOthersOfItsRound) {
  EXPECT_EQ(goes_.due(), std::nullopt);
  goes_.Add(now_, kGather, Collect(0, 1));
  EXPECT_EQ(goes_.due(), now_ + kGather / 20);
  goes_.Add(now_ + microseconds(100), kGather, Collect(1, 1));
  EXPECT_EQ(goes_.due(), now_ + kGather / 20);
  EXPECT_EQ(goes_.Take(now_).size(), 3);
  EXPECT_EQ(goes_.due(), std::nullopt);
  EXPECT_THAT(goes_.Take(now_), IsEmpty());
}

TEST_F(OutgoingGoesTest, ThereIsAMillisecondBetweenMessages) {
  goes_.Add(now_, kGather, Collect(0, 1));
  (void)goes_.Take(now_);
  goes_.Add(now_, kGather, Collect(1, 1));
  EXPECT_EQ(goes_.due(), now_ + milliseconds(1));
}

TEST_F(OutgoingGoesTest, TheLastOneOfAnOperationIsDueAtOnce) {
  goes_.Add(now_, kGather, Collect(0, 2));
  Go last = Collect(2, 1);
  last.last = true;
  goes_.Add(now_ + microseconds(1), kGather, last);
  EXPECT_EQ(goes_.due(), now_ + microseconds(1));
}

TEST_F(OutgoingGoesTest, ANodeGetsWhatItHasAPartIn) {
  goes_.Add(now_, kGather, Collect(0, 1));
  goes_.Add(now_, kGather, Collect(1, 2));
  std::map<int32_t, v1::Goes> told;
  for (const Addressed& addressed : goes_.Take(now_)) {
    ASSERT_TRUE(addressed.node.has_value());
    told[*addressed.node] = addressed.message.goes();
  }
  ASSERT_EQ(told.size(), 3);
  for (const int32_t node : {0, 1}) {
    ASSERT_EQ(told[node].goes_size(), 1);
    EXPECT_THAT(told[node].goes(0).buckets(), ElementsAre(0, 3));
  }
  ASSERT_EQ(told[2].goes_size(), 1);
  EXPECT_THAT(told[2].goes(0).buckets(), ElementsAre(0, 1, 2, 1));
  // Of a bucket in which node 2 has no part it hears nothing.
  goes_.Add(now_, kGather, Collect(1, 1));
  EXPECT_EQ(goes_.Take(now_).size(), 2);
}

TEST_F(OutgoingGoesTest, WhereAllHaveTheSamePartsOneMessageIsForAll) {
  RailTables tables = Tables();
  tables.partials[0][1] = Nodes({0, 1, 2});
  OutgoingGoes goes(tables, 3);
  goes.Add(now_, kGather, Collect(0, 1));
  const AddressedMessages sent = goes.Take(now_);
  ASSERT_EQ(sent.size(), 1);
  EXPECT_EQ(sent[0].node, std::nullopt);
}

TEST_F(OutgoingGoesTest, AbsentFragmentsAreNamedOnce) {
  Go first = Collect(0, 1);
  first.absent = {{TrainerRank(1), 4}};
  goes_.Add(now_, kGather, first);
  Go second = Collect(2, 1);
  second.absent = {{TrainerRank(1), 4}, {TrainerRank(0), 9}};
  goes_.Add(now_, kGather, second);
  for (const Addressed& addressed : goes_.Take(now_)) {
    ASSERT_EQ(addressed.message.goes().absent_size(), 2);
    EXPECT_EQ(addressed.message.goes().absent(0).parameter(), 9);
    EXPECT_EQ(addressed.message.goes().absent(1).parameter(), 4);
  }
}

}  // namespace
}  // namespace dmuond::scheduler
