#include "server/daemon/lanes/lane_process.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "kernels/cpu/core_type.h"
#include "server/common/errors.h"
#include "server/daemon/memory/node_device.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The programs of a build lie in one folder.
std::string FakeLane() {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename("fake_lane").string();
}

v1::LaneCommand Attach(int rank, size_t padding = 0) {
  v1::LaneCommand command;
  command.mutable_attach()->set_rank(rank);
  if (padding > 0) {
    command.mutable_attach()->add_arenas()->mutable_cuda_ipc()->set_handle(
        std::string(padding, 'p'));
  }
  return command;
}

class LaneProcessTest : public ::testing::Test {
 protected:
  void Start(const std::string& mode, std::chrono::milliseconds grace = kPatience) {
    const auto device = MakeCpuNodeDevice(/*threads=*/2);
    NodeDevice::Variables environment = device->OfLaneEnvironment();
    environment.emplace_back("FAKE_LANE", mode);
    environment.emplace_back("FAKE_WORD", "said");
    auto lane = LaneProcess::Start(
        {.binary = LaneBinary(FakeLane()),
         .lane_index = 3,
         .device = device->OfLane(scheduler::LaneIndex(3)),
         .environment = std::move(environment),
         .stop_grace = grace},
        {.on_report = [this](const v1::LaneReport& report,
                             const std::vector<UniqueFd>&) { reports_.Put(report); },
         .on_gone = [this](std::string last_words) { gone_.Put(std::move(last_words)); }});
    ASSERT_TRUE(lane.ok()) << lane.status();
    lane_ = *std::move(lane);
  }

  Inbox<v1::LaneReport> reports_;
  Inbox<std::string> gone_;
  std::unique_ptr<LaneProcess> lane_;
};

TEST_F(LaneProcessTest, CommandsAndDescriptorsArriveInOrder) {
  Start("");
  for (int rank = 0; rank < 100; ++rank) {
    UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
    const std::string text = "memory of " + std::to_string(rank);
    ASSERT_EQ(::write(memory.get(), text.data(), text.size()), text.size());
    ASSERT_TRUE(lane_->Send(Attach(rank), {memory.get()}).ok());
  }
  for (int rank = 0; rank < 100; ++rank) {
    const auto report = reports_.Take();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->attached().rank(), rank);
    EXPECT_EQ(report->attached().error(), "memory of " + std::to_string(rank));
  }
}

TEST_F(LaneProcessTest, SendDoesNotWaitForLaneThatReadsLate) {
  Start("wait");
  int gate[2];
  ASSERT_EQ(::pipe2(gate, O_CLOEXEC), 0);
  ASSERT_TRUE(lane_->Send(Attach(-1), {gate[0]}).ok());
  ::close(gate[0]);
  // Far more than a socket holds, with a descriptor now and then.
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::write(memory.get(), "late", 4), 4);
  for (int rank = 0; rank < 64; ++rank) {
    std::vector<int> fds;
    if (rank % 3 == 0) fds.push_back(memory.get());
    ASSERT_TRUE(lane_->Send(Attach(rank, 1 << 20), fds).ok());
  }
  EXPECT_EQ(reports_.size(), 0);
  ASSERT_EQ(::write(gate[1], "x", 1), 1);
  ::close(gate[1]);
  for (int rank = 0; rank < 64; ++rank) {
    const auto report = reports_.Take();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->attached().rank(), rank);
    EXPECT_EQ(report->attached().error(), rank % 3 == 0 ? "late" : "");
  }
}

TEST_F(LaneProcessTest, KeptCommandsGoInOrderWithTheNextAndWhenTheyAreSent) {
  Start("wait");
  int gate[2];
  ASSERT_EQ(::pipe2(gate, O_CLOEXEC), 0);
  ASSERT_TRUE(lane_->Send(Attach(-1), {gate[0]}).ok());
  ::close(gate[0]);
  // More than a socket holds, so that a write of many ends within one of them.
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::write(memory.get(), "sent", 4), 4);
  constexpr int kRanks = 1000;
  for (int rank = 0; rank < kRanks; ++rank) {
    const v1::LaneCommand command = Attach(rank, 1 + (rank * 37) % 5000);
    if (rank % 300 == 200) {
      ASSERT_TRUE(lane_->Send(command, {memory.get()}).ok());
    } else {
      ASSERT_TRUE(lane_->Keep(command).ok());
    }
  }
  lane_->SendKept();
  ASSERT_EQ(::write(gate[1], "x", 1), 1);
  ::close(gate[1]);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto report = reports_.Take();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->attached().rank(), rank);
    EXPECT_EQ(report->attached().error(), rank % 300 == 200 ? "sent" : "");
  }
}

TEST_F(LaneProcessTest, InheritsItsOwnDescriptorsAndTheCoreType) {
  const UniqueFd not_for_the_lane(::open("/dev/null", O_RDONLY));  // without O_CLOEXEC
  Start("inspect");
  const auto report = reports_.Take();
  ASSERT_TRUE(report.has_value());
  const char* own = std::getenv(kernels::cpu::kCoreTypeVariable);
  EXPECT_THAT(absl::StrSplit(report->ready().device(), '|'),
              ElementsAre("cpu:2", "0 1 2 3 4 ",
                          own != nullptr ? own : kernels::cpu::OpenBlasCoreType(), "said"));
}

TEST_F(LaneProcessTest, ExitCodeAndLastLineAreNamed) {
  Start("die");
  EXPECT_EQ(gone_.Take(), "exit code 1: the end");
  const absl::Status sent = lane_->Send(Attach(0));
  EXPECT_TRUE(absl::IsUnavailable(sent)) << sent;
  EXPECT_EQ(ReasonOf(sent), "LANE_LOST");
  EXPECT_THAT(std::string(sent.message()), HasSubstr("lane 3"));
  lane_->Stop();
  EXPECT_EQ(gone_.size(), 0) << "once";
}

TEST_F(LaneProcessTest, SignalIsNamed) {
  Start("kill");
  EXPECT_EQ(gone_.Take(), "killed by signal 9 (Killed)");
}

TEST_F(LaneProcessTest, KilledFromOutsideIsSeen) {
  Start("hang");
  ASSERT_TRUE(reports_.Take().has_value());
  ASSERT_EQ(::kill(lane_->pid(), SIGKILL), 0);
  const auto words = gone_.Take();
  ASSERT_TRUE(words.has_value());
  EXPECT_THAT(*words, StartsWith("killed by signal 9"));
}

TEST_F(LaneProcessTest, StopEndsItWithoutCallingBack) {
  Start("");
  const pid_t pid = lane_->pid();
  lane_->Stop();
  lane_->Stop();
  EXPECT_EQ(gone_.size(), 0);
  EXPECT_EQ(::kill(pid, 0), -1) << "gone and reaped";
}

TEST_F(LaneProcessTest, StopGoesOnToSignals) {
  for (const char* mode : {"hang", "stubborn"}) {
    Start(mode, std::chrono::milliseconds(20));
    ASSERT_TRUE(reports_.Take().has_value());
    const pid_t pid = lane_->pid();
    lane_->Stop();
    EXPECT_EQ(::kill(pid, 0), -1) << mode;
    EXPECT_EQ(gone_.size(), 0);
  }
}

TEST_F(LaneProcessTest, ItsEndNeedNotBeWaitedFor) {
  Start("hang");
  ASSERT_TRUE(reports_.Take().has_value());
  ASSERT_EQ(::kill(lane_->pid(), SIGSTOP), 0);
  lane_->BeginStop();
  EXPECT_FALSE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now())) << "both have waited";
  lane_->Kill();
  EXPECT_TRUE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now() + kPatience));
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(LaneProcessTest, AfterBeginStopTheSignalsFollowByThemselves) {
  Start("hang", std::chrono::milliseconds(20));
  ASSERT_TRUE(reports_.Take().has_value());
  ASSERT_EQ(::kill(lane_->pid(), SIGSTOP), 0);
  lane_->BeginStop();
  EXPECT_TRUE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now() + kPatience));
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(LaneProcessTest, AReleasedProcessHasOtherWorkAndAnotherListener) {
  Start("");
  const pid_t pid = lane_->pid();
  EXPECT_FALSE(lane_->Reuse({})) << "it is at work";
  ASSERT_TRUE(lane_->Send(Attach(1)).ok());
  ASSERT_TRUE(reports_.Take().has_value());
  // Its answer to this command reaches no listener, because the process is being released.
  ASSERT_TRUE(lane_->Keep(Attach(2)).ok());
  lane_->Release(kPatience);
  ASSERT_TRUE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now() + kPatience));
  ASSERT_TRUE(lane_->released());
  Inbox<v1::LaneReport> others;
  ASSERT_TRUE(
      lane_->Reuse({.on_report = [&](const v1::LaneReport& report,
                                     const std::vector<UniqueFd>&) { others.Put(report); },
                    .on_gone = [this](std::string words) { gone_.Put(std::move(words)); }}));
  EXPECT_FALSE(lane_->released());
  ASSERT_TRUE(lane_->Send(Attach(3)).ok());
  const auto report = others.Take();
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->attached().rank(), 3);
  EXPECT_EQ(reports_.size(), 0);
  EXPECT_EQ(lane_->pid(), pid);
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  EXPECT_TRUE(gone_.Take().has_value());
  EXPECT_FALSE(lane_->Reuse({}));
  lane_.reset();
}

TEST_F(LaneProcessTest, OneThatDoesNotLetGoIsKilled) {
  Start("hang");
  ASSERT_TRUE(reports_.Take().has_value());
  lane_->Release(std::chrono::milliseconds(20));
  EXPECT_TRUE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now() + kPatience));
  EXPECT_FALSE(lane_->released());
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(LaneProcessTest, AReleasedProcessEndsWhenItIsToldTo) {
  Start("");
  lane_->Release(kPatience);
  ASSERT_TRUE(lane_->WaitUntilAtRest(std::chrono::steady_clock::now() + kPatience));
  const pid_t pid = lane_->pid();
  lane_->Stop();
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(LaneProcessTest, StoppedProcessIsKilled) {
  Start("hang", std::chrono::milliseconds(20));
  ASSERT_TRUE(reports_.Take().has_value());
  ASSERT_EQ(::kill(lane_->pid(), SIGSTOP), 0);
  lane_->Stop();
  EXPECT_EQ(::kill(lane_->pid(), 0), -1);
}

TEST_F(LaneProcessTest, LaneThatSpeaksNonsenseIsKilled) {
  Start("garbage");
  const auto words = gone_.Take();
  ASSERT_TRUE(words.has_value());
  EXPECT_THAT(*words, StartsWith("killed by signal 9"));
}

TEST_F(LaneProcessTest, LaneThatMissesACommandIsKilled) {
  Start("");
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{static_cast<rlim_t>(memory.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status sent = lane_->Send(Attach(1), {memory.get()});
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(sent)) << sent;
  const auto words = gone_.Take();
  ASSERT_TRUE(words.has_value());
  EXPECT_THAT(*words, HasSubstr("Too many open files"));
}

TEST_F(LaneProcessTest, LaneWithoutSocketIsKilled) {
  Start("close", std::chrono::milliseconds(20));
  const auto words = gone_.Take();
  ASSERT_TRUE(words.has_value());
  EXPECT_THAT(*words, StartsWith("killed by signal 9"));
}

TEST_F(LaneProcessTest, MissingBinaryIsNamed) {
  const LaneBinary nowhere("/nowhere/dmuond-lane");
  const absl::Status status =
      LaneProcess::Start({.binary = nowhere, .device = "cpu:1"}, {}).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/dmuond-lane"));
}

TEST_F(LaneProcessTest, ManyLanesLeaveNothingBehind) {
  Start("");
  lane_.reset();
  const size_t descriptors = OpenDescriptors();
  const size_t threads = Threads();
  for (int i = 0; i < 30; ++i) {
    Start(i % 2 == 0 ? "" : "kill");
    if (i % 2 != 0) {
      ASSERT_TRUE(gone_.Take().has_value());
    }
    lane_.reset();
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(Threads(), threads);
}

}  // namespace
}  // namespace dmuond::server
