// A daemon learns from driver and kernel which processors are near a GPU, before it starts a lane.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/daemon/memory/node_device.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/server/daemon/support.h"

namespace dmuond::testing {
namespace {

TEST(GpuNodeDeviceTest, LanesRunNearTheirDeviceWhereTheKernelSaysWhatIs) {
  const FakeMachine machine(2);
  const server::TempDir folder;
  // As the kernel writes the address; the driver has upper case.
  const std::filesystem::path of_second = std::filesystem::path(folder.path()) / "00f0:01:00.0";
  std::filesystem::create_directory(of_second);
  std::ofstream(of_second / "local_cpulist") << "2-3,6-7\n";
  const auto devices = server::ParseDevices("cuda:1,0", 8);
  ASSERT_TRUE(devices.ok()) << devices.status();
  const auto device = server::OpenNodeDevice(
      *devices, {.no_mps_folder = folder.path() + "/no-mps", .pci_devices = folder.path()});
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->OfLane(scheduler::LaneIndex(0)), "cuda:1");
  EXPECT_EQ((*device)->ProcessorsNear(scheduler::LaneIndex(0)), "2-3,6-7");
  EXPECT_EQ((*device)->ProcessorsNear(scheduler::LaneIndex(1)), "");
}

}  // namespace
}  // namespace dmuond::testing
