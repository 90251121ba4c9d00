// Lanes of several nodes, connected by Gloo.
#include <gtest/gtest.h>

#include <utility>

#include "tests/server/lane/harness.h"
#include "tests/server/lane/values.h"

namespace dmuond::server::lane::testing {
namespace {

using scheduler::testing::AdamW;
using scheduler::testing::Muon;
using scheduler::testing::World;

using Absences = std::map<int32_t, std::vector<int32_t>>;

World Job(int32_t trainers, int32_t nodes, int32_t lanes) {
  World world(trainers, nodes, lanes);
  for (int i = 0; i < 3; ++i) world.Replicate(Muon("r" + std::to_string(i), {16, 24}));
  world.ShardRows(Muon("s", {13, 8}));
  world.Replicate(AdamW("b", {40}));
  scheduler::Parameter same = AdamW("n", {16});
  world.Replicate(same, scheduler::Contribution::kSame);
  return world;
}

std::vector<std::vector<float>> Train(int32_t trainers, int32_t nodes, int32_t lanes,
                                      const Absences& absent = {},
                                      Cluster::Options options = {.bucket_bytes = 1024}) {
  Cluster cluster(Job(trainers, nodes, lanes), nodes, lanes, std::move(options));
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  for (int step = 0; step < 3; ++step) {
    cluster.FillGradients(
        [&](int32_t rank, int32_t p, int64_t i) { return Value(rank + 10 * step, p, i); });
    cluster.Step(step == 1 ? absent : Absences());
  }
  std::vector<std::vector<float>> weights;
  for (const char* name : {"r0", "r1", "r2", "s", "b", "n"}) {
    weights.push_back(cluster.Weights(name));
  }
  return weights;
}

TEST(RailTest, TwoNodesGiveTheBitsOfOne) { EXPECT_TRUE(SameBits(Train(4, 2, 1), Train(4, 1, 1))); }

TEST(RailTest, SubtreesOfUnequalNodesAreFinishedByTheOwner) {
  EXPECT_TRUE(SameBits(Train(5, 2, 1), Train(5, 1, 1)));  // 3 trainers and 2
  EXPECT_TRUE(SameBits(Train(6, 2, 1), Train(6, 1, 1)));  // 3 and 3: the tree is cut across a pair
  EXPECT_TRUE(SameBits(Train(3, 3, 1), Train(3, 1, 1)));
}

TEST(RailTest, RailsWorkSideBySide) { EXPECT_TRUE(SameBits(Train(4, 2, 2), Train(4, 1, 1))); }

TEST(RailTest, AbsentSubtreesDoNotTravel) {
  const Absences one_node = {{2, {0, 1}}, {3, {0, 1}}};
  EXPECT_TRUE(SameBits(Train(4, 2, 1, one_node), Train(4, 1, 1, one_node)));
  const Absences some = {{0, {0}}, {3, {0, 4}}};
  EXPECT_TRUE(SameBits(Train(4, 2, 1, some), Train(4, 1, 1, some)));
}

TEST(RailTest, ProcessesGiveTheSameBitsAsThreads) {
  EXPECT_TRUE(SameBits(Train(4, 2, 1, {}, {.run_as = RunAs::kProcess, .bucket_bytes = 1024}),
                       Train(4, 1, 1)));
}

TEST(RailTest, ADeviceWhoseWorkIsDoneLaterGivesTheSameBits) {
  const Absences some = {{0, {0}}, {3, {0, 4}}};
  EXPECT_TRUE(SameBits(Train(4, 2, 1, some, {.run_as = RunAs::kLateThread, .bucket_bytes = 1024}),
                       Train(4, 1, 1, some)));
  EXPECT_TRUE(SameBits(
      Train(4, 1, 2, {}, {.run_as = RunAs::kLateThread, .bucket_bytes = 1024, .poison = true}),
      Train(4, 1, 1)));
}

TEST(RailTest, AnAbortAfterGoLeavesNothingBehind) {
  Cluster cluster(Job(4, 2, 1), 2, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  for (int step = 0; step < 3; ++step) {
    cluster.FillGradients(
        [&](int32_t rank, int32_t p, int64_t i) { return Value(rank + 10 * step, p, i); });
    cluster.Open();
    for (int32_t rank = 0; rank < 4; ++rank) {
      cluster.SignalReady(rank);
      cluster.Submit(rank);
    }
    cluster.WaitGathered();
    cluster.Decide(scheduler::Verdict::kAbort);
    cluster.Step();
  }
  EXPECT_TRUE(SameBits(cluster.Weights("r0"), Train(4, 1, 1)[0]));
}

TEST(RailTest, AReplacedTrainerGetsItsWeightsFromItsOwnNode) {
  Cluster cluster(Job(4, 2, 1), 2, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Step();
  const std::vector<float> before = cluster.Weights("r1");
  cluster.Detach(3);
  for (const scheduler::Fragment& fragment : cluster.fragments()) {
    if (fragment.rank.value() == 3) {
      std::fill_n(cluster.Weight(3, fragment), scheduler::Elements(fragment.box), -1.0F);
    }
  }
  cluster.Attach(3);
  cluster.Republish(cluster.attempt(), {3});
  EXPECT_TRUE(SameBits(cluster.Weights("r1"), before));  // checks that trainer 3 agrees
  for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
    EXPECT_EQ(cluster.Published(3, b), cluster.attempt());
  }
}

}  // namespace
}  // namespace dmuond::server::lane::testing
