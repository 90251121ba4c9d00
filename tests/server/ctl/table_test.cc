#include "server/ctl/table.h"

#include "gtest/gtest.h"

namespace dmuond::server::ctl {
namespace {

TEST(TableTest, ColumnsAreAlignedAndNothingTrails) {
  Table table({"name", ">bytes", "why"});
  table.Add({"w", "1024", "2-D"});
  table.Add({"long name", "7", ""});
  EXPECT_EQ(table.Text(),
            "name       bytes  why\n"
            "w           1024  2-D\n"
            "long name      7\n");
}

TEST(TableTest, WidthIsInCharacters) {
  Table table({"a", "b"});
  table.Add({"…", "x"});
  table.Add({"ab", "y"});
  EXPECT_EQ(table.Text(), "a   b\n…   x\nab  y\n");
}

TEST(TableTest, WhatOthersHaveWrittenNeitherCommandsTheTerminalNorMakesRows) {
  Table table({"name", "client"});
  table.Add({"a\nb", "\x1b[2J"});
  EXPECT_EQ(table.Text(),
            "name  client\n"
            "a\\nb  \\u001b[2J\n");
}

TEST(TableTest, NumbersForPeople) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(int64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(HumanMicroseconds(12.4), "12 us");
  EXPECT_EQ(HumanMicroseconds(1500), "1.5 ms");
  EXPECT_EQ(HumanMicroseconds(2.5e6), "2.50 s");
  EXPECT_EQ(HumanSeconds(59), "59s");
  EXPECT_EQ(HumanSeconds(61), "1m 01s");
  EXPECT_EQ(HumanSeconds(7260), "2h 01m");
  EXPECT_EQ(HumanPercent(0.0123), "1.23 %");
}

}  // namespace
}  // namespace dmuond::server::ctl
