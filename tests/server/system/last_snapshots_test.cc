// Snapshots at awkward times: asked for while lanes die and are replaced, and the last one of a job
// that ends because a rank does not come back.
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/disk_driver.h"
#include "tests/server/system/snapshot_fixture.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using client::Resume;
using ::testing::HasSubstr;
using ::testing::Not;

class LastSnapshotsTest : public SnapshotFixture<6> {
 protected:
  // No snapshot falls due by itself.
  void StartDaemons(int nodes, std::vector<std::string> flags = {}) {
    flags.insert(flags.end(), {"--threads=1", "--snapshot_dir=" + scratch_.path() + "/snapshots"});
    auto group = StartGroup(nodes, "cpu:2", flags);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }
  std::unique_ptr<SnapshotWorld> LiveUntil(int64_t last) {
    auto world = MakeWorld();
    const absl::Status started = world->Start();
    EXPECT_TRUE(started.ok()) << started;
    if (started.ok()) {
      EXPECT_TRUE(world->StepUntil(last));
    }
    return world;
  }
  [[nodiscard]] DaemonStatus Status() const { return DaemonStatus(group_[0]->address()); }
  // Another life of the job.
  void ExpectGoesOnFrom(int64_t step) {
    auto world = MakeWorld({.resume = Resume::kRequire});
    const absl::Status started = world->Start();
    ASSERT_TRUE(started.ok()) << started;
    EXPECT_EQ((*world)[0].last_committed_step(), step);
    EXPECT_EQ((*world)[1].trainer_state(), SnapshotWorld::StateOf(1, step));
    EXPECT_EQ(world->Weights(), undisturbed_[step]);
    ASSERT_TRUE(world->StepUntil(kSteps));
    EXPECT_EQ(world->Weights(), undisturbed_[kSteps]);
    world->Close();
  }
  // A rank's step, which is not going to be committed.
  static std::string WhatBecomesOfAStep(SnapshotWorld& world, int32_t rank) {
    const auto outcome = world[rank].Step({.groups = {{.learning_rate = 0.02}}});
    return outcome.ok() ? "it was decided" : client::ReasonOf(outcome.status());
  }
};

// Whoever begins the next job of that name waits for the snapshot, too.
TEST_F(LastSnapshotsTest, OneThatWasBegunIsWrittenToItsEndWhenEveryRankHasLeft) {
  std::atomic<bool> holds{false};
  DiskDriver driver(scratch_.path() + "/driver", [&](pid_t /*pid*/, const std::string& point) {
    return std::string(point == "storage.fsync" && holds.load() ? "hold" : "go");
  });
  StartDaemons(2, {"--snapshot_every_steps=3"});
  auto world = LiveUntil(2);
  holds.store(true);
  ASSERT_TRUE(world->StepUntil(3));
  world->Close();
  EXPECT_TRUE(driver.WaitHeld());
  holds.store(false);
  driver.Release();
  ExpectGoesOnFrom(3);
}

class LaneDeathsTest : public LastSnapshotsTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Nodes, LaneDeathsTest, ::testing::Values(1, 2));

TEST_P(LaneDeathsTest, ALaneThatDiesWhileItCopiesIsReplacedAndTheSnapshotIsMade) {
  std::atomic<int> deaths{2};
  const DiskDriver driver(
      scratch_.path() + "/driver",
      [&](pid_t pid, const std::string& point) -> std::string {
        if (point == "lane.snapshot.copy" && deaths.load() > 0 && deaths-- > 0) {
          ::kill(pid, SIGKILL);
        }
        return "go";
      },
      "lane.snapshot.copy");
  StartDaemons(GetParam());
  auto world = LiveUntil(3);
  const auto saved = (*world)[0].SaveSnapshot();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->step, 3);
  EXPECT_LE(deaths.load(), 0) << "no lane has died";
  ASSERT_TRUE(world->StepUntil(5));
  EXPECT_EQ(world->Weights(), undisturbed_[5]) << "no step was lost";
  for (const auto& daemon : group_) daemon->Kill();
  for (const auto& daemon : group_) ASSERT_TRUE(daemon->StartAgain().ok());
  ExpectGoesOnFrom(3);
}

TEST_P(LaneDeathsTest, WhoAsksWhileLanesAreReplacedIsAnsweredWhenTheStateIsSaved) {
  std::atomic<bool> hold{false};
  const DiskDriver driver(
      scratch_.path() + "/driver",
      [&](pid_t /*pid*/, const std::string& /*point*/) -> std::string {
        hold.wait(true);
        return "go";
      },
      "lane.configured");
  StartDaemons(GetParam());
  auto world = LiveUntil(3);
  const std::string address = group_.back()->address();
  hold.store(true);
  ::kill(DaemonStatus(address).Get().lanes(0).pid(), SIGKILL);
  ASSERT_TRUE(DaemonStatus(address).WaitFor([](const v1::GetStatusReply& reply) {
    return reply.lanes_size() > 0 && reply.lanes(0).state() == "starting";
  }));
  absl::StatusOr<client::Snapshot> saved = absl::InternalError("not asked yet");
  const std::string output = scratch_.path() + "/ctl";
  auto ctl = ChildProcess::Start("dmuonctl", {"--address=" + address, "snapshot", "save"}, output);
  ASSERT_TRUE(ctl.ok()) << ctl.status();
  std::thread asks([&] {
    // What the lanes wait for is now up to the daemon.
    hold.store(false);
    hold.notify_all();
    saved = (*world)[1].SaveSnapshot();
  });
  asks.join();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->step, 3);
  EXPECT_EQ((*ctl)->Wait(std::chrono::seconds(30)), 0);
  std::ifstream file(output);
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}), HasSubstr("step 3 saved"));
  ASSERT_TRUE(world->StepUntil(5));
  EXPECT_EQ(world->Weights(), undisturbed_[5]);
  EXPECT_THAT(group_[0]->Log(), Not(HasSubstr("a snapshot failed")));
  world->Close();
}

class LingerTest : public LastSnapshotsTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Nodes, LingerTest, ::testing::Values(1, 2));

TEST_P(LingerTest, TheStateIsSavedWhenARankDoesNotComeBackAndTheOthersEnd) {
  StartDaemons(GetParam(), {"--session_linger=300ms"});
  auto world = LiveUntil(4);
  world->Drop(1);
  EXPECT_EQ(WhatBecomesOfAStep(*world, 0), "TRAINER_MISSING");
  EXPECT_TRUE(Status().WaitFor(
      [](const v1::GetStatusReply& reply) { return reply.job().durable_step() == 4; }));
  world->Drop(0);
  EXPECT_TRUE(Status().WaitForNoJob());
  EXPECT_THAT(group_[0]->Log(), Not(HasSubstr("state lost")));
  ExpectGoesOnFrom(4);
}

TEST_P(LingerTest, TheStateIsSavedWhenEveryRankHasDiedAndWhoComesThenGoesOnFromIt) {
  StartDaemons(GetParam(), {"--session_linger=300ms"});
  auto world = LiveUntil(4);
  world->Drop(0);
  world->Drop(1);
  EXPECT_TRUE(Status().WaitForNoJob());
  ExpectGoesOnFrom(4);
}

TEST_P(LingerTest, WhoComesWhileTheLastStateIsBeingSavedWaitsForItAndGoesOnFromIt) {
  std::atomic<bool> hold{false};
  std::atomic<int> held{0};
  const DiskDriver driver(scratch_.path() + "/driver",
                          [&](pid_t /*pid*/, const std::string& point) -> std::string {
                            if (point == "storage.write" && hold.load()) {
                              ++held;
                              held.notify_all();
                              hold.wait(true);
                            }
                            return "go";
                          });
  StartDaemons(GetParam(), {"--session_linger=300ms"});
  auto world = LiveUntil(4);
  hold.store(true);
  world->Drop(0);
  world->Drop(1);
  held.wait(0);
  std::thread disk([&] {
    hold.store(false);
    hold.notify_all();
  });
  ExpectGoesOnFrom(4);
  disk.join();
}

// The successor cannot know that it does not come any more.
TEST_F(LastSnapshotsTest, WhoWaitsForARankThatHadLeftIsToldItsNameInTime) {
  StartDaemons(1, {"--register_timeout=1s"});
  auto world = MakeWorld({.reconnect_timeout = std::chrono::milliseconds(4000)});
  ASSERT_TRUE(world->Start().ok());
  ASSERT_TRUE(world->StepUntil(2));
  ASSERT_TRUE((*world)[0].SaveSnapshot().ok());
  ASSERT_TRUE((*world)[1].Close().ok());
  group_[0]->Kill();
  ASSERT_TRUE(group_[0]->StartAgain().ok());
  const auto outcome = (*world)[0].Step({.groups = {{.learning_rate = 0.02}}});
  EXPECT_EQ(client::ReasonOf(outcome.status()), "DAEMON_LOST") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()),
              HasSubstr("of 2 ranks these have not registered in time: 1"));
}

TEST_F(LastSnapshotsTest, WhatIsLostIsSaidWhenTheLastStateCannotBeSaved) {
  std::atomic<bool> full{false};
  const DiskDriver driver(scratch_.path() + "/driver",
                          [&](pid_t /*pid*/, const std::string& point) -> std::string {
                            const bool fails = full.load() && point == "storage.write";
                            return fails ? absl::StrCat("fail ", ENOSPC) : "go";
                          });
  StartDaemons(1, {"--session_linger=300ms"});
  auto world = LiveUntil(2);
  ASSERT_TRUE((*world)[0].SaveSnapshot().ok());
  ASSERT_TRUE(world->StepUntil(4));
  full.store(true);
  world->Drop(0);
  world->Drop(1);
  EXPECT_TRUE(Status().WaitForNoJob());
  EXPECT_THAT(group_[0]->Log(), HasSubstr("a snapshot failed"));
  EXPECT_THAT(group_[0]->Log(), HasSubstr("state lost"));
  EXPECT_THAT(group_[0]->Log(), HasSubstr("after_step=2 last_step=4"));
  full.store(false);
  ExpectGoesOnFrom(2);
}

}  // namespace
}  // namespace dmuond::testing
