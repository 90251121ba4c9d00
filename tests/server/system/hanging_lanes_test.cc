// Lanes that are stopped for ever: the daemon finds them out, kills and replaces them, and the run
// is the undisturbed one bit for bit. At every point of a step: tests/faults/matrix.py --kind hang.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "base/unique_fd.h"
#include "tests/client/daemon_group.h"
#include "tests/client/example_runs.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

class HangingLanesTest : public ExampleRuns {
 protected:
  void StartGroup(int nodes, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = {"--lane_timeout=2s", "--step_timeout=60s",
                                      "--register_timeout=30s", "--session_linger=60s"};
    flags.insert(flags.end(), more.begin(), more.end());
    StartDaemons(nodes, "cpu:2", flags);
  }
  v1::GetStatusReply Status(int node) { return DaemonStatus(daemon(node).address()).Get(); }
  pid_t LanePid(int node, int lane) {
    const v1::GetStatusReply status = Status(node);
    return lane < status.lanes_size() ? static_cast<pid_t>(status.lanes(lane).pid()) : 0;
  }
  void Hang(int node, int lane, const Trainer& trainer, size_t steps) {
    WaitForSteps(trainer, steps);
    const pid_t pid = LanePid(node, lane);
    ASSERT_GT(pid, 0);
    const size_t before = Steps(trainer.output).size();
    ASSERT_EQ(::kill(pid, SIGSTOP), 0);
    WaitForSteps(trainer, before + 2);
    EXPECT_TRUE(absl::StrContains(daemon(node).Log(), absl::StrCat("pid=", pid, " awaited=")))
        << pid;
  }
  void ExpectUndisturbed(std::vector<Trainer>& trainers, const std::vector<Lines>& expected) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ExpectEnd(trainers[rank]);
      EXPECT_EQ(Steps(trainers[rank].output), expected[rank]);
    }
  }
  // One of the last node, then one of the first.
  void ExpectReplaced(int nodes) {
    StartGroup(nodes);
    const std::vector<Lines> expected = Undisturbed();
    std::vector<Trainer> trainers = StartAll();
    Hang(nodes - 1, 0, trainers[0], 20);
    Hang(0, 1, trainers[0], 60);
    ExpectUndisturbed(trainers, expected);
    ExpectDaemonsLeave();
  }
};

TEST_F(HangingLanesTest, OfOneDaemonAreReplaced) { ExpectReplaced(1); }

TEST_F(HangingLanesTest, OfAGroupAreReplaced) { ExpectReplaced(2); }

TEST_F(HangingLanesTest, ASuccessorThatHangsWhileTheGroupFormsAnewIsReplacedToo) {
  StartGroup(1);
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  const pid_t first = LanePid(0, 0);
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  pid_t successor = 0;
  ASSERT_TRUE(Until([&] {
    successor = LanePid(0, 0);
    return successor != 0 && successor != first;
  }));
  ASSERT_EQ(::kill(successor, SIGSTOP), 0);
  ExpectUndisturbed(trainers, expected);
  EXPECT_TRUE(absl::StrContains(daemon().Log(), "lane hangs and is killed"));
  ExpectDaemonsLeave();
}

// All that comes to the TCP connections of a process is dropped from now on, what acknowledges its
// own bytes, too: as by a firewall, or a cable.
void DropWhatComesTo(pid_t pid) {
  const wire::UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  ASSERT_TRUE(process.valid());
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog filter{1, &drop};
  int connections = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    const int theirs = std::stoi(entry.path().filename());
    const wire::UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), theirs, 0)));
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    if (!fd.valid() || ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.ss_family != AF_INET) {
      continue;
    }
    ++connections;
    ASSERT_EQ(::setsockopt(fd.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)), 0);
  }
  EXPECT_EQ(connections, 1) << "of a rail of two nodes";
}

TEST_F(HangingLanesTest, ANodeThatIsNotHeardOnARailAnyMoreCountsAsGone) {
  StartGroup(2, {"--rail_timeout=4s"});
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  const size_t before = Steps(trainers[0].output).size();
  const auto silent = std::chrono::steady_clock::now();
  ASSERT_NO_FATAL_FAILURE(DropWhatComesTo(LanePid(1, 0)));
  EXPECT_TRUE(DaemonStatus(daemon(1).address()).WaitFor([](const v1::GetStatusReply& status) {
    return status.lanes_size() > 0 && status.lanes(0).rail_silent_ms() >= 2000;
  }));
  WaitForSteps(trainers[0], before + 3);
  EXPECT_LT(std::chrono::steady_clock::now() - silent, std::chrono::seconds(20));
  ExpectUndisturbed(trainers, expected);
  const std::string log = daemon(0).Log() + daemon(1).Log();
  EXPECT_TRUE(absl::StrContains(log, "the rail carries nothing, though it should")) << log;
  EXPECT_TRUE(absl::StrContains(log, "Connection timed out")) << log;
  ExpectDaemonsLeave();
}

TEST_F(HangingLanesTest, ThreeInOneStepParkTheJobAndItGoesOnWithOthers) {
  StartGroup(1);
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  // On a busy machine one may be through its step before it is stopped; then it is three of a later
  // one.
  pid_t last = 0;
  ASSERT_TRUE(Until([&] {
    if (Status(0).job().state() == "parked") return true;
    const pid_t pid = LanePid(0, 0);
    if (pid != 0 && pid != last && ::kill(pid, SIGSTOP) == 0) last = pid;
    return false;
  }));
  EXPECT_TRUE(absl::StrContains(daemon().Log(), "the job is parked"));
  EXPECT_TRUE(absl::StrContains(daemon().Log(), "it hung and was killed"));
  EXPECT_TRUE(absl::StrContains(daemon().Log(), "3 times"));
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

// Its daemon beats on meanwhile, though it ends by SIGKILL alone, after 6 s.
TEST(DepartingLaneTest, OneThatDoesNotEndWithItsJobKeepsNoDaemonFromItsGroup) {
  auto group = testing::StartGroup(2, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  DaemonStatus status((*group)[1]->address());
  const uint32_t epoch = status.Get().epoch();
  pid_t lane = 0;
  {
    SnapshotWorld world({(*group)[0]->address(), (*group)[1]->address()}, {.ranks = 2});
    const absl::Status started = world.Start();
    ASSERT_TRUE(started.ok()) << started;
    ASSERT_TRUE(world.StepUntil(2));
    lane = static_cast<pid_t>(status.Get().lanes(0).pid());
    ASSERT_EQ(::kill(lane, SIGSTOP), 0);
    world.Close();
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (::kill(lane, 0) == 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    ASSERT_EQ(status.Get().epoch(), epoch);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // between two looks
  }
  EXPECT_TRUE(absl::StrContains((*group)[1]->Log(), "follows=SIGKILL"));
  EXPECT_EQ(status.Get().epoch(), epoch);
}

}  // namespace
}  // namespace dmuond::testing
