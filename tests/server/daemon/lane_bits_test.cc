#include "server/daemon/lanes/lane_bits.h"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(LaneBitsTest, TheLanesProgramSaysWhatDecidesItsBits) {
  const std::string lane =
      std::filesystem::read_symlink("/proc/self/exe").replace_filename("dmuond-lane");
  const auto bits = AskForBits(LaneBinary(lane), *MakeCpuNodeDevice(1), /*rails=*/true);
  ASSERT_TRUE(bits.ok()) << bits.status();
  EXPECT_EQ(bits->code().size(), 16);
  EXPECT_THAT(bits->library(), HasSubstr("OpenBLAS "));
  EXPECT_THAT(bits->functions(), HasSubstr("pow, log2 "));
  EXPECT_EQ(std::count_if(bits->modules().begin(), bits->modules().end(),
                          [](const auto& module) { return module.program(); }),
            1);
  EXPECT_NE(bits->core_type(), "");
}

// A file on NFS that is replaced stays for who has it open; O_PATH is no open file there.
TEST(LaneBitsTest, TheProgramIsAnOpenFile) {
  const LaneBinary binary("/bin/true");
  const auto file = binary.file();
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(::fcntl(*file, F_GETFL) & (O_PATH | O_ACCMODE), O_RDONLY);
}

TEST(LaneBitsTest, AProgramThatDoesNotIsNamedWithWhatItHasSaid) {
  const auto echo = AskForBits(LaneBinary("/bin/echo"), *MakeCpuNodeDevice(7), /*rails=*/true);
  EXPECT_THAT(std::string(echo.status().message()),
              AllOf(HasSubstr("/bin/echo --device=cpu:7"), HasSubstr("said: '--fd=3")));
  EXPECT_EQ(
      AskForBits(LaneBinary("/bin/false"), *MakeCpuNodeDevice(1), /*rails=*/true).status().code(),
      absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(AskForBits(LaneBinary("/nowhere/lane"), *MakeCpuNodeDevice(1), /*rails=*/true).ok());
}

}  // namespace
}  // namespace dmuond::server
