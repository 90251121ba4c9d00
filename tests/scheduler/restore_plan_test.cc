#include "scheduler/restore_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/scheduler/layouts.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using ::testing::AllOf;
using testing::ForAll;
using ::testing::HasSubstr;
using testing::Muon;
using testing::Pick;
using testing::World;

struct Planned {
  PlanInputs inputs;
  Plan plan;
};

Planned PlanOf(const World& world) {
  Planned planned{world.Inputs().value(), {}};
  planned.plan = MakePlan(planned.inputs).value();
  return planned;
}

// What the owners of a plan would have saved.
std::vector<SavedUnit> SavedBy(const Plan& plan, uint64_t updates = 5) {
  std::vector<SavedUnit> saved;
  for (const Unit& unit : plan.units) {
    saved.push_back({unit.parameter, unit.kind, unit.box, updates});
  }
  return saved;
}

Planned OneTensor(int32_t trainers, const Parameter& parameter, bool sharded) {
  World world(trainers, 1, trainers);
  return PlanOf(sharded ? world.ShardRows(parameter) : world.Replicate(parameter));
}

TEST(RestorePlanTest, ShardsOfThreeBecomeShardsOfTwo) {
  const Parameter tensor = AdamW("t", {6, 2});
  const Planned from = OneTensor(3, tensor, true);
  const Planned to = OneTensor(2, tensor, true);
  const auto plan = PlanRestore(to.inputs.layout, to.plan, SavedBy(from.plan));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->updates, (std::vector<uint64_t>{5, 5}));
  const std::vector<RestorePart> first = {{0, UnitId(0), {{0, 0}, {2, 2}}},
                                          {1, UnitId(0), {{2, 0}, {3, 2}}}};
  const std::vector<RestorePart> second = {{1, UnitId(1), {{3, 0}, {4, 2}}},
                                           {2, UnitId(1), {{4, 0}, {6, 2}}}};
  EXPECT_EQ(plan->lanes[to.plan.units[0].owner.value()], first);
  EXPECT_EQ(plan->lanes[to.plan.units[1].owner.value()], second);
}

TEST(RestorePlanTest, MatricesAreReadWhole) {
  const Parameter stack = Muon("experts", {4, 3, 5});
  const Planned from = OneTensor(4, stack, true);
  const Planned to = OneTensor(2, stack, false);
  const auto plan = PlanRestore(to.inputs.layout, to.plan, SavedBy(from.plan));
  ASSERT_TRUE(plan.ok()) << plan.status();
  int64_t parts = 0;
  for (const auto& lane : plan->lanes) {
    for (const RestorePart& part : lane) {
      EXPECT_EQ(part.part, to.plan.units[part.unit.value()].box);
      ++parts;
    }
  }
  EXPECT_EQ(parts, 4);
}

TEST(RestorePlanTest, NamesTheHole) {
  const Planned to = OneTensor(2, AdamW("t", {6, 2}), true);
  std::vector<SavedUnit> saved = SavedBy(to.plan);
  saved[1].box.begin[0] += 1;
  const absl::Status status = PlanRestore(to.inputs.layout, to.plan, saved).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'t'"), HasSubstr("[3:6, 0:2]"), HasSubstr("4 of 6 elements")));
}

TEST(RestorePlanTest, NamesTheParameterWithoutState) {
  World world(1, 1, 1);
  const Planned to = PlanOf(world.Replicate(AdamW("a", {2})).Replicate(AdamW("b", {2})));
  std::vector<SavedUnit> saved = SavedBy(to.plan);
  saved.pop_back();
  const absl::Status status = PlanRestore(to.inputs.layout, to.plan, saved).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no saved state of parameter 'b'"));
}

TEST(RestorePlanTest, NamesOverlappingBoxesEvenWhereElementsAddUp) {
  const Planned to = OneTensor(1, AdamW("t", {6}), false);
  std::vector<SavedUnit> saved(2, SavedBy(to.plan)[0]);
  saved[0].box = {{0}, {3}};
  saved[1].box = {{1}, {4}};  // six elements together, two of them twice
  const absl::Status status = PlanRestore(to.inputs.layout, to.plan, saved).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'t'"), HasSubstr("[0:3]"), HasSubstr("[1:4]")));
}

TEST(RestorePlanTest, RefusesABoxOutsideTheShape) {
  const Planned to = OneTensor(1, AdamW("t", {6}), false);
  std::vector<SavedUnit> saved = SavedBy(to.plan);
  saved[0].box.end[0] = 7;
  EXPECT_EQ(PlanRestore(to.inputs.layout, to.plan, saved).status().code(),
            absl::StatusCode::kInvalidArgument);
  saved[0].parameter = 1;
  EXPECT_EQ(PlanRestore(to.inputs.layout, to.plan, saved).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(RestorePlanTest, RefusesStateOfTheOtherKind) {
  const Planned to = OneTensor(1, Muon("w", {6, 4}), false);
  std::vector<SavedUnit> saved = SavedBy(to.plan);
  saved[0].kind = UnitKind::kPiece;
  const absl::Status status = PlanRestore(to.inputs.layout, to.plan, saved).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'w'"));
}

TEST(RestorePlanTest, BoxesWithDifferentUpdatesAreNotJoined) {
  const Parameter tensor = AdamW("t", {6});
  const Planned from = OneTensor(2, tensor, true);
  std::vector<SavedUnit> saved = SavedBy(from.plan);
  saved[1].updates = 9;
  const auto same = PlanRestore(from.inputs.layout, from.plan, saved);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->updates, (std::vector<uint64_t>{5, 9}));
  const Planned joined = OneTensor(1, tensor, false);
  const absl::Status status = PlanRestore(joined.inputs.layout, joined.plan, saved).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("5 updates"), HasSubstr("9")));
}

TEST(RestorePlanTest, AScalarIsRestored) {
  const Planned to = OneTensor(2, AdamW("s", {}), false);
  const auto plan = PlanRestore(to.inputs.layout, to.plan, SavedBy(to.plan));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->lanes[to.plan.units[0].owner.value()].size(), 1);
}

// A world of random size and sharding over the same parameters.
World RandomWorld() {
  const auto nodes = static_cast<int32_t>(Pick(1, 3));
  World world(static_cast<int32_t>(nodes * Pick(1, 4)), nodes, static_cast<int32_t>(Pick(1, 3)));
  const std::vector<Parameter> parameters = {Muon("w", {24, 10}), Muon("e", {5, 4, 6}),
                                             AdamW("a", {17, 3}), AdamW("b", {700, 512}),
                                             AdamW("c", {9})};
  for (const Parameter& parameter : parameters) {
    if (Pick(0, 1) == 0) {
      world.Replicate(parameter);
    } else {
      world.ShardRows(parameter);
    }
  }
  return world;
}

TEST(RestorePlanTest, EveryElementIsReadOnceByItsOwner) {
  ForAll(60, [] {
    const Planned from = PlanOf(RandomWorld());
    const Planned to = PlanOf(RandomWorld());
    const std::vector<SavedUnit> saved = SavedBy(from.plan);
    // Parameters may come in another order: the rank that holds the first of them may differ.
    std::vector<SavedUnit> renamed = saved;
    for (SavedUnit& unit : renamed) {
      const std::string& name = from.inputs.layout.parameters[unit.parameter].name;
      for (size_t i = 0; i < to.inputs.layout.parameters.size(); ++i) {
        if (to.inputs.layout.parameters[i].name == name) unit.parameter = static_cast<int32_t>(i);
      }
    }
    const auto plan = PlanRestore(to.inputs.layout, to.plan, renamed);
    RC_ASSERT(plan.ok());
    std::vector<std::vector<Box>> boxes(to.plan.units.size());
    for (size_t lane = 0; lane < plan->lanes.size(); ++lane) {
      for (const RestorePart& part : plan->lanes[lane]) {
        const Unit& unit = to.plan.units[part.unit.value()];
        RC_ASSERT(unit.owner == LaneId(static_cast<int32_t>(lane)));
        RC_ASSERT(!Empty(part.part));
        RC_ASSERT(Contains(unit.box, part.part));
        RC_ASSERT(Contains(renamed[part.saved].box, part.part));
        RC_ASSERT(renamed[part.saved].parameter == unit.parameter);
        boxes[unit.id.value()].push_back(part.part);
      }
    }
    for (const Unit& unit : to.plan.units) {
      int64_t elements = 0;
      const std::vector<Box>& parts = boxes[unit.id.value()];
      for (size_t i = 0; i < parts.size(); ++i) {
        elements += Elements(parts[i]);
        for (size_t k = 0; k < i; ++k) RC_ASSERT(!Intersects(parts[i], parts[k]));
      }
      RC_ASSERT(elements == Elements(unit.box));
    }
  });
}

}  // namespace
}  // namespace dmuond::scheduler
