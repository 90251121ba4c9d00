#include "scheduler/clip.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::HasSubstr;
using testing::Muon;
using testing::World;

// Units of one AdamW tensor that are cut in the middle of blocks.
Plan CutTensor(const std::vector<int64_t>& cuts) {
  Plan plan;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Unit unit;
    unit.id = UnitId(static_cast<int32_t>(i));
    unit.kind = UnitKind::kPiece;
    unit.box = {{cuts[i]}, {cuts[i + 1]}};
    unit.first_element = cuts[i];
    unit.flat = true;
    plan.units.push_back(unit);
  }
  return plan;
}

// What a lane reports of a unit: sums of consecutive blocks.
UnitNorm Norm(int32_t unit, int64_t first_block, const std::vector<double>& sums,
              int64_t first_element) {
  return {UnitId(unit), first_block, {sums.begin(), sums.end()}, first_element};
}

Layout OneTensor() {
  Layout layout;
  layout.parameters.push_back(AdamW("e", {4 * kPieceCut}));
  return layout;
}

double MustNorm(const Plan& plan, const std::vector<UnitNorm>& norms) {
  auto norm = TotalNorm(OneTensor(), plan, std::vector<bool>(plan.units.size(), true), norms);
  EXPECT_TRUE(norm.ok()) << norm.status();
  return norm.ok() ? norm->norm : -1;
}

TEST(ClipTest, CutsAtBlocksLeaveTheNormsBitsAlone) {
  const std::vector<double> sums = {0.1, 1e17, 0.3, 7.7};  // not associative
  const double whole = MustNorm(CutTensor({0, 4 * kPieceCut}), {Norm(0, 0, sums, 0)});
  const double cut =
      MustNorm(CutTensor({0, kPieceCut, 4 * kPieceCut}),
               {Norm(1, 1, {sums[1], sums[2], sums[3]}, kPieceCut), Norm(0, 0, {sums[0]}, 0)});
  EXPECT_EQ(whole, cut);
  EXPECT_EQ(whole, std::sqrt(((sums[0] + sums[1]) + sums[2]) + sums[3]));
}

TEST(ClipTest, PartsOfABlockAreAddedInOrderOfTheirFirstElementBeforeTheBlockCounts) {
  // The first unit ends where block 1 begins, fifteen units of ten elements share that block with
  // the last one. 2^53 swallows a 1 that comes alone, but not sixteen of them.
  std::vector<int64_t> cuts = {0};
  for (int64_t i = 0; i < 16; ++i) cuts.push_back(kPieceCut + 10 * i);
  cuts.push_back(4 * kPieceCut);
  const double before = 9007199254740992;
  std::vector<UnitNorm> norms;
  for (int32_t unit = 16; unit >= 1; --unit) norms.push_back(Norm(unit, 1, {1}, cuts[unit]));
  norms.push_back(Norm(0, 0, {before}, 0));
  ASSERT_EQ(before + 1, before);
  ASSERT_NE(std::sqrt(before + 16), std::sqrt(before));
  EXPECT_EQ(MustNorm(CutTensor(cuts), norms), std::sqrt(before + 16));
}

TEST(ClipTest, UnitsMayShareSeveralBlocks) {
  const double big = 9007199254740992;  // 2^53: swallows a 1 that comes alone
  const Plan plan = CutTensor({0, kPieceCut + 1, 4 * kPieceCut});
  EXPECT_EQ(MustNorm(plan, {Norm(1, 1, {1, 1, 0}, kPieceCut + 1), Norm(0, 0, {big, 1, 1}, 0)}),
            std::sqrt(big + 2 + 2));
}

TEST(ClipTest, TheOrderInWhichVotesArriveDoesNotMatter) {
  const PlanInputs inputs = *World(4, 2, 2)
                                 .Replicate(Muon("w", {64, 32}))
                                 .ShardRows(AdamW("e", {1000, 65}))
                                 .Replicate(AdamW("b", {77}))
                                 .Inputs();
  const Plan plan = *MakePlan(inputs);
  const std::vector<bool> active(plan.units.size(), true);
  std::vector<UnitNorm> norms;
  for (const Unit& unit : plan.units) {
    norms.push_back(Norm(unit.id.value(), unit.first_element / kPieceCut,
                         {std::pow(10.0, unit.id.value() * 5 % 17)}, unit.first_element));
  }
  const double forwards = TotalNorm(inputs.layout, plan, active, norms)->norm;
  std::reverse(norms.begin(), norms.end());
  EXPECT_EQ(forwards, TotalNorm(inputs.layout, plan, active, norms)->norm);
}

TEST(ClipTest, NamesTheFirstUnitWhoseGradientIsNotFinite) {
  const Plan plan = CutTensor({0, kPieceCut, 2 * kPieceCut, 4 * kPieceCut});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto norm = TotalNorm(
      OneTensor(), plan, {true, true, true},
      {Norm(2, 2, {nan, 1}, 2 * kPieceCut), Norm(1, 1, {nan}, kPieceCut), Norm(0, 0, {1}, 0)});
  ASSERT_TRUE(norm.ok());
  EXPECT_TRUE(std::isnan(norm->norm));
  EXPECT_EQ(norm->first_infinite, UnitId(1));
}

TEST(ClipTest, AUnitWithoutASumIsAnErrorUnlessNobodyHasItsGradient) {
  const Plan plan = CutTensor({0, kPieceCut, 4 * kPieceCut});
  const std::vector<UnitNorm> norms = {Norm(0, 0, {1}, 0)};
  const auto missing = TotalNorm(OneTensor(), plan, {true, true}, norms);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("unit 1 of parameter \"e\""));
  EXPECT_EQ(TotalNorm(OneTensor(), plan, {true, false}, norms)->norm, 1);
}

TEST(ClipTest, AUnitHasAGradientWhereAnyOfItsCellsHasOne) {
  const PlanInputs inputs = *World(2, 1, 2).ShardRows(Muon("w", {64, 32})).Inputs();
  const Plan plan = *MakePlan(inputs);
  const std::vector<Cell>& cells = plan.cells[0];
  ASSERT_EQ(cells.size(), 2U);
  const AbsentFragment first{inputs.layout.fragments[cells[0].fragments[0]].rank, 0};
  const AbsentFragment second{inputs.layout.fragments[cells[1].fragments[0]].rank, 0};
  ASSERT_LT(first, second);
  EXPECT_TRUE(ActiveUnits(inputs.layout, plan, {})[0]);
  EXPECT_TRUE(ActiveUnits(inputs.layout, plan, {first})[0]);
  EXPECT_TRUE(ActiveUnits(inputs.layout, plan, {second})[0]);
  EXPECT_FALSE(ActiveUnits(inputs.layout, plan, {first, second})[0]);
}

TEST(ClipTest, AnUnknownUnitOrABlockThatComesTwiceIsAnError) {
  const Plan plan = CutTensor({0, 4 * kPieceCut});
  EXPECT_FALSE(TotalNorm(OneTensor(), plan, {true}, {Norm(1, 0, {1}, 0)}).ok());
  EXPECT_FALSE(TotalNorm(OneTensor(), plan, {true}, {Norm(-1, 0, {1}, 0)}).ok());
  EXPECT_FALSE(TotalNorm(OneTensor(), plan, {true}, {Norm(0, 0, {1}, 0), Norm(0, 0, {1}, 0)}).ok());
}

TEST(ClipTest, CoefficientIsTorchs) {
  EXPECT_EQ(ClipCoefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(ClipCoefficient(0.5, 1), 1);
  EXPECT_EQ(ClipCoefficient(0, 1), 1);
  EXPECT_EQ(ClipCoefficient(4, 0), 1);
  EXPECT_EQ(ClipCoefficient(4, -1), 1);
}

}  // namespace
}  // namespace dmuond::scheduler
