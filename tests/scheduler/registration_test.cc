// What bad registrations get: the parameter, the trainers and both values, and nothing changed.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/layout.h"
#include "scheduler/reason.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Muon;
using testing::World;

std::string MessageOf(const World& world) {
  Layout layout;
  layout.parameters.push_back(Muon("before", {1, 1}));
  const absl::Status status = MergeRegistrations(world.registrations, world.trainers(), layout);
  EXPECT_FALSE(status.ok());
  // Fails closed: the layout that was there is untouched.
  EXPECT_EQ(layout.parameters.size(), 1);
  return status.ToString();
}

TEST(RegistrationTest, DifferentShapesNameBothTrainersAndBothShapes) {
  World world(3, 1, 1);
  world.Hold(0, Muon("w", {4, 8}), {{0, 0}, {4, 8}}).Hold(2, Muon("w", {4, 9}), {{0, 0}, {4, 9}});
  EXPECT_THAT(MessageOf(world), AllOf(HasSubstr("'w'"), HasSubstr("trainers 0 and 2"),
                                      HasSubstr("4x8"), HasSubstr("4x9")));
}

TEST(RegistrationTest, EveryOtherDisagreementIsNamedToo) {
  const auto disagree = [](auto&& change) {
    World world(2, 1, 1);
    Parameter other = Muon("w", {4, 4});
    change(other);
    world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}}).Hold(1, other, {{0, 0}, {4, 4}});
    return MessageOf(world);
  };
  EXPECT_THAT(disagree([](Parameter& p) { p.weight_type = ElementType::kBF16; }),
              HasSubstr("different weight types: float32 and bfloat16"));
  EXPECT_THAT(disagree([](Parameter& p) { p.gradient_type = ElementType::kF16; }),
              HasSubstr("different gradient types: float32 and float16"));
  EXPECT_THAT(disagree([](Parameter& p) { p.route = Route::kAdamW; }),
              HasSubstr("different routes: muon and adamw"));
  EXPECT_THAT(disagree([](Parameter& p) { p.group = 2; }),
              HasSubstr("different parameter groups: 0 and 2"));
  EXPECT_THAT(disagree([](Parameter& p) { p.reduce_factor = 0.5; }),
              HasSubstr("different reduce factors: 1 and 0.5"));
  EXPECT_THAT(disagree([](Parameter& p) {
                p.view.kind = MatrixView::Kind::kHeads;
                p.view.heads = 2;
              }),
              HasSubstr("different matrix views: whole and 2 heads"));
}

TEST(RegistrationTest, DifferentContributionsAreNamed) {
  World world(2, 1, 1);
  world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}}, Contribution::kSum)
      .Hold(1, Muon("w", {4, 4}), {{0, 0}, {4, 4}}, Contribution::kSame);
  EXPECT_THAT(MessageOf(world), HasSubstr("trainers 0 and 1 register different contributions: sum "
                                          "and same"));
}

TEST(RegistrationTest, NoneGoesWithSumAlone) {
  const Box whole = {{0, 0}, {4, 4}};
  World with_sum(3, 1, 1);
  with_sum.Hold(0, Muon("w", {4, 4}), whole, Contribution::kNone)
      .Hold(1, Muon("w", {4, 4}), whole, Contribution::kSum)
      .Hold(2, Muon("w", {4, 4}), whole, Contribution::kNone);
  EXPECT_TRUE(with_sum.Inputs().ok());
  World with_same(2, 1, 1);
  with_same.Hold(0, Muon("w", {4, 4}), whole, Contribution::kSame)
      .Hold(1, Muon("w", {4, 4}), whole, Contribution::kNone);
  EXPECT_THAT(MessageOf(with_same),
              HasSubstr("trainers 0 and 1 register different contributions: same and none"));
}

TEST(RegistrationTest, WhatNobodyGivesAGradientOfIsNamed) {
  World world(3, 1, 1);
  world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {2, 4}}, Contribution::kSum)
      .Hold(1, Muon("w", {4, 4}), {{0, 0}, {4, 4}}, Contribution::kNone)
      .Hold(2, Muon("w", {4, 4}), {{0, 0}, {4, 4}}, Contribution::kNone);
  EXPECT_THAT(MessageOf(world), HasSubstr("'w': of [2:4, 0:4] no trainer gives a gradient; "
                                          "trainer(s) 1-2 register the contribution none"));
}

TEST(RegistrationTest, WhatIsTakenToBeHeldByAllAndIsNotIsRefused) {
  Parameter stage = Muon("stage.0", {4, 4});
  stage.held_by_all = true;
  World everywhere(3, 1, 1);
  everywhere.Replicate(stage);
  EXPECT_TRUE(everywhere.Inputs().ok());
  World pipeline(3, 1, 1);
  pipeline.Hold(0, stage, {{0, 0}, {4, 4}}).Hold(1, stage, {{0, 0}, {4, 4}});
  pipeline.Hold(2, Muon("stage.1", {4, 4}), {{0, 0}, {4, 4}});
  const absl::Status refused = pipeline.Inputs().status();
  EXPECT_EQ(ReasonOf(refused), "DIVISOR_UNKNOWN");
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("'stage.0' is held whole by 2 of 3 trainers (0-1), and nothing says"));
  // One of its holders saying so is enough.
  pipeline.registrations[0].parameters[0].held_by_all = false;
  EXPECT_EQ(ReasonOf(pipeline.Inputs().status()), "DIVISOR_UNKNOWN");
}

TEST(RegistrationTest, HolesAreNamed) {
  World world(2, 1, 1);
  world.Hold(0, AdamW("e", {10, 4}), {{0, 0}, {5, 4}})
      .Hold(1, AdamW("e", {10, 4}), {{7, 0}, {10, 4}});
  EXPECT_THAT(MessageOf(world), HasSubstr("'e' of shape 10x4: no trainer holds [5:7, 0:4]"));
}

TEST(RegistrationTest, AParameterThatNobodyHoldsIsAHole) {
  World world(1, 1, 1);
  world.Hold(0, AdamW("e", {10}), {{3}, {3}});
  EXPECT_THAT(MessageOf(world), HasSubstr("no trainer holds [0:10]"));
}

TEST(RegistrationTest, OwnBoxesThatOverlapAreNamed) {
  World world(1, 1, 1);
  world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {3, 4}}).Hold(0, Muon("w", {4, 4}), {{2, 0}, {4, 4}});
  EXPECT_THAT(MessageOf(world),
              AllOf(HasSubstr("trainer 0: parameter 'w'"), HasSubstr("[0:3, 0:4] and [2:4, 0:4]"),
                    HasSubstr("overlap in [2:3, 0:4]")));
}

TEST(RegistrationTest, TheSameBoxTwiceIsNamed) {
  World world(1, 1, 1);
  world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}}).Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}});
  EXPECT_THAT(MessageOf(world), HasSubstr("box [0:4, 0:4] is registered 2 times"));
}

TEST(RegistrationTest, MissingRanksAreAllNamed) {
  World world(9, 1, 1);
  world.Replicate(Muon("w", {4, 4}));
  auto& registrations = world.registrations;
  registrations.erase(registrations.begin() + 5, registrations.begin() + 8);
  registrations.erase(registrations.begin() + 2);
  Layout layout;
  const absl::Status status = MergeRegistrations(registrations, 9, layout);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("world of 9: trainer(s) 2, 5-7"));
}

TEST(RegistrationTest, ARankTwiceOrOutsideTheWorldIsNamed) {
  World world(2, 1, 1);
  world.Replicate(Muon("w", {4, 4}));
  Layout layout;
  EXPECT_THAT(std::string(MergeRegistrations(world.registrations, 1, layout).message()),
              HasSubstr("trainer 1 is outside the world of 1"));
  world.registrations[1].rank = TrainerRank(0);
  for (Fragment& f : world.registrations[1].fragments) f.rank = TrainerRank(0);
  EXPECT_THAT(std::string(MergeRegistrations(world.registrations, 2, layout).message()),
              HasSubstr("trainer 0 has registered twice"));
}

TEST(RegistrationTest, ANameTwiceNamesBothShapes) {
  World world(1, 1, 1);
  world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}});
  world.registrations[0].parameters.push_back(Muon("w", {4, 5}));
  EXPECT_THAT(MessageOf(world), HasSubstr("'w' is registered twice, with shapes 4x4 and 4x5"));
}

TEST(RegistrationTest, WhatIsNotASetOfMatricesIsRefusedByName) {
  const auto refuse = [](const Parameter& parameter) {
    return MessageOf(World(1, 1, 1).Replicate(parameter));
  };
  EXPECT_THAT(refuse(Muon("bias", {16})), AllOf(HasSubstr("'bias'"), HasSubstr("1 dimension(s)")));
  EXPECT_THAT(refuse(Muon("scalar", {})), HasSubstr("0 dimension(s)"));
  EXPECT_THAT(refuse(Muon("none", {0, 4})), HasSubstr("'none' of shape 0x4 has no elements"));
  Parameter qkv = Muon("qkv", {12, 4});
  qkv.view.kind = MatrixView::Kind::kRowBlocks;
  qkv.view.row_blocks = {4, 4};
  EXPECT_THAT(refuse(qkv), HasSubstr("row blocks (4, 4) have 8 rows of its 12"));
  qkv.view.row_blocks = {4, 4, 8};
  EXPECT_THAT(refuse(qkv), HasSubstr("have more rows than its 12"));
  qkv.view.row_blocks = {12, 0};
  EXPECT_THAT(refuse(qkv), HasSubstr("a row block of 0 rows"));
  qkv.view.kind = MatrixView::Kind::kHeads;
  qkv.view.heads = 5;
  EXPECT_THAT(refuse(qkv), HasSubstr("5 heads do not divide its 12 rows"));
}

TEST(RegistrationTest, NumbersThatCannotBeAreRefused) {
  const auto refuse = [](auto&& change) {
    World world(1, 1, 1);
    world.Hold(0, Muon("w", {4, 4}), {{0, 0}, {4, 4}});
    change(world.registrations[0]);
    return MessageOf(world);
  };
  EXPECT_THAT(refuse([](Registration& r) { r.fragments[0].box.end[0] = 5; }),
              HasSubstr("box [0:5, 0:4] is not inside its shape 4x4"));
  EXPECT_THAT(refuse([](Registration& r) { r.fragments[0].parameter = 7; }),
              HasSubstr("parameter number 7 of 1"));
  EXPECT_THAT(refuse([](Registration& r) { r.fragments[0].gradient.offset_bytes = -4; }),
              HasSubstr("negative offset -4"));
  EXPECT_THAT(refuse([](Registration& r) { r.fragments[0].weight.offset_bytes = 2; }),
              HasSubstr("weight offset 2 is not a multiple of the 4 bytes of float32"));
  EXPECT_THAT(refuse([](Registration& r) {
                r.fragments[0].weight.strides = {2, 1};
              }),
              HasSubstr("strides (2x1) put several elements at one address"));
  EXPECT_THAT(refuse([](Registration& r) { r.fragments[0].weight.strides = {1}; }),
              HasSubstr("1 strides for 2 dimensions"));
  EXPECT_THAT(refuse([](Registration& r) {
                r.fragments[0].gradient.strides = {std::numeric_limits<int64_t>::max() / 2, 1};
              }),
              HasSubstr("overflows"));
  EXPECT_THAT(refuse([](Registration& r) {
                r.parameters[0].shape = {int64_t{1} << 40, 1 << 20};
              }),
              HasSubstr("has more than"));
  EXPECT_THAT(
      refuse([](Registration& r) { r.parameters[0].gradient_type = static_cast<ElementType>(9); }),
      HasSubstr("unknown element type 9"));
  EXPECT_THAT(refuse([](Registration& r) { r.parameters[0].reduce_factor = 0; }),
              HasSubstr("reduce factor 0"));
}

TEST(RegistrationTest, WeightsThatShareMemoryAreNamed) {
  World world(1, 1, 1);
  world.Hold(0, Muon("a", {4, 4}), {{0, 0}, {4, 4}}).Hold(0, Muon("b", {4, 4}), {{0, 0}, {4, 4}});
  world.registrations[0].fragments[1].weight.offset_bytes = 60;
  EXPECT_THAT(MessageOf(world),
              HasSubstr("arena 1: the weight of parameter 'a' ends at byte 64, behind the "
                        "beginning of the weight of 'b' at byte 60"));
  world.registrations[0].fragments[1].weight = {0, 32, {4, 1}};
  EXPECT_THAT(MessageOf(world), HasSubstr("gradient of parameter 'a' ends at byte 64"));
  // Two parameters may read one gradient.
  world.registrations[0].fragments[1].weight = {1, 64, {4, 1}};
  world.registrations[0].fragments[1].gradient.offset_bytes = 0;
  Layout layout;
  EXPECT_TRUE(MergeRegistrations(world.registrations, 1, layout).ok());
}

TEST(RegistrationTest, SliceEndCountsTheLastElement) {
  int64_t end = 0;
  ASSERT_TRUE(SliceEnd({0, 100, {10, 1}}, {{0, 0}, {3, 4}}, ElementType::kBF16, end).ok());
  EXPECT_EQ(end, 100 + (2 * 10 + 3 + 1) * 2);
  ASSERT_TRUE(SliceEnd({0, 100, {10, 1}}, {{3, 0}, {3, 4}}, ElementType::kF32, end).ok());
  EXPECT_EQ(end, 100);
}

TEST(RegistrationTest, TheOrderOfArrivalDoesNotMatter) {
  World world(3, 1, 1);
  world.Hold(1, Muon("b", {4, 4}), {{0, 0}, {4, 4}})
      .Hold(0, Muon("a", {4, 4}), {{0, 0}, {4, 4}})
      .Hold(2, Muon("a", {4, 4}), {{0, 0}, {4, 4}});
  Layout layout;
  std::reverse(world.registrations.begin(), world.registrations.end());
  ASSERT_TRUE(MergeRegistrations(world.registrations, 3, layout).ok());
  EXPECT_EQ(layout.parameters[0].name, "a");
  EXPECT_EQ(layout.trainers[2].rank, TrainerRank(2));
  EXPECT_EQ(layout.fragments[1].rank, TrainerRank(2));
  EXPECT_EQ(layout.fragments[2].parameter, 1);
}

TEST(RegistrationTest, ParametersLeftToTheTrainerNeedNoFragments) {
  Parameter left = AdamW("buffer", {0, 3});
  left.route = Route::kTrainer;
  World world(1, 1, 1);
  world.registrations[0].parameters.push_back(left);
  Layout layout;
  EXPECT_TRUE(MergeRegistrations(world.registrations, 1, layout).ok());
}

// A registration of one trainer whose boxes these are.
World Holding(const Parameter& parameter, const std::vector<Box>& boxes) {
  World world(1, 1, 1);
  for (const Box& box : boxes) world.Hold(0, parameter, box);
  return world;
}

TEST(RegistrationTest, MoreThanAJobCanHaveIsRefusedByNameBeforeItIsLookedAt) {
  const Extents huge = {int64_t{1} << 28, int64_t{1} << 27};
  for (const Parameter& parameter : {AdamW("huge", huge), Muon("huge", huge)}) {
    EXPECT_THAT(MessageOf(Holding(parameter, {WholeBox(huge)})),
                HasSubstr("parameter 'huge' of shape 268435456x134217728 has more than "
                          "1099511627776 elements"));
  }
  std::vector<Box> rows;
  for (int64_t i = 0; i < 261'000; ++i) rows.push_back({{i, 0}, {i + 1, 4}});
  EXPECT_THAT(MessageOf(Holding(AdamW("rows", {261'000, 4}), rows)),
              HasSubstr("parameter 'rows' has 261000 fragments; at most 1024 are allowed"));
  const Extents large = {1 << 20, 1 << 20};
  World world(1, 1, 1);
  for (int i = 0; i < 5; ++i) world.Hold(0, AdamW("w" + std::to_string(i), large), WholeBox(large));
  EXPECT_THAT(MessageOf(world),
              HasSubstr("the parameters up to 'w4' of shape 1048576x1048576 have 5497558138880 "
                        "elements in all; at most 4398046511104 are allowed in a job"));
}

TEST(RegistrationTest, BoxesThatFallApartIntoFarMoreCellsThanTheyAreAreRefused) {
  World world(1, 1, 1);
  constexpr int64_t kSide = 1 << 16;
  for (int p = 0; p < 8; ++p) {
    const Parameter parameter = AdamW("bricks" + std::to_string(p), {kSide, kSide});
    for (int64_t i = 0; i < 32; ++i) {
      // Each column of bricks is cut at other rows.
      for (int64_t j = 0, from = 0; j < 32; ++j) {
        const int64_t to = j == 31 ? kSide : (j + 1) * 2000 + i;
        world.Hold(0, parameter, {{from, i * 2048}, {to, (i + 1) * 2048}});
        from = to;
      }
    }
  }
  EXPECT_THAT(MessageOf(world), AllOf(HasSubstr("'bricks"), HasSubstr("cells")));
}

TEST(RegistrationTest, TheLargestModelOfTodayOnManyTrainersIsNot) {
  World world(64, 8, 8);
  // 61 layers of 384 experts, 10^12 elements, as stacks of matrices; vectors in shards.
  for (int layer = 0; layer < 61; ++layer) {
    for (const char* name : {"gate", "up", "down"}) {
      world.ShardRows(Muon(name + std::to_string(layer), {384, 7168, 2048}));
    }
    world.ShardRows(AdamW("norm" + std::to_string(layer), {7168}));
  }
  Layout layout;
  const absl::Status merged = MergeRegistrations(world.registrations, 64, layout);
  EXPECT_TRUE(merged.ok()) << merged;
}

}  // namespace
}  // namespace dmuond::scheduler
