// main() of the lanes' tests on the fake driver: their lanes are dmuond-lane-fake, one device each,
// state, staging and arenas are memory of these devices.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "kernels/cpu/cpu_memory.h"
#include "kernels/cuda/cuda_memory.h"
#include "tests/server/lane/harness.h"

namespace dmuond::server::lane::testing {
namespace {

// Seen by the test through a door that a real driver does not have.
Held Allocate(size_t bytes, int32_t lane) {
  Held held;
  auto holder = kernels::cuda::CudaMemoryHolder::Create(lane);
  EXPECT_TRUE(holder.ok()) << holder.status();
  auto fd = (*holder)->Allocate(bytes, "test");
  EXPECT_TRUE(fd.ok()) << fd.status();
  held.fd = *std::move(fd);
  const std::string path = "/proc/self/fd/" + std::to_string(held.fd.get());
  const wire::UniqueFd writable(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  auto mapping = kernels::cpu::MapShared(writable.get(), bytes);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  held.mapping = *std::move(mapping);
  return held;
}

int64_t LinesOf(const std::string& path) {
  std::ifstream file(path);
  return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
}

// Nothing may be unmapped under queued work, or the driver ends the lane by a signal.
TEST(LaneOnFakeCudaTest, EndsWithWorkQueued) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("lane_log_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  ::setenv("FAKE_CUDA_LOG", folder.c_str(), 1);
  ::setenv("FAKE_CUDA_DELAY_US", "20000", 1);
  for (const bool decided : {false, true}) {
    scheduler::testing::World world(2, 1, 1);
    for (int i = 0; i < 16; ++i) {
      world.Replicate(scheduler::testing::Muon("w" + std::to_string(i), {96, 64}));
    }
    Cluster cluster(world, 1, 1, {.bucket_bytes = 1024});
    cluster.Push();
    cluster.Open();
    const auto work_goes_on = [&folder, before = LinesOf(folder / "device-0.log")] {
      return LinesOf(folder / "device-0.log") > before;
    };
    for (const int32_t rank : {0, 1}) {
      cluster.SignalReady(rank);
      cluster.Submit(rank);
    }
    cluster.PumpUntil(work_goes_on);
    if (decided) {
      cluster.WaitGathered();
      const int64_t gathered = LinesOf(folder / "device-0.log");
      cluster.Decide(scheduler::Verdict::kCommit);
      cluster.PumpUntil([&] { return LinesOf(folder / "device-0.log") > gathered; });
    }
    EXPECT_EQ(cluster.Shutdown(0), 0);
  }
  ::unsetenv("FAKE_CUDA_LOG");
  ::unsetenv("FAKE_CUDA_DELAY_US");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace dmuond::server::lane::testing

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  ::setenv("FAKE_CUDA_DEVICES", "4", 0);
  dmuond::server::lane::testing::OtherDevice() = {
      "dmuond-lane-fake", [](int32_t lane) { return "cuda:" + std::to_string(lane); },
      dmuond::server::lane::testing::Allocate};
  return RUN_ALL_TESTS();
}
