#include "server/daemon/lanes/lane_host.h"

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "scheduler/types.h"
#include "tests/server/daemon/held_device.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using scheduler::LaneIndex;
using std::chrono::milliseconds;

// Its lanes are fakes, which may keep their process when others follow, as those on GPUs do.
class FakeLanes final : public HeldDevice {
 public:
  FakeLanes(std::string mode, std::optional<milliseconds> patience)
      : mode_(std::move(mode)), patience_(patience) {}
  Variables OfLaneEnvironment() const override { return {{"FAKE_LANE", mode_}}; }
  std::optional<milliseconds> ReleasesLanesWithin() const override { return patience_; }

 private:
  const std::string mode_;
  const std::optional<milliseconds> patience_;
};

class LaneHostTest : public ::testing::Test {
 protected:
  static constexpr int32_t kLanes = 2;

  void Use(const std::string& mode, std::optional<milliseconds> patience) {
    device_ = std::make_unique<FakeLanes>(mode, patience);
    const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe");
    host_ = std::make_unique<LaneHost>(
        LaneHost::Options{.binary = LaneBinary(own.parent_path() / "fake_lane"),
                          .device = device_.get(),
                          .lanes = kLanes},
        LaneHost::Callbacks{
            .on_report = [this](uint64_t generation, LaneIndex,
                                const v1::LaneReport&) { reports_.Put(generation); },
            .on_gone = [this](uint64_t generation, LaneIndex,
                              const std::string&) { gone_.Put(generation); }});
  }

  // Starts all lanes, and waits until each has answered its configuration.
  void Start(uint64_t generation) {
    v1::LaneCommand configure;
    configure.mutable_configure()->set_job("job");
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      ASSERT_TRUE(host_->Start(LaneIndex(lane), generation, configure, {}).ok());
    }
    for (int32_t lane = 0; lane < kLanes; ++lane) EXPECT_EQ(reports_.Take(), generation);
  }

  [[nodiscard]] LaneHost::Reaper Waited() {
    LaneHost::Reaper reaper = host_->BeginReaping();
    reaper.Wait(std::chrono::steady_clock::now() + kPatience);
    return reaper;
  }
  void Reap() {
    host_->EndReaping(Waited());
    EXPECT_FALSE(host_->ending());
  }

  [[nodiscard]] std::pair<pid_t, pid_t> Pids() const {
    return {host_->pid(LaneIndex(0)), host_->pid(LaneIndex(1))};
  }
  static bool IsThere(pid_t pid) { return ::kill(pid, 0) == 0; }

  std::unique_ptr<FakeLanes> device_;
  Inbox<uint64_t> reports_;  // by the generation that it is of
  Inbox<uint64_t> gone_;
  std::unique_ptr<LaneHost> host_;
};

TEST_F(LaneHostTest, LanesThatAreGivenUpAreKilledAndOthersFollow) {
  Use("", std::nullopt);
  Start(1);
  const auto before = Pids();
  host_->GiveUpAll();
  EXPECT_TRUE(host_->ending());
  EXPECT_EQ(host_->pid(LaneIndex(0)), 0);
  Reap();
  EXPECT_FALSE(IsThere(before.first));
  EXPECT_FALSE(IsThere(before.second));
  Start(2);
  EXPECT_NE(Pids(), before);
  EXPECT_EQ(gone_.size(), 0) << "nobody asks for the end of a lane that was given up";
}

TEST_F(LaneHostTest, LanesThatLetGoOfTheirWorkKeepTheirProcesses) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  host_->GiveUpAll();
  Reap();
  Start(2);
  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(LaneHostTest, ALaneThatHasDiedIsReplacedAndTheOtherKeepsItsProcess) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  ASSERT_EQ(::kill(before.first, SIGKILL), 0);
  EXPECT_EQ(gone_.Take(), 1);
  host_->GiveUpAll();
  Reap();
  Start(2);
  EXPECT_NE(Pids().first, before.first);
  EXPECT_EQ(Pids().second, before.second);
}

TEST_F(LaneHostTest, ALaneThatDiesWhileItWaitsForWorkIsReplaced) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  host_->GiveUpAll();
  Reap();
  ASSERT_EQ(::kill(before.second, SIGKILL), 0);
  // The host may notice the death before it hands out the work, and starts another process then.
  // Or it notices it afterwards, and reports it as that of any lane.
  v1::LaneCommand configure;
  ASSERT_TRUE(host_->Start(LaneIndex(1), 2, configure, {}).ok());
  if (host_->pid(LaneIndex(1)) == before.second) {
    EXPECT_EQ(gone_.Take(), 2);
  } else {
    EXPECT_EQ(reports_.Take(), 2);
  }
}

TEST_F(LaneHostTest, LanesThatDoNotLetGoInTimeAreKilled) {
  Use("hang", milliseconds(1));
  Start(1);  // they have said that they are ready
  const auto before = Pids();
  host_->GiveUpAll();
  Reap();
  Start(2);
  EXPECT_NE(Pids().first, before.first);
  EXPECT_NE(Pids().second, before.second);
  for (const pid_t pid : {Pids().first, Pids().second})
    ::kill(pid, SIGKILL);  // they ignore Shutdown
}

TEST_F(LaneHostTest, TheEndOfAJobEndsProcessesThatWaitForWork) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  host_->GiveUpAll();
  Reap();
  EXPECT_TRUE(IsThere(before.first));
  host_->EndAll();
  EXPECT_TRUE(host_->ending());
  Reap();
  EXPECT_FALSE(IsThere(before.first));
  EXPECT_FALSE(IsThere(before.second));
  Start(2);
  EXPECT_NE(Pids(), before);
}

TEST_F(LaneHostTest, TheEndOfAJobEndsProcessesThatLetGoOfTheirWorkMeanwhile) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  host_->GiveUpAll();
  LaneHost::Reaper reaper = Waited();  // they have let go
  host_->EndAll();
  host_->EndReaping(std::move(reaper));
  EXPECT_TRUE(host_->ending()) << "they still run";
  Reap();
  EXPECT_FALSE(IsThere(before.first));
  EXPECT_FALSE(IsThere(before.second));
  Start(2);
  EXPECT_NE(Pids(), before);
}

TEST_F(LaneHostTest, LanesThatAreEndedAndThenFollowedAreNotKept) {
  Use("", kPatience);
  Start(1);
  const auto before = Pids();
  host_->EndAll();
  host_->GiveUpAll();  // of the next job, which has none yet
  Reap();
  Start(2);
  EXPECT_NE(Pids(), before);
}

}  // namespace
}  // namespace dmuond::server
