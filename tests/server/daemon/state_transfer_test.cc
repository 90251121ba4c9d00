#include "server/daemon/memory/state_transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace dmuond::server {
namespace {

using scheduler::Box;
using ::testing::Each;
using ::testing::ElementsAre;

StateTensor Numbered(const Box& box) {
  StateTensor tensor(static_cast<size_t>(scheduler::Elements(box)));
  std::iota(tensor.begin(), tensor.end(), 0.0F);
  return tensor;
}

TEST(StateTransferTest, CopiesOnlyWhatBothBoxesHave) {
  const Box from{{0, 0}, {2, 3}};
  const Box to{{1, 1}, {3, 4}};
  StateTensor target(6, -1);
  CopyIntersection(from, Numbered(from), to, target);
  EXPECT_THAT(target, ElementsAre(4, 5, -1, -1, -1, -1));
}

TEST(StateTransferTest, CopiesAScalar) {
  StateTensor target{-1};
  CopyIntersection(Box{}, {7}, Box{}, target);
  EXPECT_THAT(target, ElementsAre(7));
}

TEST(StateTransferTest, DisjointBoxesLeaveTheTargetAlone) {
  const Box from{{0}, {2}};
  const Box to{{2}, {4}};
  StateTensor target(2, -1);
  CopyIntersection(from, Numbered(from), to, target);
  EXPECT_THAT(target, Each(-1));
}

TEST(StateTransferTest, PartsOfABoxCoverItOnceAndAreSmallEnough) {
  const Box box{{0, 3, 0}, {1, 20, 7}};
  StateTensor seen(static_cast<size_t>(scheduler::Elements(box)));
  for (const Box& part : SplitBox(box, 10)) {
    EXPECT_LE(scheduler::Elements(part), 10);
    StateTensor before(static_cast<size_t>(scheduler::Elements(part)));
    CopyIntersection(box, seen, part, before);
    EXPECT_THAT(before, Each(0)) << "elements given twice in " << scheduler::ToString(part);
    CopyIntersection(part, StateTensor(before.size(), 1), box, seen);
  }
  EXPECT_THAT(seen, Each(1));
}

TEST(StateTransferTest, AnEmptyBoxHasNoParts) {
  EXPECT_TRUE(SplitBox(Box{{0, 0}, {0, 5}}, 10).empty());
}

TEST(StateTransferTest, OnlyAdamWPiecesHaveSecondMoments) {
  EXPECT_TRUE(HasState(scheduler::UnitKind::kPiece, v1::STATE_KIND_EXP_AVG_SQ));
  EXPECT_FALSE(HasState(scheduler::UnitKind::kMatrix, v1::STATE_KIND_EXP_AVG_SQ));
  EXPECT_TRUE(HasState(scheduler::UnitKind::kMatrix, v1::STATE_KIND_MOMENTUM));
  EXPECT_FALSE(HasState(scheduler::UnitKind::kPiece, v1::STATE_KIND_MOMENTUM));
}

}  // namespace
}  // namespace dmuond::server
