#include "scheduler/fragment_algebra.h"

#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using ::testing::ElementsAre;
using testing::ForAll;
using ::testing::IsEmpty;
using testing::Pick;

Box RandomBox(const Extents& shape) {
  Box box = WholeBox(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    box.begin[d] = Pick(0, shape[d]);
    box.end[d] = Pick(box.begin[d], shape[d]);
  }
  return box;
}

Extents RandomShape(int64_t dims_max, int64_t extent_max) {
  Extents shape(Pick(0, dims_max));
  for (int64_t& extent : shape) extent = Pick(1, extent_max);
  return shape;
}

void ForEachPoint(const Box& box, const std::function<void(const Box&)>& visit) {
  Box point = box;
  const std::function<void(size_t)> descend = [&](size_t d) {
    if (d == box.begin.size()) return visit(point);
    for (int64_t x = box.begin[d]; x < box.end[d]; ++x) {
      point.begin[d] = x;
      point.end[d] = x + 1;
      descend(d + 1);
    }
  };
  descend(0);
}

TEST(FragmentAlgebraTest, TwoBoxesThatOverlapAreFoundWhereThereAreSome) {
  ForAll(20000, [] {
    const Extents shape = RandomShape(3, 6);
    std::vector<Box> boxes;
    const int64_t count = Pick(0, 5);
    for (int64_t i = 0; i < count; ++i) boxes.push_back(RandomBox(shape));
    bool some = false;
    for (size_t i = 0; i < boxes.size(); ++i) {
      for (size_t j = 0; j < i; ++j) some = some || !Empty(Intersect(boxes[i], boxes[j]));
    }
    const auto found = FindOverlap(boxes);
    RC_ASSERT(found.has_value() == some);
    if (some) {
      RC_ASSERT(found->first < found->second);
      RC_ASSERT(!Empty(Intersect(boxes[found->first], boxes[found->second])));
    }
  });
}

TEST(FragmentAlgebraTest, EveryElementLiesInOneCellWithExactlyItsHolders) {
  ForAll(25000, [] {
    const Extents shape = RandomShape(3, 6);
    const Box within = RandomBox(shape);
    RC_PRE(!Empty(within));
    std::vector<Holding> holdings;
    const int64_t count = Pick(0, 6);
    for (int64_t i = 0; i < count; ++i) {
      holdings.push_back({RandomBox(shape), static_cast<int32_t>(i)});
    }
    const std::vector<HeldBox> held = GroupEqualBoxes(holdings);
    const auto cells = Arrange(within, held);
    RC_ASSERT(cells.ok());
    int64_t elements = 0;
    for (const ArrangedCell& cell : *cells) {
      RC_ASSERT(Contains(within, cell.box));
      elements += Elements(cell.box);
    }
    RC_ASSERT(elements == Elements(within));
    ForEachPoint(within, [&](const Box& point) {
      Indices holders;
      for (const Holding& h : holdings) {
        if (Contains(h.box, point)) holders.push_back(h.label);
      }
      int found = 0;
      for (const ArrangedCell& cell : *cells) {
        if (!Contains(cell.box, point)) continue;
        ++found;
        RC_ASSERT(LabelsOf(cell, held) == holders);
      }
      RC_ASSERT(found == 1);
    });
  });
}

TEST(FragmentAlgebraTest, UnionCoversWhatItsBoxesCoverOnce) {
  ForAll(10000, [] {
    const Extents shape = RandomShape(3, 6);
    const Box within = WholeBox(shape);
    std::vector<Box> boxes(Pick(0, 5));
    for (Box& box : boxes) box = RandomBox(shape);
    const auto merged = Union(within, boxes);
    RC_ASSERT(merged.ok());
    ForEachPoint(within, [&](const Box& point) {
      int held = 0;
      int found = 0;
      for (const Box& box : boxes) held += Contains(box, point) ? 1 : 0;
      for (const Box& box : *merged) found += Contains(box, point) ? 1 : 0;
      RC_ASSERT(found == (held > 0 ? 1 : 0));
    });
  });
}

TEST(FragmentAlgebraTest, NeighboursWithTheSameHoldersAreOneCell) {
  const std::vector<HeldBox> held =
      GroupEqualBoxes({{{{0, 0}, {8, 8}}, 3}, {{{0, 0}, {8, 8}}, 1}, {{{2, 0}, {2, 8}}, 7}});
  const auto cells = Arrange({{0, 0}, {8, 8}}, held);
  ASSERT_EQ(cells->size(), 1);
  EXPECT_THAT(LabelsOf(cells->front(), held), ElementsAre(1, 3));
}

TEST(FragmentAlgebraTest, WhatNobodyHoldsIsAHole) {
  const std::vector<HeldBox> held = GroupEqualBoxes({{{{0}, {3}}, 0}, {{{5}, {8}}, 1}});
  const auto cells = Arrange({{0}, {8}}, held);
  ASSERT_EQ(cells->size(), 3);
  EXPECT_EQ(ToString((*cells)[1].box), "[3:5]");
  EXPECT_THAT((*cells)[1].held, IsEmpty());
}

TEST(FragmentAlgebraTest, ScalarsHaveOneCell) {
  const std::vector<HeldBox> held = GroupEqualBoxes({{Box{}, 0}, {Box{}, 2}});
  const auto cells = Arrange(Box{}, held);
  ASSERT_EQ(cells->size(), 1);
  EXPECT_THAT(LabelsOf(cells->front(), held), ElementsAre(0, 2));
}

TEST(FragmentAlgebraTest, ThousandsOfRowShardsAreQuick) {
  std::vector<Holding> holdings(4096);
  for (int32_t i = 0; i < 4096; ++i) {
    const int64_t row = int64_t{4} * i;
    holdings[i] = {{{row, 0}, {row + 4, 64}}, i};
  }
  const auto cells = Arrange({{0, 0}, {16384, 64}}, GroupEqualBoxes(holdings));
  EXPECT_EQ(cells->size(), 4096);
}

TEST(FragmentAlgebraTest, BoxesThatFallApartIntoTooManyCellsAreRefused) {
  // Staggered diagonals: every box cuts every other one's rows and columns.
  std::vector<Holding> holdings(900);
  for (int32_t i = 0; i < 900; ++i) {
    holdings[i] = {{{i, 0}, {1800 - i, 900 + i}}, i};
  }
  const auto cells = Arrange({{0, 0}, {1800, 1800}}, GroupEqualBoxes(holdings));
  EXPECT_EQ(cells.status().code(), absl::StatusCode::kResourceExhausted) << cells->size();
}

}  // namespace
}  // namespace dmuond::scheduler
