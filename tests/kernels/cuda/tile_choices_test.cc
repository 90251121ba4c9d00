#include "kernels/cuda/tile_choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dmuond::kernels::cuda {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

const std::vector<TileTuner::Choice> kChoices = {
    {GemmType::kF16, GemmLayout::kNT, true, true, 0, {4096, 4096, 11008, 3}, GemmTile::k64, 7.5},
    {GemmType::kBF16, GemmLayout::kTN, false, false, 2, {64, 1, 8, 1}, GemmTile::k256, 0},
};

TEST(TileChoicesTest, WhatIsReadIsWhatWasWritten) {
  const std::vector<TileTuner::Choice> read = ChoicesOf(ToText(kChoices));
  ASSERT_THAT(read, SizeIs(2));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read[i].type, kChoices[i].type);
    EXPECT_EQ(read[i].layout, kChoices[i].layout);
    EXPECT_EQ(read[i].symmetric, kChoices[i].symmetric);
    EXPECT_EQ(read[i].same_operands, kChoices[i].same_operands);
    EXPECT_EQ(read[i].addends, kChoices[i].addends);
    EXPECT_EQ(read[i].sizes, kChoices[i].sizes);
    EXPECT_EQ(read[i].tile, kChoices[i].tile);
    EXPECT_EQ(read[i].microseconds, kChoices[i].microseconds);
  }
  EXPECT_THAT(ChoicesOf(""), IsEmpty());
}

TEST(TileChoicesTest, TextThatAnotherBuildHasWrittenCountsAsNone) {
  const std::string good = "1 1 1 1 0 64 64 64 1 4 2\n";
  ASSERT_THAT(ChoicesOf(good), SizeIs(1));
  for (const char* line :
       {"1 1 1 1 0 64 64 64 1 5 2", "1 1 1 1 0 64 64 64 1 0 2", "3 1 1 1 0 64 64 64 1 4 2",
        "1 5 1 1 0 64 64 64 1 4 2", "1 1 2 1 0 64 64 64 1 4 2", "1 1 1 1 3 64 64 64 1 4 2",
        "1 1 1 1 0 -64 64 64 1 4 2", "1 1 1 1 0 64 64 64 1 4", "1 1 1 1 0 64 64 64 1 4 2 2",
        "1 1 1 1 0 64 64 64 1 4 fast", "tile"}) {
    EXPECT_THAT(ChoicesOf(good + line), IsEmpty()) << line;
  }
  std::string many;
  for (size_t i = 0; i <= kTileChoicesMax; ++i) many += good;
  EXPECT_THAT(ChoicesOf(many), IsEmpty());
}

}  // namespace
}  // namespace dmuond::kernels::cuda
