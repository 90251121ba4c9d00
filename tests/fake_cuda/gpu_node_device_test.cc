// A daemon learns from driver and kernel which processors are near a GPU, before it starts a lane.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/daemon/memory/node_device.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/server/daemon/support.h"

namespace dmuond::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
  EXPECT_THAT((*device)->Uuids(),
              ::testing::ElementsAre(FakeMachine::Uuid(1), FakeMachine::Uuid(0)));
  EXPECT_EQ((*device)->ProcessorsNear(scheduler::LaneIndex(0)), "2-3,6-7");
  EXPECT_EQ((*device)->ProcessorsNear(scheduler::LaneIndex(1)), "");
}

std::string In(const server::NodeDevice::Variables& variables, const std::string& name) {
  for (const auto& [has, value] : variables) {
    if (has == name) return value;
  }
  return "not there";
}

TEST(GpuNodeDeviceTest, LanesOfAGroupHearOfHostAndInterfaceUnlessTheUserHasSaid) {
  const FakeMachine machine(2);
  const server::TempDir folder;
  const auto devices = server::ParseDevices("cuda:2", 8);
  ASSERT_TRUE(devices.ok()) << devices.status();
  const auto variables = [&](const std::string& rail_address) {
    const auto device = server::OpenNodeDevice(
        *devices, {.no_mps_folder = folder.path() + "/no-mps", .rail_address = rail_address});
    EXPECT_TRUE(device.ok()) << device.status();
    return (*device)->OfLaneEnvironment();
  };
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  EXPECT_EQ(In(variables("127.0.0.1"), "NCCL_HOSTID"), boot_id);
  EXPECT_EQ(In(variables("127.0.0.1"), "NCCL_SOCKET_IFNAME"), "=lo");
  EXPECT_EQ(In(variables("127.0.1.1"), "NCCL_SOCKET_IFNAME"), "=lo");
  EXPECT_EQ(In(variables(""), "NCCL_SOCKET_IFNAME"), "not there");
  const server::NodeDeviceOptions elsewhere = {.no_mps_folder = folder.path() + "/no-mps",
                                               .rail_address = "192.0.2.1"};  // nobody's
  EXPECT_THAT(std::string(server::OpenNodeDevice(*devices, elsewhere).status().message()),
              AllOf(HasSubstr("192.0.2.1"), HasSubstr("NCCL_SOCKET_IFNAME")));
  Environment said;
  said.Set("NCCL_HOSTID", "rack 7");
  said.Set("NCCL_SOCKET_IFNAME", "ib");
  for (const char* name : {"NCCL_HOSTID", "NCCL_SOCKET_IFNAME"}) {
    EXPECT_EQ(In(variables("192.0.2.1"), name), "not there");
  }
}

}  // namespace
}  // namespace dmuond::testing
