#include "scheduler/plan.h"

#include <algorithm>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/lane_program.h"
#include "scheduler/reason.h"
#include "scheduler/routing.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Muon;
using testing::World;

Plan MustPlan(const PlanInputs& inputs) {
  auto plan = MakePlan(inputs);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : Plan{};
}

LaneProgram MustProgram(const PlanInputs& inputs, const Plan& plan, int32_t lane) {
  auto program = MakeLaneProgram(inputs, plan, LaneId(lane));
  EXPECT_TRUE(program.ok()) << program.status();
  return program.ok() ? *std::move(program) : LaneProgram{};
}

TEST(PlanTest, OneMatrixOnOneLaneIsOneUnitThatAllReplicasContributeTo) {
  const PlanInputs inputs = *World(2, 1, 1).Replicate(Muon("w", {64, 32})).Inputs();
  const Plan plan = MustPlan(inputs);
  ASSERT_EQ(plan.units.size(), 1);
  EXPECT_EQ(plan.units[0].rows, 64);
  EXPECT_EQ(plan.units[0].cols, 32);
  ASSERT_EQ(plan.cells[0].size(), 1);
  EXPECT_THAT(plan.cells[0][0].fragments, ElementsAre(0, 1));
  EXPECT_EQ(plan.cells[0][0].lowest, 0);
  EXPECT_THAT(plan.holders[0], ElementsAre(0, 1));
  const LaneProgram program = MustProgram(inputs, plan, 0);
  ASSERT_EQ(program.batches.size(), 1);
  ASSERT_EQ(program.slot_classes.size(), 1);
  EXPECT_EQ(program.slot_classes[0].slots, 2);
  EXPECT_EQ(program.state_bytes, 2 * 2 * 64 * 32 * 4);
}

TEST(PlanTest, OneNodeUpdatesMostWeightsFirstAndSeveralGoByBuckets) {
  for (const int32_t nodes : {1, 2}) {
    World world(nodes, nodes, 1);
    // A bucket each; every lane owns one of each size.
    for (const int64_t size : {64, 512}) {
      for (int32_t i = 0; i < nodes; ++i) {
        world.Replicate(Muon("w" + std::to_string(size) + "-" + std::to_string(i), {size, size}));
      }
    }
    PlanInputs inputs = *world.Inputs();
    inputs.bucket_bytes = 1;
    inputs.costs.launch_us = 0;  // equal matrices gain nothing by one lane
    const Plan plan = MustPlan(inputs);
    for (int32_t lane = 0; lane < nodes; ++lane) {
      std::vector<BucketId> last_buckets;
      for (const Batch& batch : MustProgram(inputs, plan, lane).batches) {
        last_buckets.push_back(plan.units[batch.units.back().value()].bucket);
      }
      ASSERT_EQ(last_buckets.size(), 2);
      EXPECT_EQ(last_buckets[0]<last_buckets[1], nodes> 1) << nodes;
    }
  }
}

TEST(PlanTest, RowShardsAreGatheredCellByCell) {
  const PlanInputs inputs = *World(4, 1, 2).ShardRows(Muon("w", {9, 4})).Inputs();
  const Plan plan = MustPlan(inputs);
  ASSERT_EQ(plan.units.size(), 1);
  EXPECT_THAT(plan.cells[0].size(), 3);  // 3 + 3 + 3 + 0 rows
  EXPECT_THAT(plan.holders[0], ElementsAre(0, 1, 2));
}

TEST(PlanTest, AdamWShardsStayWithTheLaneOfTheirDevice) {
  const PlanInputs inputs = *World(4, 2, 2).ShardRows(AdamW("e", {1000, 64})).Inputs();
  const Plan plan = MustPlan(inputs);
  ASSERT_EQ(plan.units.size(), 4);
  for (int32_t i = 0; i < 4; ++i) EXPECT_EQ(plan.units[i].owner, LaneId(i));
}

TEST(PlanTest, ReplicatedAdamWTensorsAreCutOverAllLanesAtBlocksOfTheNorm) {
  const PlanInputs inputs = *World(2, 2, 2).Replicate(AdamW("e", {4096, 1024})).Inputs();
  const Plan plan = MustPlan(inputs);
  std::set<LaneId> owners;
  for (const Unit& unit : plan.units) {
    EXPECT_TRUE(unit.flat);
    EXPECT_EQ(unit.first_element % kPieceCut, 0);
    owners.insert(unit.owner);
  }
  EXPECT_EQ(owners.size(), 4);
  EXPECT_LE(plan.quality.imbalance, 1.1);
}

TEST(PlanTest, MatricesStayOnTheNodesOfTheirHoldersWhereThatCostsNothing) {
  // A pipeline: each node's two trainers hold four layers.
  World world(4, 2, 2);
  for (int layer = 0; layer < 8; ++layer) {
    const Parameter w = Muon("w" + std::to_string(layer), {64, 64});
    const int32_t first = layer < 4 ? 0 : 2;
    world.Hold(first, w, WholeBox(w.shape)).Hold(first + 1, w, WholeBox(w.shape));
  }
  const PlanInputs inputs = *world.Inputs();
  const Plan plan = MustPlan(inputs);
  for (const Unit& unit : plan.units) {
    EXPECT_EQ(unit.owner.value() / 2, unit.parameter < 4 ? 0 : 1);
  }
  for (int32_t lane = 0; lane < 4; ++lane) {
    for (const auto& bucket : MustProgram(inputs, plan, lane).partials) EXPECT_TRUE(bucket.empty());
  }
}

TEST(PlanTest, ExpertsAreOwnedByTheLaneOfTheTrainerThatHoldsThem) {
  const Parameter experts = Muon("experts", {4, 32, 16});
  World world(4, 1, 4);
  for (int64_t e = 0; e < 4; ++e) {
    world.Hold(static_cast<int32_t>(3 - e), experts, {{e, 0, 0}, {e + 1, 32, 16}});
  }
  const Plan plan = MustPlan(*world.Inputs());
  ASSERT_EQ(plan.units.size(), 4);
  for (int32_t e = 0; e < 4; ++e) EXPECT_EQ(plan.units[e].owner, LaneId(3 - e));
}

TEST(PlanTest, EveryBucketIsCollectedOnAllRails) {
  World world(2, 2, 4);
  for (int i = 0; i < 16; ++i) {
    Parameter w = Muon("w" + std::to_string(i), {64, 64});
    w.ready_order = i / 8;
    world.Replicate(w);
  }
  PlanInputs inputs = *world.Inputs();
  inputs.bucket_bytes = int64_t{8} * 64 * 64 * 4;
  const Plan plan = MustPlan(inputs);
  EXPECT_EQ(plan.buckets, 2);
  std::set<std::pair<int32_t, int32_t>> bucket_lanes;
  for (const Unit& unit : plan.units) bucket_lanes.emplace(unit.bucket.value(), unit.owner.value());
  EXPECT_EQ(bucket_lanes.size(), 16);
}

TEST(PlanTest, ShardsWithReplicasAreCutOverTheirHoldersLanes) {
  // HSDP: two nodes hold the same two shards.
  const Parameter e = AdamW("e", {16384, 64});
  World world(4, 2, 2);
  for (int32_t rank = 0; rank < 4; ++rank) {
    const int64_t row = rank % 2 * int64_t{8192};
    world.Hold(rank, e, {{row, 0}, {row + 8192, 64}});
  }
  const Plan plan = MustPlan(*world.Inputs());
  ASSERT_EQ(plan.units.size(), 4);
  EXPECT_THAT((std::vector<LaneId>{plan.units[0].owner, plan.units[1].owner, plan.units[2].owner,
                                   plan.units[3].owner}),
              ElementsAre(LaneId(0), LaneId(2), LaneId(1), LaneId(3)));
}

TEST(PlanTest, AMatrixOfSeveralShardsIsPublishedOnlyWhereItIsHeld) {
  const PlanInputs inputs = *World(4, 4, 1).ShardRows(Muon("w", {8, 4})).Inputs();
  const Plan plan = MustPlan(inputs);
  const int32_t owner = plan.units[0].owner.value();
  const LaneProgram program = MustProgram(inputs, plan, owner);
  ASSERT_EQ(program.weights[0].size(), 3);
  for (const Transfer& t : program.weights[0]) {
    EXPECT_EQ(t.bytes, 2 * 4 * 4);
    EXPECT_TRUE(t.in_place);
    EXPECT_EQ(t.offset_bytes, program.staged[0].weight_offset_bytes + t.box.begin[0] * 4 * 4);
  }
  // Lone fragments travel in their own type.
  for (const Transfer& t : program.partials[0]) EXPECT_EQ(t.bytes, 2 * 4 * 4);
}

TEST(PlanTest, MatricesAreWeighedByTheIterationOfTheirGroup) {
  // In p^3, the wide one costs 62 in Gram form and 125 in standard form, a square one 20 in both.
  World world(2, 1, 2);
  world.Replicate(Muon("wide", {1024, 8192}));
  for (int i = 0; i < 6; ++i) world.Replicate(Muon("square" + std::to_string(i), {1024, 1024}));
  PlanInputs inputs = *world.Inputs();
  inputs.costs.launch_us = inputs.costs.matrix_bytes_per_element = 0;  // FLOPs alone count
  const auto beside_the_wide_one = [](const Plan& plan) {
    return std::count_if(plan.units.begin(), plan.units.end(), [&](const Unit& unit) {
      return unit.parameter != 0 && unit.owner == plan.units[0].owner;
    });
  };
  const Plan gram = MustPlan(inputs);
  EXPECT_GE(beside_the_wide_one(gram), 1);
  inputs.iterations = {{.steps = 5, .rounds = 5}};
  const Plan standard = MustPlan(inputs);
  EXPECT_EQ(beside_the_wide_one(standard), 0);
  EXPECT_LE(standard.quality.imbalance, 1.05);
  EXPECT_GE(standard.quality.lower_bound_us, 1.2 * gram.quality.makespan_us);
  EXPECT_NE(standard.digest, gram.digest);
}

TEST(PlanTest, AnotherIterationIsAnotherPlanWhereTheOwnersAreTheSame) {
  PlanInputs inputs = *World(1, 1, 1).Replicate(Muon("w", {8, 8})).Inputs();
  const uint64_t gram = MustPlan(inputs).digest;
  inputs.iterations = {{.steps = 5, .rounds = 5}};
  EXPECT_NE(MustPlan(inputs).digest, gram);
}

TEST(PlanTest, TrainerOnANodeThatIsNotThereIsNamed) {
  PlanInputs inputs = *World(2, 2, 1).Replicate(Muon("w", {8, 8})).Inputs();
  inputs.nodes = 1;
  EXPECT_THAT(std::string(MakePlan(inputs).status().message()),
              HasSubstr("trainer 1 is on node 1 of 1"));
}

TEST(PlanTest, RoutingTableSaysWhoOwnsWhatAndWhy) {
  Parameter qkv = Muon("qkv", {12, 4});
  qkv.view.kind = MatrixView::Kind::kRowBlocks;
  qkv.view.row_blocks = {4, 4, 4};
  qkv.route_reason = "2-D hidden weight";
  Parameter left = AdamW("buffer", {3});
  left.route = Route::kTrainer;
  World world(1, 1, 1);
  const PlanInputs inputs =
      *world.Replicate(qkv).Replicate(AdamW("norm", {4})).Replicate(left).Inputs();
  const auto rows = RoutingTable(inputs.layout, MustPlan(inputs));
  ASSERT_EQ(rows.size(), 3);
  EXPECT_EQ(rows[0].matrices, 3);
  EXPECT_EQ(rows[0].why, "2-D hidden weight; 3 row blocks (4, 4, 4)");
  EXPECT_THAT(rows[0].owners, ElementsAre(LaneId(0)));
  EXPECT_EQ(rows[1].matrices, 0);
  EXPECT_TRUE(rows[2].owners.empty());
}

TEST(PlanTest, MoreMatricesThanAJobCanHaveAreRefusedByName) {
  const Extents stack = {1'000'000, 2, 3};
  const auto plan = MakePlan(*World(1, 1, 1).Replicate(Muon("experts", stack)).Inputs());
  EXPECT_EQ(ReasonOf(plan.status()), "LAYOUT_INVALID");
  EXPECT_THAT(std::string(plan.status().message()),
              HasSubstr("'experts' of shape 1000000x2x3 the job has 1000000 matrices; at "
                        "most 262144 are allowed"));
}

}  // namespace
}  // namespace dmuond::scheduler
