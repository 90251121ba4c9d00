// A lane, its daemon played by the harness: collecting, updating, publishing on one node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>

#include "dmuond/wire/frame.h"
#include "kernels/cpu/cpu_device.h"
#include "scheduler/convert/convert.h"
#include "tests/server/lane/harness.h"
#include "tests/server/lane/values.h"

namespace dmuond::server::lane::testing {
namespace {

using scheduler::Contribution;
using scheduler::Verdict;
using scheduler::testing::AdamW;
using scheduler::testing::Muon;
using scheduler::testing::World;

TEST(LaneTest, PushPublishesTheLowestHoldersWeightsToAll) {
  World world(3, 1, 1);
  world.Replicate(Muon("w", {16, 8})).Replicate(AdamW("b", {8}));
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Push();
  const std::vector<float> w = cluster.Weights("w");  // checks that holders agree
  for (int64_t i = 0; i < 128; ++i)
    EXPECT_EQ(w[i], Value(0, cluster.inputs().layout.parameters[0].name == "w" ? 0 : 1, i));
  for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
    EXPECT_EQ(cluster.Published(2, b), cluster.attempt());
  }
}

TEST(LaneTest, ADeadTrainersWeightsAreNotCompared) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {16, 8}));
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Push();
  const auto check = [&] {
    cluster.SendCheck();
    cluster.PumpUntil([&] { return cluster.checked.has_value(); });
    return cluster.checked->digests(0);
  };
  v1::ExtractDigests digests = check();
  ASSERT_EQ(digests.copies_size(), 1);
  EXPECT_THAT(digests.copies(0).ranks(), ::testing::ElementsAre(0, 1));
  EXPECT_EQ(digests.copies(0).digest(), digests.rounded(0));
  EXPECT_GT(cluster.checked->held_us(), 0) << "a part, in which nothing else was done";
  cluster.Die(1);
  cluster.Weight(1, cluster.fragments()[1])[3] += 1;  // it had begun to write them
  digests = check();
  ASSERT_EQ(digests.copies_size(), 1);
  EXPECT_THAT(digests.copies(0).ranks(), ::testing::ElementsAre(0));
}

// The update as the kernels alone compute it, from a gradient summed by hand.
std::vector<float> Expected(const Cluster& cluster, int64_t rows, int64_t cols,
                            const std::vector<float>& weight, const std::vector<float>& gradient,
                            int steps) {
  auto device = kernels::cpu::CpuDevice::Create(1);
  auto stream = (*device)->CreateStream();
  v1::GroupConfig group;
  group.set_preset("keller");
  auto config = FromProto(group);
  EXPECT_TRUE(config.ok());
  auto workspace =
      (*device)->AllocateScratch((*device)->ops().MuonWorkspaceBytes(rows, cols, 1, *config));
  std::vector<float> momentum(weight.size());
  std::vector<float> master = weight;
  std::vector<float> out(weight.size());
  const scheduler::GroupScalars& g = cluster.scalars.groups[0];
  kernels::UpdateScalars scalars;
  scalars.learning_rate = g.learning_rate;
  scalars.momentum = g.momentum;
  scalars.weight_decay = g.weight_decay;
  for (int step = 0; step < steps; ++step) {
    std::vector<float> momentum_out(weight.size());
    std::vector<float> master_out(weight.size());
    kernels::MuonMatrix matrix{.gradient = gradient.data(),
                               .momentum_in = momentum.data(),
                               .momentum_out = momentum_out.data(),
                               .master_in = master.data(),
                               .master_out = master_out.data(),
                               .weight_out = out.data(),
                               .scalars = &scalars};
    kernels::MuonBatch batch;
    batch.rows = rows;
    batch.cols = cols;
    batch.config = &*config;
    batch.matrices = {&matrix, 1};
    EXPECT_TRUE((*device)->ops().UpdateMuon(**stream, batch, (*workspace)->data()).ok());
    momentum = momentum_out;
    master = master_out;
  }
  return out;
}

TEST(LaneTest, ThreeReplicasAreSummedInTreeOrderAndUpdatedAsTheKernelsDo) {
  for (const RunAs run_as : {RunAs::kThread, RunAs::kProcess}) {
    World world(3, 1, 1);
    scheduler::Parameter w = Muon("w", {24, 16});
    w.reduce_factor = 1.0 / 3;
    world.Replicate(w);
    Cluster cluster(world, 1, 1, {.run_as = run_as});
    cluster.FillWeights([](int32_t, int32_t, int64_t i) { return Value(9, 0, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t, int64_t i) { return Value(rank, 1, i); });
    cluster.Step();
    cluster.Step();
    std::vector<float> weight(24 * 16);
    std::vector<float> gradient(24 * 16);
    for (int64_t i = 0; i < 24 * 16; ++i) {
      weight[i] = Value(9, 0, i);
      gradient[i] =
          ((Value(0, 1, i) + Value(1, 1, i)) + Value(2, 1, i)) * static_cast<float>(1.0 / 3);
    }
    const std::vector<float> got = cluster.Weights("w");
    EXPECT_TRUE(SameBits(got, Expected(cluster, 24, 16, weight, gradient, 2)));
    EXPECT_FALSE(SameBits(got, weight));
    EXPECT_EQ(cluster.published[0].matrices(), 1);
    double sum = 0;
    for (float g : gradient) sum += double{g} * g;
    EXPECT_NEAR(cluster.norms.at(0).sums[0], sum, 1e-12 * sum);
  }
}

TEST(LaneTest, WhoGivesNoGradientIsNeitherReadNorAwaitedAndGetsTheWeights) {
  // Ranks 0 and 2 give theirs; 1 and 3, on the other node too, hold replicas of these.
  const auto run = [](bool replicas) {
    World world(4, 2, 1);
    scheduler::Parameter w = Muon("w", {24, 16});
    for (int32_t rank = 0; rank < 4; ++rank) {
      const bool gives = rank % 2 == 0;
      if (!gives && !replicas) continue;
      world.Hold(rank, w, {{0, 0}, {24, 16}}, gives ? Contribution::kSum : Contribution::kNone);
    }
    Cluster cluster(world, 2, 1);
    cluster.FillWeights([](int32_t, int32_t, int64_t i) { return Value(9, 0, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t, int64_t i) {
      return rank % 2 == 0 ? Value(rank, 1, i) : std::numeric_limits<float>::quiet_NaN();
    });
    cluster.Open();
    for (const int32_t rank : {0, 2}) cluster.SignalReady(rank, 0);
    for (int32_t rank = 0; rank < 4; ++rank) cluster.Submit(rank);
    cluster.WaitGathered();
    cluster.Decide(Verdict::kCommit);
    cluster.WaitPublished();
    // Rank 0 has none in this step, and that rank 1 says nothing of it changes nothing.
    cluster.Step({{0, {0}}});
    return cluster.Weights("w");
  };
  const std::vector<float> alone = run(false);
  EXPECT_TRUE(SameBits(run(true), alone));
  EXPECT_TRUE(std::isfinite(alone[0]));
}

// The same parameters and gradients, cut otherwise.
std::vector<float> WholeJob(const World& world, int32_t nodes, int32_t lanes,
                            const std::string& parameter, int steps = 3,
                            Cluster::Options options = {}) {
  Cluster cluster(world, nodes, lanes, options);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  for (int step = 0; step < steps; ++step) {
    cluster.FillGradients(
        [&](int32_t rank, int32_t p, int64_t i) { return Value(rank + 10 * step, p, i); });
    cluster.Step();
  }
  return cluster.Weights(parameter);
}

TEST(LaneTest, UnevenRowShardsGiveTheBitsOfTheWholeMatrix) {
  // Gradients of rank 0 alone: a shard is what one trainer would hold.
  const auto run = [](int32_t trainers, bool shard) {
    World world(trainers, 1, 1);
    shard ? world.ShardRows(Muon("w", {7, 12})) : world.Replicate(Muon("w", {7, 12}));
    Cluster cluster(world, 1, 1);
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
    cluster.Push();
    for (int step = 0; step < 3; ++step) {
      cluster.FillGradients([&](int32_t, int32_t p, int64_t i) { return Value(10 * step, p, i); });
      cluster.Step();
    }
    return cluster.Weights("w");
  };
  // 5 trainers, 7 rows: 2, 2, 2, 1 and nothing.
  EXPECT_TRUE(SameBits(run(5, true), run(1, false)));
}

TEST(LaneTest, TwoLanesOfANodePublishTogether) {
  World one(2, 1, 1);
  World two(2, 1, 2);
  for (World* world : {&one, &two}) {
    for (int i = 0; i < 6; ++i) world->Replicate(Muon("w" + std::to_string(i), {32, 16}));
    world->Replicate(AdamW("b", {64}));
  }
  for (const char* name : {"w0", "w3", "w5", "b"}) {
    EXPECT_TRUE(SameBits(WholeJob(one, 1, 1, name), WholeJob(two, 1, 2, name))) << name;
  }
}

TEST(LaneTest, PoisonedWeightsAreAllOverwritten) {
  World world(2, 1, 2);
  for (int i = 0; i < 4; ++i) world.Replicate(Muon("w" + std::to_string(i), {8, 16}));
  world.ShardRows(AdamW("e", {9, 4}));
  for (const char* name : {"w0", "w3", "e"}) {
    EXPECT_TRUE(
        SameBits(WholeJob(world, 1, 2, name), WholeJob(world, 1, 2, name, 3, {.poison = true})));
  }
}

// A device's backward pass may still read the weights when its host has submitted.
TEST(LaneTest, NoWeightIsWrittenBeforeItsTrainersSubmittedWord) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {16, 8})).Replicate(AdamW("b", {8}));
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  const std::vector<float> before = cluster.Weights("w");
  const uint64_t pushed = cluster.attempt();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Open();
  cluster.Submit(0);
  cluster.SubmitFromHost(1);
  for (const int32_t rank : {0, 1}) cluster.SignalReady(rank);
  cluster.WaitGathered();
  cluster.Decide(Verdict::kCommit);
  EXPECT_THAT(cluster.WaitUpdated(), ::testing::ElementsAre(1));
  EXPECT_TRUE(SameBits(cluster.Weights("w"), before));
  for (const int32_t rank : {0, 1}) EXPECT_EQ(cluster.Published(rank, 0), pushed);
  cluster.StoreSubmitted(1);
  cluster.WaitPublished();
  EXPECT_FALSE(SameBits(cluster.Weights("w"), before));
  for (const int32_t rank : {0, 1}) EXPECT_EQ(cluster.Published(rank, 0), cluster.attempt());
}

// Its GPU may have been about to store the word. A step that is decided needs no trainer.
TEST(LaneTest, ATrainerThatDiesBeforeItsSubmittedWordHoldsUpNoWeights) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {16, 8}));
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  const std::vector<float> before = cluster.Weights("w");
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Open();
  cluster.Submit(0);
  cluster.SubmitFromHost(1);
  for (const int32_t rank : {0, 1}) cluster.SignalReady(rank);
  cluster.WaitGathered();
  cluster.Decide(Verdict::kCommit);
  EXPECT_THAT(cluster.WaitUpdated(), ::testing::ElementsAre(1));
  cluster.Die(1);
  cluster.WaitPublished();
  EXPECT_FALSE(SameBits(cluster.Weights("w"), before));  // of both holders, who agree
  for (const int32_t rank : {0, 1}) EXPECT_EQ(cluster.Published(rank, 0), cluster.attempt());
}

TEST(LaneTest, AbsentGradientsCountAsZeroAndAbsentEverywhereChangesNothing) {
  World world(3, 1, 1);
  world.Replicate(Muon("w", {8, 8})).Replicate(AdamW("b", {8}));
  const auto run = [&](bool zeroed) {
    Cluster cluster(world, 1, 1);
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
    cluster.Push();
    cluster.FillGradients([&](int32_t rank, int32_t p, int64_t i) {
      return p == 0 && rank == 1 ? (zeroed ? 0.0F : std::nanf("")) : Value(rank, p, i);
    });
    cluster.Step(zeroed ? std::map<int32_t, std::vector<int32_t>>{}
                        : std::map<int32_t, std::vector<int32_t>>{{1, {0}}});
    return cluster.Weights("w");
  };
  EXPECT_TRUE(SameBits(run(true), run(false)));

  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Step();
  const std::vector<float> w = cluster.Weights("w");
  const std::vector<float> b = cluster.Weights("b");
  cluster.Step({{0, {1}}, {1, {1}}, {2, {1}}});
  EXPECT_TRUE(SameBits(cluster.Weights("b"), b));
  EXPECT_FALSE(SameBits(cluster.Weights("w"), w));
  for (const scheduler::Unit& unit : cluster.plan().units) {
    EXPECT_EQ(cluster.State(unit.id.value()).updates, unit.parameter == 1 ? 1 : 2);
  }
}

TEST(LaneTest, SkippedStepsPublishWithoutChange) {
  World world(2, 1, 2);
  world.Replicate(Muon("w", {8, 8})).Replicate(Muon("v", {8, 8}));
  Cluster cluster(world, 1, 2);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  const std::vector<float> w = cluster.Weights("w");
  cluster.FillGradients([](int32_t, int32_t, int64_t) { return INFINITY; });
  cluster.Open();
  for (int32_t rank : {0, 1}) {
    cluster.SignalReady(rank);
    cluster.Submit(rank);
  }
  cluster.WaitGathered();
  EXPECT_FALSE(std::isfinite(cluster.norms.at(0).sums[0]));
  cluster.Decide(Verdict::kSkip);
  cluster.WaitPublished();
  EXPECT_TRUE(SameBits(cluster.Weights("w"), w));
  for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
    EXPECT_EQ(cluster.Published(1, b), cluster.attempt());
  }
}

TEST(LaneTest, AbortedAttemptsAreCollectedAgainFromTheSameBytes) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {8, 8}));
  const std::vector<float> undisturbed = WholeJob(world, 1, 1, "w", 1);
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Open();
  cluster.SignalReady(0);
  cluster.Submit(0);
  cluster.Detach(1);
  cluster.Decide(Verdict::kAbort);
  const uint64_t aborted = cluster.attempt();
  cluster.Attach(1);
  cluster.Republish(aborted - 1, {1});
  EXPECT_EQ(cluster.Published(1, 0), aborted - 1);
  cluster.Step();
  EXPECT_TRUE(SameBits(cluster.Weights("w"), undisturbed));
}

TEST(LaneTest, EarlyBucketsAreReducedAgainWhenTheLossScaleChanges) {
  World world(1, 1, 1);
  world.Replicate(Muon("w", {8, 8}));
  const auto run = [&](bool early) {
    Cluster cluster(world, 1, 1);
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
    cluster.Push();
    for (const double scale : {4.0, 0.5, 0.5}) {
      cluster.scalars.loss_scale = scale;
      cluster.FillGradients([&](int32_t rank, int32_t p, int64_t i) {
        return Value(rank, p, i) * static_cast<float>(scale);
      });
      cluster.Open();
      if (early) {
        cluster.SignalReady(0);
        // Answered after what was sent before it, so the lane has looked at the words since.
        v1::LaneCommand detach;
        cluster.Detach(0);
        cluster.Attach(0);
        cluster.SignalReady(0);
      }
      cluster.Submit(0);
      cluster.SignalReady(0);
      cluster.WaitGathered();
      cluster.Decide(Verdict::kCommit);
      cluster.WaitPublished();
    }
    return cluster.Weights("w");
  };
  EXPECT_TRUE(SameBits(run(true), run(false)));
}

// Weights that somebody changes after the backward pass: by then gradients have been collected for
// the attempt, which turns out to be a push. On two nodes the owner of a matrix has told that it is
// ready to receive gradients, the other node has signalled none: weights may cross as soon as that
// one has packed them, and the owner hears so together with the push.
TEST(LaneTest, APushIsOfWeightsAfterGradientsOfTheSameAttempt) {
  for (const int32_t nodes : {1, 2}) {
    World world(2, nodes, 1);
    world.Replicate(Muon("w", {16, 8})).Replicate(Muon("v", {8, 8})).Replicate(AdamW("b", {8}));
    Cluster cluster(world, nodes, 1, {.run_as = RunAs::kProcess, .bucket_bytes = 256});
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
    cluster.Step();
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(8, p, i); });
    cluster.Open();
    for (int32_t rank = 0; rank < 2; ++rank) {
      for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
        const bool sends = nodes > 1 && !cluster.program(rank).partials.at(b).empty() &&
                           cluster.program(rank).partials[b].front().from.value() == rank;
        if (!sends) cluster.SignalReady(rank, b);
      }
    }
    for (int32_t node = 0; node < nodes; ++node) cluster.WaitTurns(node);
    if (nodes > 1) ::kill(cluster.pid(1), SIGSTOP);
    for (int32_t rank = 0; rank < 2; ++rank) cluster.PushFrom(rank);
    cluster.WaitTurns(0);
    if (nodes > 1) ::kill(cluster.pid(1), SIGCONT);
    cluster.WaitGathered();
    cluster.Decide(Verdict::kCommit);
    cluster.WaitPublished();
    int32_t p = 0;
    for (const char* name : {"w", "v", "b"}) {
      const std::vector<float> weights = cluster.Weights(name);
      for (size_t i = 0; i < weights.size(); ++i) {
        ASSERT_EQ(weights[i], Value(8, p, static_cast<int64_t>(i))) << name << i;
      }
      ++p;
    }
  }
}

TEST(LaneTest, ALaneThatDiedFinishesTheCommittedStepFromItsKeptGradients) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {8, 8})).Replicate(AdamW("b", {8}));
  const auto run = [&](bool die) {
    Cluster cluster(world, 1, 1, {.run_as = RunAs::kProcess});
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
    cluster.Step();
    cluster.Open();
    for (int32_t rank : {0, 1}) {
      cluster.SignalReady(rank);
      cluster.Submit(rank);
    }
    cluster.WaitGathered();
    if (die) {
      cluster.Restart(0);
      for (int32_t rank : {0, 1}) cluster.Submit(rank);
    }
    cluster.Decide(Verdict::kCommit);
    cluster.WaitPublished();
    return std::pair(cluster.Weights("w"), cluster.Weights("b"));
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(LaneTest, UnitsAreReadAndWritten) {
  World world(1, 1, 1);
  world.Replicate(Muon("w", {4, 8})).Replicate(AdamW("b", {8}));
  Cluster cluster(world, 1, 1);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(7, p, i); });
  cluster.Push();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Step();
  int32_t piece = 0;
  while (cluster.plan().units[piece].kind != scheduler::UnitKind::kPiece) ++piece;
  HostMemory memory(8 * 4);
  int64_t request = 0;
  const auto io = [&](bool write, v1::StateKind kind) {
    v1::LaneCommand command;
    ++request;
    if (write) {
      command.mutable_write_unit()->set_request(request);
      command.mutable_write_unit()->set_unit(piece);
      command.mutable_write_unit()->set_kind(kind);
    } else {
      command.mutable_read_unit()->set_request(request);
      command.mutable_read_unit()->set_unit(piece);
      command.mutable_read_unit()->set_kind(kind);
    }
    cluster.Send(0, command, {memory.fd()});
    std::string error = "?";
    cluster.WaitUnitIo(request, &error);
    return error;
  };
  EXPECT_EQ(io(false, v1::STATE_KIND_MASTER), "");
  const std::vector<float> weights = cluster.Weights("b");
  EXPECT_TRUE(std::equal(weights.begin(), weights.begin() + 8, memory.floats()));
  EXPECT_EQ(io(false, v1::STATE_KIND_EXP_AVG), "");
  const float m = memory.floats()[3];
  EXPECT_NEAR(m, 0.1 * Value(0, 1, 3), 1e-6);
  memory.floats()[3] = 0.25F;
  EXPECT_EQ(io(true, v1::STATE_KIND_MASTER), "");
  EXPECT_EQ(io(false, v1::STATE_KIND_EXP_AVG), "");
  EXPECT_EQ(memory.floats()[3], m) << "other kinds keep their values";
  EXPECT_EQ(io(false, v1::STATE_KIND_STEP), "");
  double steps = 0;
  std::memcpy(&steps, memory.data(), 8);
  EXPECT_EQ(steps, 1);
  EXPECT_THAT(io(false, v1::STATE_KIND_MOMENTUM), ::testing::HasSubstr("no state of kind"));
  cluster.Republish(cluster.attempt(), {});
  EXPECT_EQ(cluster.Weights("b")[3], 0.25F);
}

TEST(LaneTest, ASecondProgramEndsTheLane) {
  World world(1, 1, 1);
  world.Replicate(Muon("w", {4, 8}));
  Cluster cluster(world, 1, 1);
  v1::LaneCommand command;
  command.mutable_configure();
  cluster.Send(0, command);
  cluster.PumpUntil([&] { return !cluster.failure.empty(); });
  EXPECT_THAT(cluster.failure, ::testing::HasSubstr("configured twice"));
}

}  // namespace
}  // namespace dmuond::server::lane::testing
