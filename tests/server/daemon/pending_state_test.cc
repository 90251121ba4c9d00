#include "server/daemon/memory/pending_state.h"

#include <cstddef>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_memory.h"

namespace dmuond::server {
namespace {

using scheduler::Box;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr v1::StateKind kMomentum = v1::STATE_KIND_MOMENTUM;

scheduler::Unit UnitOf(const Box& box) {
  scheduler::Unit unit;
  unit.id = scheduler::UnitId(3);
  unit.box = box;
  return unit;
}

template <typename T>
std::vector<T> Contents(int fd, size_t elements) {
  auto mapping = kernels::cpu::MapShared(fd, elements * sizeof(T));
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  const auto* values = reinterpret_cast<const T*>((*mapping)->data());
  return {values, values + elements};
}

TEST(PendingStateTest, PutsFragmentsTogetherToAUnit) {
  const scheduler::Unit unit = UnitOf(Box{{0, 0}, {2, 2}});
  PendingState pending;
  ASSERT_TRUE(pending.Add(7, unit, kMomentum, Box{{0, 0}, {1, 2}}, std::vector<float>{1, 2}).ok());
  EXPECT_FALSE(pending.Tensors(7).at(0).whole);
  ASSERT_TRUE(pending.Add(7, unit, kMomentum, Box{{1, 0}, {2, 2}}, std::vector<float>{3, 4}).ok());
  ASSERT_TRUE(pending.SetUpdates(7, unit.id, 5.0).ok());
  const std::vector<PendingState::Tensor> tensors = pending.Tensors(7);
  ASSERT_EQ(tensors.size(), 2);
  EXPECT_EQ(tensors[0].kind, kMomentum);
  EXPECT_TRUE(tensors[0].whole);
  EXPECT_THAT(Contents<float>(tensors[0].fd, 4), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(tensors[1].kind, v1::STATE_KIND_STEP);
  EXPECT_THAT(Contents<double>(tensors[1].fd, 1), ElementsAre(5.0));
}

TEST(PendingStateTest, WhatReplicasGiveTwiceMakesNoUnitComplete) {
  const scheduler::Unit unit = UnitOf(Box{{0, 0}, {2, 3}});
  PendingState pending;
  const auto add = [&](const Box& box, const std::vector<float>& values) {
    ASSERT_TRUE(pending.Add(7, unit, kMomentum, box, values).ok());
  };
  add(Box{{0, 0}, {2, 2}}, {1, 2, 3, 4});
  add(Box{{0, 1}, {2, 2}}, {2, 4});
  EXPECT_FALSE(pending.Tensors(7).at(0).whole);
  add(Box{{0, 1}, {2, 3}}, {2, 8, 4, 9});
  EXPECT_TRUE(pending.Tensors(7).at(0).whole);
  EXPECT_THAT(Contents<float>(pending.Tensors(7).at(0).fd, 6), ElementsAre(1, 2, 8, 3, 4, 9));
}

// Another node's trainers may hear of a commit, and load again, before this node has heard of it.
TEST(PendingStateTest, ALaterLoadTakesNothingFromOneThatIsNotPublished) {
  const scheduler::Unit unit = UnitOf(Box{{0}, {1}});
  PendingState pending;
  ASSERT_TRUE(pending.Add(7, unit, kMomentum, unit.box, std::vector<float>{1}).ok());
  ASSERT_TRUE(pending.Add(8, unit, kMomentum, unit.box, std::vector<float>{2}).ok());
  ASSERT_EQ(pending.Tensors(7).size(), 1);
  EXPECT_THAT(Contents<float>(pending.Tensors(7).at(0).fd, 1), ElementsAre(1));
  const std::shared_ptr<void> old = pending.DropThrough(7);
  EXPECT_THAT(pending.Tensors(7), IsEmpty());
  EXPECT_THAT(Contents<float>(pending.Tensors(8).at(0).fd, 1), ElementsAre(2));
  // Late parts of what is over stay away.
  ASSERT_TRUE(pending.Add(7, unit, kMomentum, unit.box, std::vector<float>{3}).ok());
  EXPECT_THAT(pending.Tensors(7), IsEmpty());
}

}  // namespace
}  // namespace dmuond::server
