#include "server/common/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "nlohmann/json.hpp"
#include "scheduler/types.h"

namespace dmuond::server::log {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

std::string KeyValue(absl::string_view message, Fields fields) {
  return Render(Format::kKeyValue, Level::kInfo, message, fields);
}

class LogTest : public ::testing::Test {
 protected:
  // Lines come a little later.
  static std::string Captured() {
    Flush();
    return ::testing::internal::GetCapturedStderr();
  }

  ~LogTest() override {
    SetLevel(Level::kInfo);
    SetFormat(Format::kKeyValue);
  }
};

TEST_F(LogTest, FieldsAreKeyAndValue) {
  EXPECT_EQ(KeyValue("step committed", {{"job", "demo"},
                                        {"step", scheduler::StepId(7)},
                                        {"ok", true},
                                        {"norm", 1.5},
                                        {"bytes", int64_t{-1}}}),
            "level=info msg=\"step committed\" job=demo step=7 ok=true norm=1.5 bytes=-1");
}

TEST_F(LogTest, WhatCouldBeMisreadIsQuoted) {
  EXPECT_EQ(KeyValue("m", {{"a", ""}, {"b", "x=y"}, {"c", "two\nlines\x01"}, {"d", "q\"\\"}}),
            R"(level=info msg=m a="" b="x=y" c="two\nlines\u0001" d="q\"\\")");
}

TEST_F(LogTest, WhatOthersHaveWrittenCommandsNoTerminalAndFloodsNoFile) {
  EXPECT_EQ(KeyValue("m", {{"red", "\x1b[31m"}, {"c1", "\xc2\x9b"}, {"turned", "a\u202eb"}}),
            R"(level=info msg=m red="\u001b[31m" c1="\u009b" turned="a\u202eb")");
  EXPECT_EQ(
      KeyValue("m", {{"bytes", "a\xff"}, {"overlong", "\xc0\xaf"}, {"word", "gr\u00fc\u00dfe"}}),
      "level=info msg=m bytes=\"a\\ufffd\" overlong=\"\\ufffd\\ufffd\" word=gr\u00fc\u00dfe");
  const std::string line = KeyValue("m", {{"client", std::string(40 << 20, 'c')}});
  EXPECT_LT(line.size(), 5000);
  EXPECT_THAT(line, EndsWith("ccc... (41943040 bytes)\""));
}

TEST_F(LogTest, JsonIsValidWhateverIsInIt) {
  for (const char* text :
       {"\xff\xfe", "\x1b[2J", "\u2028", "\"\\", "\xed\xa0\x80", "\xf0\x9f\x98\x80"}) {
    const std::string object = "{" + Render(Format::kJson, Level::kInfo, text, {{"x", text}}) + "}";
    EXPECT_TRUE(nlohmann::json::accept(object)) << object;
  }
}

TEST_F(LogTest, JsonIsOneObjectALine) {
  ::testing::internal::CaptureStderr();
  SetFormat(Format::kJson);
  Warn("line\n\"two\"", {{"job", "a=b"},
                         {"step", 3},
                         {"lost", false},
                         {"norm", std::numeric_limits<double>::quiet_NaN()}});
  const std::string text = Captured();
  const nlohmann::json line = nlohmann::json::parse(text);
  EXPECT_EQ(line["level"], "warn");
  EXPECT_EQ(line["msg"], "line\n\"two\"");
  EXPECT_EQ(line["job"], "a=b");
  EXPECT_EQ(line["step"], 3);
  EXPECT_EQ(line["lost"], false);
  EXPECT_EQ(line["norm"], "nan");
  EXPECT_THAT(line["time"].get<std::string>(), EndsWith("Z"));
}

TEST_F(LogTest, LineBeginsWithTheTime) {
  ::testing::internal::CaptureStderr();
  Info("hello", {});
  EXPECT_THAT(Captured(), MatchesRegex("time=....-..-..T..:..:..\\....Z level=info msg=hello\n"));
}

TEST_F(LogTest, LevelDropsWhatLiesBelow) {
  EXPECT_EQ(SetLevel(Level::kWarn), Level::kInfo);
  ::testing::internal::CaptureStderr();
  Info("quiet", {});
  Error("loud", {});
  const std::string text = Captured();
  EXPECT_THAT(text, Not(HasSubstr("quiet")));
  EXPECT_THAT(text, HasSubstr("level=error msg=loud"));
  EXPECT_EQ(SetLevel(Level::kInfo), Level::kWarn);
}

TEST_F(LogTest, NamesOfLevelsAndFormatsParse) {
  for (const Level level :
       {Level::kTrace, Level::kDebug, Level::kInfo, Level::kWarn, Level::kError}) {
    EXPECT_EQ(*ParseLevel(Name(level)), level);
  }
  EXPECT_THAT(std::string(ParseLevel("loud").status().message()), HasSubstr("'loud'"));
  EXPECT_EQ(*ParseFormat("json"), Format::kJson);
  EXPECT_THAT(std::string(ParseFormat("xml").status().message()), HasSubstr("'xml'"));
}

TEST_F(LogTest, RelayedLineKeepsItsLevelAndGetsFields) {
  ::testing::internal::CaptureStderr();
  Relay("time=2031-01-02T03:04:05.678Z level=error msg=\"no memory\" unit=4", {{"lane", 2}});
  Relay("OpenBLAS says hello", {{"lane", 2}});
  Relay("time=soon", {{"lane", 2}});
  const std::string text = Captured();
  EXPECT_THAT(text, HasSubstr("Z level=error msg=\"no memory\" unit=4 lane=2\n"));
  EXPECT_THAT(text, HasSubstr("level=warn msg=\"OpenBLAS says hello\" lane=2\n"));
  EXPECT_THAT(text, HasSubstr("level=warn msg=\"time=soon\" lane=2\n"));
  EXPECT_THAT(text, Not(HasSubstr("03:04:05")));
}

TEST_F(LogTest, RelayedObjectKeepsItsFieldsAndTheirTypes) {
  ::testing::internal::CaptureStderr();
  SetFormat(Format::kJson);
  Relay(R"({"time":"2031-01-02T03:04:05.678Z","level":"debug","msg":"dropped"})", {{"lane", 2}});
  Relay(R"({"time":"2031-01-02T03:04:05.678Z","level":"error","msg":"no \"memory\"","unit":4})",
        {{"lane", 2}});
  const nlohmann::json line = nlohmann::json::parse(Captured());
  EXPECT_EQ(line["level"], "error");
  EXPECT_EQ(line["msg"], "no \"memory\"");
  EXPECT_EQ(line["unit"], 4);
  EXPECT_EQ(line["lane"], 2);
  EXPECT_THAT(line["time"].get<std::string>(), Not(HasSubstr("03:04:05")));
}

TEST_F(LogTest, RelayedLineThatIsNoObjectIsAWarningWhereObjectsAreWritten) {
  SetFormat(Format::kJson);
  for (const char* text :
       {R"({"time":"x","level":"info","msg":"cut)", R"({"time":"x","level":"loud"})",
        R"({"time":"x)", "time=x level=info msg=other"}) {
    ::testing::internal::CaptureStderr();
    Relay(text, {{"lane", 2}});
    const nlohmann::json line = nlohmann::json::parse(Captured());
    EXPECT_EQ(line["level"], "warn");
    EXPECT_EQ(line["msg"], text);
    EXPECT_EQ(line["lane"], 2);
  }
}

TEST_F(LogTest, RelayedLineWithACommandForTheTerminalIsEscapedAsAWhole) {
  ::testing::internal::CaptureStderr();
  Relay("time=x level=info msg=\x1b[2J", {{"lane", 2}});
  EXPECT_THAT(Captured(), EndsWith("level=warn msg=\"time=x level=info msg=\\u001b[2J\" lane=2\n"));
}

TEST_F(LogTest, RelayedLineBelowTheLevelIsDropped) {
  SetLevel(Level::kWarn);
  ::testing::internal::CaptureStderr();
  Relay("time=x level=info msg=quiet", {{"lane", 2}});
  EXPECT_EQ(Captured(), "");
}

}  // namespace
}  // namespace dmuond::server::log
