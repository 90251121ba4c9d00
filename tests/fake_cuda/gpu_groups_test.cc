// Jobs on the GPUs of several nodes: daemons of one group on one fake machine, each with GPUs of
// its own, whose lanes exchange over the fake NCCL. Weights have the bits of the same job on one
// lane of the processor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/fake_cuda/gpu_trainers.h"
#include "tests/server/daemon/support.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/disk_driver.h"

namespace dmuond::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kDevices = 4;
constexpr int32_t kWorld = 4;

class GpuGroupsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (!HasFailure()) return;
    for (const auto& daemon : group_) std::cerr << daemon->Log();
  }
  // Nodes with the machine's devices in their order; none sees those of another.
  void StartNodes(int nodes, int lanes) {
    group_.clear();
    const std::string coordinator = FreeAddress();
    for (int node = 0; node < nodes; ++node) {
      std::vector<int> devices;
      for (int lane = 0; lane < lanes; ++lane) devices.push_back(node * lanes + lane);
      Environment own;
      own.Set("CUDA_VISIBLE_DEVICES", absl::StrJoin(devices, ","));
      std::vector<std::string> flags = GroupFlags(node, nodes, coordinator);
      flags.push_back(FakeMachine::LaneFlag());
      auto daemon = DaemonProcess::Start(
          {.devices = absl::StrCat("cuda:", lanes), .flags = std::move(flags), .wait_for = "live"});
      ASSERT_TRUE(daemon.ok()) << daemon.status();
      group_.push_back(*std::move(daemon));
    }
    for (const auto& daemon : group_) {
      const absl::Status ready = daemon->WaitServing("ready", std::chrono::seconds(30));
      ASSERT_TRUE(ready.ok()) << ready;
    }
  }
  // Every trainer computes on its own device, which is one of its node's lanes.
  Weights RunOnGpus(const std::function<void(int64_t)>& between = {}) {
    const auto per_node = kWorld / static_cast<int32_t>(group_.size());
    return RunJob(
        kWorld,
        [&](int32_t rank) {
          return std::make_unique<GpuTrainer>(group_[rank / per_node]->address(), rank, kWorld,
                                              rank);
        },
        between);
  }
  static Weights RunOnOneLane() {
    auto daemon = DaemonProcess::Start();
    EXPECT_TRUE(daemon.ok()) << daemon.status();
    return RunJob(kWorld, [&](int32_t rank) {
      return std::make_unique<Trainer>((*daemon)->address(), rank, kWorld);
    });
  }
  [[nodiscard]] pid_t LaneOf(int node, int lane) const {
    return static_cast<pid_t>(DaemonStatus(group_[node]->address()).Get().lanes(lane).pid());
  }

  FakeMachine machine_{kDevices};
  DaemonGroup group_;
};

TEST_F(GpuGroupsTest, TwoNodesOfTwoHaveTheBitsOfOneLane) {
  const Weights expected = RunOnOneLane();
  StartNodes(2, 2);
  EXPECT_EQ(RunOnGpus(), expected);
  for (const auto& daemon : group_) EXPECT_EQ(daemon->Stop(), 0);
}

TEST_F(GpuGroupsTest, FourNodesOfOneHaveTheBitsOfOneLane) {
  const Weights expected = RunOnOneLane();
  StartNodes(4, 1);
  EXPECT_EQ(RunOnGpus(), expected);
}

TEST_F(GpuGroupsTest, LanesTellNcclTheirHostAndInterface) {
  StartNodes(2, 2);
  RunOnGpus([&](int64_t) {
    for (int node = 0; node < 2; ++node) {
      std::ifstream file(absl::StrCat("/proc/", LaneOf(node, 1), "/environ"));
      const std::string environment(std::istreambuf_iterator<char>(file), {});
      EXPECT_THAT(environment,
                  AllOf(HasSubstr("NCCL_HOSTID="), HasSubstr("NCCL_SOCKET_IFNAME==lo")));
    }
  });
}

TEST_F(GpuGroupsTest, ALaneThatDiesCostsNoStep) {
  StartNodes(2, 2);
  const Weights expected = RunOnGpus();
  EXPECT_EQ(RunOnGpus([&](int64_t step) {
              if (step % 2 == 0) ::kill(LaneOf(step / 2 % 2, 1), SIGKILL);
            }),
            expected);
}

// Under MPS a process that is killed in the middle of a kernel takes the trainers on its device
// along, and a rail's kernel waits for a peer that is gone.
TEST_F(GpuGroupsTest, UnderMpsLanesEndWhatTheirRailWaitsFor) {
  StartNodes(2, 2);
  const Weights expected = RunOnGpus();
  group_.clear();
  const server::TempDir mps;
  std::ofstream(mps / "control") << "";
  machine_.Set("CUDA_MPS_PIPE_DIRECTORY", mps.path());
  machine_.Set("FAKE_CUDA_MPS", "1");
  std::atomic<pid_t> victim = 0;
  std::atomic<pid_t> peer = 0;
  std::atomic<bool> held = false;
  std::atomic<bool> peer_goes = false;
  const DiskDriver driver(
      absl::StrCat("/tmp/dmuond-driver-", ::getpid()),
      [&](pid_t pid, const std::string&) {
        if (pid == peer) peer_goes = true;
        if (pid != victim) return "go";
        held = true;
        return "hold";
      },
      "lane.collect.go");
  StartNodes(2, 2);
  std::thread killer;
  EXPECT_EQ(RunOnGpus([&](int64_t step) {
              if (step != 2) return;
              // Nothing of the next step goes before this rank submits it.
              peer = LaneOf(1, 1);
              victim = LaneOf(0, 1);
              killer = std::thread([&] {
                const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
                while ((!held || !peer_goes) && std::chrono::steady_clock::now() < end) {
                  ::usleep(1000);
                }
                EXPECT_TRUE(held && peer_goes);
                ::kill(victim, SIGKILL);
              });
            }),
            expected);
  killer.join();
  EXPECT_TRUE(group_[1]->WaitLogged("ends what its rail waits for")) << group_[1]->Log();
}

}  // namespace
}  // namespace dmuond::testing
