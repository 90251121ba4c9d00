// The cost table as a file.
#include "server/cost_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

namespace dmuond::server {
namespace {

std::string Path(const std::string& name) { return testing::TempDir() + "/" + name; }

TEST(CostFileTest, ATableIsReadAsItWasWritten) {
  scheduler::CostTable table;
  table.device = "cuda NVIDIA H200 sms=132";
  table.entries = {{{4096, 14336}, 1, 4280.5}, {{4096, 14336, {5, 5}}, 4, 17000.25}};
  table.choices = {{4096, 4096, scheduler::ElementType::kF16, 1, 1}};
  table.launch_us = 12;
  const std::string path = Path("costs.txt");
  ASSERT_TRUE(WriteCostTable(table, path).ok());
  const absl::StatusOr<scheduler::CostTable> read = ReadCostTable(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->device, table.device);
  ASSERT_EQ(read->entries.size(), 2U);
  EXPECT_EQ(read->entries[0].matrix, table.entries[0].matrix);
  EXPECT_EQ(read->entries[1].matrix, table.entries[1].matrix);
  EXPECT_EQ(read->entries[1].batch, 4);
  EXPECT_EQ(read->entries[1].microseconds, 17000.25);
  EXPECT_EQ(read->launch_us, 12);
  const std::vector<kernels::KernelChoice> choices = ToChoices(*read);
  ASSERT_EQ(choices.size(), 1U);
  EXPECT_EQ(choices[0].rows, 4096);
  EXPECT_EQ(choices[0].dtype, kernels::DType::kF16);
  EXPECT_EQ(choices[0].engine, kernels::ProductEngine::kOwn);
  EXPECT_EQ(choices[0].form, kernels::NewtonSchulzForm::kStandard);
}

TEST(CostFileTest, EntriesThatNameNoIterationAreOfTheDefaultPresets) {
  const std::string path = Path("old.txt");
  std::ofstream(path) << "entries { rows: 64 cols: 128 batch: 1 microseconds: 20 }\n";
  const absl::StatusOr<scheduler::CostTable> read = ReadCostTable(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->entries[0].matrix, (scheduler::MatrixKind{64, 128}));
}

TEST(CostFileTest, NumbersThatCannotBeAreNamedBeforeAnythingIsPlannedWithThem) {
  const auto mistake = [](const std::string& text) {
    const std::string path = Path("impossible.txt");
    std::ofstream(path) << "entries { rows: 64 cols: 128 batch: 1 microseconds: 20 }\n" << text;
    const absl::Status status = ReadCostTable(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(status.message());
  };
  using testing::HasSubstr;
  EXPECT_THAT(mistake("entries { rows: 64 cols: 0 batch: 1 microseconds: 20 }"),
              HasSubstr("impossible.txt: entry 2 (64 x 0, batch 1, 20 us"));
  EXPECT_THAT(mistake("entries { rows: 64 cols: 64 batch: 1 microseconds: nan }"),
              HasSubstr("entry 2"));
  EXPECT_THAT(mistake("entries { rows: 64 cols: 64 batch: 1 microseconds: 1e300 }"),
              HasSubstr("entry 2"));
  EXPECT_THAT(mistake("tflops: inf"), HasSubstr("tflops inf"));
  EXPECT_THAT(mistake("launch_us: -1"), HasSubstr("launch_us -1"));
  EXPECT_THAT(mistake("choices { rows: 64 cols: 64 engine: 257 }"),
              HasSubstr("choice 1 (64 x 64, dtype 0, engine 257"));
}

TEST(CostFileTest, AWrongFileIsNamedWithItsLine) {
  const std::string path = Path("wrong.txt");
  std::ofstream(path) << "device: \"x\"\nentries { rows: many }\n";
  const absl::Status status = ReadCostTable(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("wrong.txt:2:"));
  EXPECT_EQ(ReadCostTable(Path("absent.txt")).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace dmuond::server
