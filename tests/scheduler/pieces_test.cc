#include "scheduler/pieces.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/limits.h"
#include "scheduler/unit.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using testing::ForAll;
using testing::Pick;

struct Cut {
  Extents shape;
  Box box;
};

Cut RandomCut() {
  Cut cut;
  cut.shape.resize(Pick(1, 3));
  for (int64_t& extent : cut.shape) extent = Pick(1, Pick(0, 1) == 0 ? 5 : 5000);
  cut.box = WholeBox(cut.shape);
  for (size_t d = 0; d < cut.shape.size(); ++d) {
    if (Pick(0, 2) != 0) continue;
    cut.box.begin[d] = Pick(0, cut.shape[d] - 1);
    cut.box.end[d] = Pick(cut.box.begin[d] + 1, cut.shape[d]);
  }
  return cut;
}

// Boxes one after the other in the row-major order of `box`, together all of it.
void AssertConsecutive(const Box& box, const std::vector<Box>& parts) {
  int64_t next = 0;
  for (const Box& part : parts) {
    if (Empty(part)) continue;
    RC_ASSERT(Contains(box, part));
    const StridedView view = ViewInBox(box, part);
    RC_ASSERT(IsContiguous(view));
    RC_ASSERT(view.offset_elements == next);
    next += Elements(part);
  }
  RC_ASSERT(next == Elements(box));
}

TEST(PiecesTest, CutsAreConsecutiveAndSmallEnough) {
  ForAll(10000, [] {
    const Cut cut = RandomCut();
    const int64_t elements_max = Pick(std::max<int64_t>(1, Elements(cut.box) / 50), 20'000'000);
    const std::vector<Box> parts = CutBox(cut.shape, cut.box, elements_max);
    AssertConsecutive(cut.box, parts);
    for (const Box& part : parts) RC_ASSERT(Elements(part) <= elements_max);
  });
}

TEST(PiecesTest, SharesAreConsecutiveAndOneBoxEach) {
  ForAll(10000, [] {
    const Cut cut = RandomCut();
    std::vector<int64_t> shares(Pick(1, 20));
    for (int64_t& share : shares) share = Pick(0, 1000);
    shares[0] += 1;
    const std::vector<Box> parts = CutByShares(cut.shape, cut.box, shares);
    RC_ASSERT(parts.size() == shares.size());
    AssertConsecutive(cut.box, parts);
  });
}

TEST(PiecesTest, CutsOfFlatTensorsFallOnBlocksOfTheNorm) {
  ForAll(3000, [] {
    const Extents shape = {Pick(1, 200000), 64 * Pick(1, 64)};
    std::vector<int64_t> shares(Pick(1, 16), 1);
    for (const Box& part : CutByShares(shape, WholeBox(shape), shares)) {
      if (!Empty(part)) RC_ASSERT(FlatIndex(shape, part.begin) % kPieceCut == 0);
    }
    for (const Box& part : CutBox(shape, WholeBox(shape), kPieceElementsMax)) {
      RC_ASSERT(FlatIndex(shape, part.begin) % kPieceCut == 0);
    }
  });
}

TEST(PiecesTest, AVectorIsCutExactlyAtBlocks) {
  const std::vector<Box> parts = CutByShares({1'000'000}, WholeBox({1'000'000}), {1, 1, 2});
  EXPECT_EQ(parts[0].end[0] % kPieceCut, 0);
  EXPECT_EQ(parts[1].end[0] % kPieceCut, 0);
  EXPECT_NEAR(static_cast<double>(parts[0].end[0]), 250'000, kPieceCut / 2.0);
}

TEST(PiecesTest, OddWidthsAreCutBetweenRowsRatherThanLeftToOneLane) {
  const Extents shape = {50000, 1281};
  const std::vector<Box> parts = CutByShares(shape, WholeBox(shape), {1, 1, 1, 1});
  for (const Box& part : parts) EXPECT_EQ(ShapeOf(part)[0], 12500);
}

TEST(PiecesTest, ARowLargerThanAPieceIsCutWithinTheRow) {
  const Extents shape = {2, 3 * kPieceElementsMax};
  const std::vector<Box> parts = CutBox(shape, WholeBox(shape), kPieceElementsMax);
  EXPECT_EQ(parts.size(), 6);
}

}  // namespace
}  // namespace dmuond::scheduler
