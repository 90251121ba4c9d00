#include "scheduler/shown.h"

#include <gtest/gtest.h>

#include <string>

namespace dmuond::scheduler {
namespace {

TEST(ShownTest, OrdinaryTextStaysAsItIs) {
  for (const char* text : {"", "model.layers.0.weight", "a \"b\" \\ c", "gr\u00fc\u00dfe",
                           "\u6743\u91cd", "\U0001f600"}) {
    EXPECT_EQ(Shown(text), text);
    EXPECT_TRUE(IsPlain(text));
  }
}

TEST(ShownTest, WhatCommandsATerminalOrEndsALineIsEscaped) {
  EXPECT_EQ(Shown("\x1b]0;title\x07"), "\\u001b]0;title\\u0007");
  EXPECT_EQ(Shown("two\r\nlines\t"), "two\\r\\nlines\\t");
  EXPECT_EQ(Shown("\x7f\u0085\u009b\u2028\u202e\u2066\u200f\ufeff"),
            "\\u007f\\u0085\\u009b\\u2028\\u202e\\u2066\\u200f\\ufeff");
  EXPECT_FALSE(IsPlain("a\nb"));
  EXPECT_FALSE(IsPlain("\u009b"));
}

TEST(ShownTest, BytesThatAreNoUtf8AreReplacedOneByOne) {
  EXPECT_EQ(Shown("a\xff-b"), "a\\ufffd-b");
  EXPECT_EQ(Shown("\xe2\x82"), "\\ufffd\\ufffd");             // cut short
  EXPECT_EQ(Shown("\xc0\xaf"), "\\ufffd\\ufffd");             // overlong
  EXPECT_EQ(Shown("\xed\xa0\x80"), "\\ufffd\\ufffd\\ufffd");  // half of a surrogate pair
  EXPECT_EQ(Shown("\xf4\x90\x80\x80").size(), 4 * 6);         // beyond Unicode
  EXPECT_FALSE(IsPlain("\x80"));
}

TEST(ShownTest, LongTextIsCutBetweenCharactersAndItsLengthIsSaid) {
  EXPECT_EQ(Shown("abcdef", 6), "abcdef");
  EXPECT_EQ(Shown("abcdefg", 6), "abcdef... (7 bytes)");
  EXPECT_EQ(Shown("\u6743\u91cd\u6743", 4), "\u6743\u91cd... (9 bytes)");
  EXPECT_LT(Shown(std::string(40 << 20, '\n')).size(), 1100);
}

TEST(ShownTest, InQuotesQuotesAndBackslashesAreEscapedToo) {
  EXPECT_EQ(ShownInQuotes("a \"b\" \\n\n"), R"(a \"b\" \\n\n)");
}

}  // namespace
}  // namespace dmuond::scheduler
