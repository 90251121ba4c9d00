// The files of /proc and /sys here are copies of what kernels show, with other numbers.
#include "kernels/cpu/available_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace dmuond::kernels::cpu {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest() {
    Write(
        "proc/meminfo",
        "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n");
  }
  ~AvailableMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  [[nodiscard]] AvailableMemory Read() const { return ReadAvailableMemory("self", root_).value(); }

 private:
  static std::string MakeRoot() {
    std::string name = ::testing::TempDir() + "/available-XXXXXX";
    return ::mkdtemp(name.data());
  }
  const std::string root_ = MakeRoot();
};

TEST_F(AvailableMemoryTest, IsTheMachinesWhereNoCgroupLimitsIt) {
  EXPECT_EQ(Read().bytes, 16 * 1024 * kMiB) << "no cgroups at all";
  Write("proc/self/cgroup", "0::/system.slice/dmuond.service\n");
  Write("sys/fs/cgroup/system.slice/dmuond.service/memory.max", "max\n");
  Write("sys/fs/cgroup/system.slice/dmuond.service/memory.current", "123\n");
  EXPECT_EQ(Read().bytes, 16 * 1024 * kMiB);
  EXPECT_EQ(Read().limited_by, "");
}

TEST_F(AvailableMemoryTest, IsWhatTheCgroupLeavesWithoutFilesThatCanBeReadAgain) {
  Write("proc/self/cgroup", "0::/system.slice/dmuond.service\n");
  Write("sys/fs/cgroup/system.slice/dmuond.service/memory.max", "838860800\n");
  Write("sys/fs/cgroup/system.slice/dmuond.service/memory.current", "419430400\n");
  Write("sys/fs/cgroup/system.slice/dmuond.service/memory.stat",
        "anon 1000\nfile 209715200\nactive_file 52428800\ninactive_file 52428800\nshmem 7\n");
  EXPECT_EQ(Read().bytes, 500 * kMiB);
  EXPECT_EQ(Read().limit_bytes, 800 * kMiB);
  EXPECT_EQ(Read().Words(),
            "524288000 available of 838860800 "
            "(/sys/fs/cgroup/system.slice/dmuond.service/memory.max)");
}

TEST_F(AvailableMemoryTest, IsWhatTheNarrowestGroupAboveLeaves) {
  Write("proc/self/cgroup", "0::/kubepods/pod1/container\n");
  for (const auto& [group, limit] :
       {std::pair{"kubepods/pod1/container", 900 * kMiB}, std::pair{"kubepods/pod1", 700 * kMiB},
        std::pair{"kubepods", 8000 * kMiB}}) {
    const std::string folder = std::string("sys/fs/cgroup/") + group;
    Write(folder + "/memory.max", std::to_string(limit));
    Write(folder + "/memory.current", std::to_string(600 * kMiB));
  }
  EXPECT_EQ(Read().bytes, 100 * kMiB);
  EXPECT_EQ(Read().limited_by, "/sys/fs/cgroup/kubepods/pod1/memory.max");
}

TEST_F(AvailableMemoryTest, IsThatOfTheMountWhereAContainerSeesTheHostsPath) {
  Write("proc/self/cgroup", "12:cpuset:/docker/ab12\n4:memory:/docker/ab12\n0::/docker/ab12\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "838860800\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "104857600\n");
  Write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1048576\ninactive_file 9\n");
  EXPECT_EQ(Read().bytes, 701 * kMiB);
  EXPECT_EQ(Read().limited_by, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
}

TEST_F(AvailableMemoryTest, IsNothingInAGroupThatHasMoreThanItMay) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "1000\n");
  Write("sys/fs/cgroup/memory.current", "5000\n");
  EXPECT_EQ(Read().bytes, 0U);
  EXPECT_EQ(Read().limited_by, "/sys/fs/cgroup/memory.max");
}

TEST_F(AvailableMemoryTest, IsUnknownWithoutProc) {
  EXPECT_FALSE(ReadAvailableMemory("self", "/nonexistent").has_value());
}

}  // namespace
}  // namespace dmuond::kernels::cpu
