// Cost model, buckets, slots, views: the small parts that plans are made of.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/batch_cost.h"
#include "scheduler/buckets.h"
#include "scheduler/cost_model.h"
#include "scheduler/lane_program.h"
#include "scheduler/matrix_view.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"
#include "scheduler/state_slots.h"
#include "tests/scheduler/layouts.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::ElementsAre;
using testing::ForAll;
using testing::Muon;
using testing::Pick;
using testing::World;

constexpr Iteration kStandard{.steps = 5, .rounds = 5};

TEST(BatchesTest, PiecesComeFirstThenMatricesAsTheirBucketsAreReady) {
  World world(1, 1, 1);
  world.Replicate(Muon("last", {64, 32}));
  world.Replicate(Muon("first", {32, 64}));
  world.Replicate(AdamW("embedding", {4096, 64}));
  world.registrations[0].parameters[0].ready_order = 3;
  world.registrations[0].parameters[1].ready_order = 1;
  world.registrations[0].parameters[2].ready_order = 2;
  auto inputs = world.Inputs();
  ASSERT_TRUE(inputs.ok());
  inputs->bucket_bytes = 1024;
  const auto plan = MakePlan(*inputs);
  ASSERT_TRUE(plan.ok());
  const auto program = MakeLaneProgram(*inputs, *plan, LaneId(0));
  ASSERT_TRUE(program.ok());
  std::vector<std::pair<UnitKind, int64_t>> seen;
  for (const Batch& batch : program->batches) seen.emplace_back(batch.kind, batch.rows);
  EXPECT_THAT(seen, ElementsAre(std::pair(UnitKind::kPiece, 0), std::pair(UnitKind::kMatrix, 32),
                                std::pair(UnitKind::kMatrix, 64)));
}

TEST(CostModelTest, FlopsAreThoseOfTheTableInTheMaths) {
  // Gram, one restart: 6 alpha + 14 times p^3.
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({1000, 1000}), 20e9);
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({1000, 8000}), 62e9);
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({8000, 1000}), 62e9);
  // Standard: 15 alpha + 5.
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({1000, 1000, kStandard}), 20e9);
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({1000, 3500, kStandard}), 57.5e9);
  EXPECT_DOUBLE_EQ(NewtonSchulzFlops({8000, 1000, kStandard}), 125e9);
}

TEST(CostModelTest, ProcessorsAreNotTakenForGpus) {
  // A core does some 30 to 300 GFLOP/s: seconds, where the default for GPUs says half a
  // millisecond.
  const double one = CostModel(CpuCosts(1)).MatrixBatch({2048, 2048}, 1);
  EXPECT_GT(one, 500'000);
  EXPECT_LT(one, 20'000'000);
  EXPECT_NEAR(CostModel(CpuCosts(4)).MatrixBatch({2048, 2048}, 1), one / 4, one / 100);
  EXPECT_GT(CostModel(CpuCosts(64)).Piece(1 << 20), 1'000);  // memory is shared
}

TEST(CostModelTest, MeasuredBatchesAreInterpolatedAndExtended) {
  CostTable table;
  table.launch_us = 10;
  table.entries = {{{64, 128}, 4, 50}, {{64, 128}, 1, 20}, {{64, 128}, 8, 90}};
  const CostModel model(table);
  EXPECT_DOUBLE_EQ(model.MatrixBatch({64, 128}, 1), 20);
  EXPECT_DOUBLE_EQ(model.MatrixBatch({64, 128}, 2), 30);
  EXPECT_DOUBLE_EQ(model.MatrixBatch({64, 128}, 6), 70);
  EXPECT_DOUBLE_EQ(model.MatrixBatch({64, 128}, 10), 110);
  // Transposed costs the same.
  EXPECT_DOUBLE_EQ(model.MatrixBatch({128, 64}, 4), 50);
}

TEST(CostModelTest, UnmeasuredShapesFollowTheNearestMeasuredOne) {
  const CostModel analytic{CostTable{}};
  CostTable table;
  table.entries = {{{1024, 1024}, 1, 3 * analytic.MatrixBatch({1024, 1024}, 1)}};
  const CostModel model(table);
  EXPECT_NEAR(model.MatrixBatch({2048, 1024}, 4), 3 * analytic.MatrixBatch({2048, 1024}, 4), 1e-6);
}

TEST(CostModelTest, AMeasurementHoldsForItsIterationAndIsAMeasureForOthers) {
  const CostModel analytic{CostTable{}};
  const MatrixKind gram{1024, 8192};
  const MatrixKind standard{1024, 8192, kStandard};
  CostTable table;
  table.entries = {{gram, 1, 2 * analytic.MatrixBatch(gram, 1)}};
  EXPECT_NEAR(CostModel(table).MatrixBatch(standard, 3), 2 * analytic.MatrixBatch(standard, 3),
              1e-6);
  table.entries.push_back({standard, 1, 7000});
  EXPECT_DOUBLE_EQ(CostModel(table).MatrixBatch(standard, 1), 7000);
  EXPECT_DOUBLE_EQ(CostModel(table).MatrixBatch(gram, 1), 2 * analytic.MatrixBatch(gram, 1));
}

TEST(CostModelTest, TimeNeverFallsWithTheBatch) {
  ForAll(1000, [] {
    CostTable table;
    const int64_t entries = Pick(0, 6);
    for (int64_t i = 0; i < entries; ++i) {
      table.entries.push_back({{Pick(1, 2) * 64, 64},
                               static_cast<int32_t>(Pick(1, 20)),
                               static_cast<double>(Pick(1, 1000))});
    }
    const CostModel model(table);
    for (int32_t batch = 1; batch < 30; ++batch) {
      RC_ASSERT(model.MatrixBatch({64, 64}, batch) <=
                model.MatrixBatch({64, 64}, batch + 1) + 1e-9);
    }
  });
}

TEST(BatchCostTest, SplitsHaveTheirCostAndKeepTheLargestBatch) {
  ForAll(1000, [] {
    CostTable table;
    const int64_t entries = Pick(0, 5);
    for (int64_t i = 0; i < entries; ++i) {
      table.entries.push_back(
          {{64, 64}, static_cast<int32_t>(Pick(1, 12)), static_cast<double>(Pick(1, 400))});
    }
    const CostModel model(table);
    const BatchCost cost(model, {64, 64}, 30, static_cast<int32_t>(Pick(1, 12)));
    for (int32_t x = 0; x <= 30; ++x) {
      Nanoseconds sum = 0;
      int32_t matrices = 0;
      for (int32_t b : cost.Split(x)) {
        RC_ASSERT(b <= cost.batch_max());
        sum += FromMicroseconds(model.MatrixBatch({64, 64}, b));
        matrices += b;
      }
      RC_ASSERT(matrices == x);
      RC_ASSERT(sum == cost.Cost(x));
    }
  });
}

TEST(BucketsTest, ParametersOfOneBucketAreReadyTogetherAndFillIt) {
  World world(2, 1, 1);
  for (int i = 0; i < 5; ++i) {
    Parameter p = AdamW("p" + std::to_string(i), {100});
    p.ready_order = 5 - i;
    world.Replicate(p);
  }
  const Buckets buckets = MakeBuckets(world.Inputs()->layout, 800);
  EXPECT_EQ(buckets.count, 3);
  EXPECT_THAT(buckets.of_parameter, ElementsAre(2, 1, 1, 0, 0));
}

TEST(BucketsTest, ShardsCountByTheLargestShareAndTrainersOwnParametersNotAtAll) {
  World world(4, 1, 1);
  world.ShardRows(AdamW("a", {400})).ShardRows(AdamW("b", {400}));
  Parameter left = AdamW("left", {400});
  left.route = Route::kTrainer;
  world.Replicate(left);
  const Buckets buckets = MakeBuckets(world.Inputs()->layout, 800);
  EXPECT_EQ(buckets.count, 1);
  EXPECT_THAT(buckets.of_parameter, ElementsAre(0, 0, -1));
}

TEST(BucketsTest, ThereAreNeverMoreThanThePageHasWordsFor) {
  World world(1, 1, 1);
  for (int i = 0; i < 9000; ++i) world.registrations[0].parameters.push_back(AdamW("x", {1}));
  Layout layout;
  layout.parameters = world.registrations[0].parameters;
  LayoutFragment fragment;
  fragment.box = {{0}, {1}};
  for (; fragment.parameter < 9000; ++fragment.parameter) layout.fragments.push_back(fragment);
  const Buckets buckets = MakeBuckets(layout, 0);
  EXPECT_LE(buckets.count, kBucketsMax);
  EXPECT_GE(buckets.count, kBucketsMax / 4);
}

TEST(MatrixViewTest, ExpertsAndFusedBlocksAreMatricesOfTheirOwn) {
  Parameter parameter = Muon("experts.qkv", {2, 6, 4});
  parameter.view.kind = MatrixView::Kind::kRowBlocks;
  parameter.view.row_blocks = {4, 2};
  std::vector<std::string> boxes;
  for (const Box& box : MatricesOf(parameter)) boxes.push_back(ToString(box));
  EXPECT_THAT(boxes, ElementsAre("[0:1, 0:4, 0:4]", "[0:1, 4:6, 0:4]", "[1:2, 0:4, 0:4]",
                                 "[1:2, 4:6, 0:4]"));
  parameter.view.kind = MatrixView::Kind::kHeads;
  parameter.view.heads = 3;
  EXPECT_EQ(CountMatrices(parameter), 6);
}

TEST(StateSlotsTest, SizesJoinWhereThatSavesMoreThanItWastes) {
  const int64_t m = int64_t{1} << 20;
  // 10 elements more or less: one class. Half the size, many of them: their own.
  EXPECT_THAT(JoinSizes({{m, 3}, {m - 10, 4}, {m / 2, 50}}), ElementsAre(0, 0, 2));
}

TEST(ViewTest, ACellIsAStridedBoxInItsUnit) {
  Unit unit;
  unit.box = {{2, 4, 8}, {3, 8, 16}};
  const StridedView view = ViewInUnit(unit, {{2, 5, 9}, {3, 7, 12}});
  EXPECT_EQ(view.offset_elements, 1 * 8 + 1);
  EXPECT_THAT(view.shape, ElementsAre(1, 2, 3));
  EXPECT_THAT(view.strides, ElementsAre(32, 8, 1));
  EXPECT_FALSE(IsContiguous(view));
  EXPECT_TRUE(IsContiguous(ViewInUnit(unit, {{2, 5, 8}, {3, 7, 16}})));
}

// The figures that the planner promises for known models (their times: bench/scheduler).
TEST(QualityTest, KnownModelsAreBalanced) {
  const auto quality = [](const char* model, int32_t nodes) {
    PlanInputs inputs;
    inputs.nodes = nodes;
    inputs.lanes_per_node = 8;
    inputs.layout = LayoutOf(*FindModelShapes(model), nodes, 8);
    return MakePlan(inputs)->quality;
  };
  EXPECT_LE(quality("llama3-8b", 1).gap, 0.02);
  EXPECT_LE(quality("moonlight-moe", 128).gap, 0.02);
  EXPECT_LE(quality("wall-x", 1).imbalance, 1.03);
  // A lane's 6 ms begin three batches. The bound, of all lanes' work together, counts fewer.
  EXPECT_LE(quality("qwen2.5-1.5b", 1).gap, 0.05);
  EXPECT_LE(quality("qwen3-1.7b", 8).gap, 0.02);
}

// There are smaller batches, whose plans take less: any limit down to theirs is kept.
TEST(QualityTest, ALimitJustBelowWhatAPlanTakesMakesItsBatchesSmaller) {
  PlanInputs inputs;
  inputs.lanes_per_node = 4;
  inputs.layout = LayoutOf(*FindModelShapes("llama3-8b", 8), 1, 4);
  const auto most = [](const Plan& plan) { return std::ranges::max(plan.lane_memory_bytes); };
  const int64_t unlimited = most(*MakePlan(inputs));
  for (const double part : {1.0, 0.99999, 0.999, 0.98, 0.9}) {
    inputs.lane_memory_bytes = static_cast<int64_t>(part * static_cast<double>(unlimited));
    const auto plan = MakePlan(inputs);
    ASSERT_TRUE(plan.ok()) << part << ": " << plan.status();
    EXPECT_LE(most(*plan), inputs.lane_memory_bytes);
  }
}

}  // namespace
}  // namespace dmuond::scheduler
