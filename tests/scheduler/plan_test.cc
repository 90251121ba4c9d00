#include "scheduler/plan.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
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
  ASSERT_EQ(plan.gradient_cells[0].size(), 1);
  EXPECT_THAT(plan.gradient_cells[0][0].fragments, ElementsAre(0, 1));
  EXPECT_THAT(plan.weight_cells[0][0].fragments, ElementsAre(0));
  EXPECT_THAT(plan.holders[0], ElementsAre(0, 1));
  const LaneProgram program = MustProgram(inputs, plan, 0);
  ASSERT_EQ(program.batches.size(), 1);
  ASSERT_EQ(program.slot_classes.size(), 1);
  EXPECT_EQ(program.slot_classes[0].slots, 2);
  EXPECT_EQ(program.state_bytes, 2 * 2 * 64 * 32 * 4);
}

TEST(PlanTest, RowShardsAreGatheredCellByCell) {
  const PlanInputs inputs = *World(4, 1, 2).ShardRows(Muon("w", {9, 4})).Inputs();
  const Plan plan = MustPlan(inputs);
  ASSERT_EQ(plan.units.size(), 1);
  EXPECT_THAT(plan.gradient_cells[0].size(), 3);  // 3 + 3 + 3 + 0 rows
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

}  // namespace
}  // namespace dmuond::scheduler
