// What a disk can do to a running job: training goes on when a snapshot fails, and a daemon that is
// killed at any point of a snapshot leaves the old one or the new one.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"
#include "tests/server/ctl/ctl_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/disk_driver.h"
#include "tests/server/system/snapshot_fixture.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using client::Resume;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class StorageFaultsTest : public SnapshotFixture<8> {
 protected:
  std::unique_ptr<DaemonProcess> Start(const std::string& directory) {
    auto daemon = DaemonProcess::Start(
        {.flags = {"--threads=1", "--snapshot_dir=" + directory, "--snapshot_every_steps=3"}});
    EXPECT_TRUE(daemon.ok()) << daemon.status();
    return daemon.ok() ? *std::move(daemon) : nullptr;
  }
  // Waits until the daemon says that one snapshot has failed. False: it has not, in time.
  static bool WaitForOneFailure(const DaemonProcess& daemon) {
    return DaemonStatus(daemon.address()).WaitFor([](const v1::GetStatusReply& reply) {
      return reply.job().snapshots_failed() == 1;
    });
  }
};

TEST_F(StorageFaultsTest, AFullDiskFailsTheSnapshotAndTrainingGoesOnWithAWarning) {
  std::atomic<bool> full{false};
  const DiskDriver driver(scratch_.path() + "/driver",
                          [&](pid_t /*pid*/, const std::string& point) -> std::string {
                            const bool fails = full.load() && point == "storage.write";
                            return fails ? absl::StrCat("fail ", ENOSPC) : "go";
                          });
  const std::string directory = scratch_.path() + "/snapshots";
  const auto daemon = Start(directory);
  ASSERT_NE(daemon, nullptr);
  SnapshotWorld world({daemon->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(3));
  ASSERT_TRUE(WaitDurable(*daemon, 3));
  full.store(true);
  ASSERT_TRUE(world.StepUntil(6));
  ASSERT_TRUE(WaitForOneFailure(*daemon));
  ASSERT_TRUE(world.StepUntil(7));
  EXPECT_EQ(world.Weights(), undisturbed_[7]);
  EXPECT_EQ(world[0].durable_step(), 3) << "the old one is still what can be gone back to";
  EXPECT_THAT(daemon->Log(), HasSubstr("a snapshot failed; training goes on"));
  size_t directories = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory + "/run7")) {
    directories += entry.is_directory() ? 1 : 0;
  }
  EXPECT_EQ(directories, 1) << "what was written of the failed one is gone";
  const auto why = [&] { return DaemonStatus(daemon->address()).Get().job().snapshot_error(); };
  EXPECT_THAT(why(), HasSubstr("No space left on device"));
  full.store(false);
  ASSERT_TRUE(world.StepUntil(9));
  ASSERT_TRUE(WaitDurable(*daemon, 9));
  EXPECT_EQ(why(), "");
  EXPECT_EQ(daemon->Stop(), 0);
  EXPECT_THAT(daemon->Log(), ::testing::Not(HasSubstr("not in a snapshot")));
}

TEST_F(StorageFaultsTest, ADrainThatMayLoseStepsIsRefusedUnlessItIsForced) {
  const DiskDriver driver(scratch_.path() + "/driver",
                          [&](pid_t /*pid*/, const std::string& point) -> std::string {
                            return point == "storage.write" ? absl::StrCat("fail ", ENOSPC) : "go";
                          });
  const auto daemon = Start(scratch_.path() + "/snapshots");
  ASSERT_NE(daemon, nullptr);
  SnapshotWorld world({daemon->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(3));
  ASSERT_TRUE(WaitForOneFailure(*daemon));
  const std::string address = "--address=" + daemon->address();
  const CtlResult refused = RunCtl({address, "drain"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.errors,
              AllOf(HasSubstr("SNAPSHOTS_FAIL"), HasSubstr("No space left on device")));
  ASSERT_TRUE(world.StepUntil(5)) << "the daemon stays";
  const CtlResult forced = RunCtl({address, "drain", "--force"});
  EXPECT_EQ(forced.code, 1);
  EXPECT_THAT(forced.errors, HasSubstr("steps 1 to 5 of job 'run7' are in no snapshot"));
  EXPECT_EQ(daemon->Wait(std::chrono::seconds(20)), 3);
}

TEST_F(StorageFaultsTest, ADirectoryThatIsReplacedIsNoticedBeforeASnapshotCountsAsDurable) {
  const std::string directory = scratch_.path() + "/snapshots";
  const std::string away = scratch_.path() + "/away";
  const auto daemon = Start(directory);
  ASSERT_NE(daemon, nullptr);
  SnapshotWorld world({daemon->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(3));
  ASSERT_TRUE(WaitDurable(*daemon, 3));
  // As an unmount leaves it: the path leads to an empty directory.
  std::filesystem::rename(directory, away);
  std::filesystem::create_directory(directory);
  ASSERT_TRUE(world.StepUntil(6));
  ASSERT_TRUE(WaitForOneFailure(*daemon));
  EXPECT_EQ(world[0].durable_step(), 3);
  EXPECT_THAT(daemon->Log(), HasSubstr(directory + " is another directory"));
  std::filesystem::remove(directory);
  std::filesystem::rename(away, directory);
  ASSERT_TRUE(world.StepUntil(9));
  EXPECT_TRUE(WaitDurable(*daemon, 9)) << "it is back";
  EXPECT_EQ(daemon->Stop(), 0);
}

TEST_F(StorageFaultsTest, ADaemonKilledAtAnyPointOfASnapshotLeavesTheOldOneOrTheNewOne) {
  int runs = 0;
  int renewed = 0;
  for (const std::string point : {"storage.create", "storage.write", "storage.fsync",
                                  "storage.rename", "storage.fsync_directory"}) {
    for (int occurrence = 1; occurrence <= 3; ++occurrence) {
      SCOPED_TRACE(absl::StrCat(point, ", time ", occurrence));
      const std::string directory = absl::StrCat(scratch_.path(), "/", runs++);
      std::atomic<int> left{0};  // until it is killed; 0: not armed
      {
        const DiskDriver driver(directory + ".driver",
                                [&](pid_t pid, const std::string& at) -> std::string {
                                  if (at == point && left.load() > 0 && --left == 0) {
                                    ::kill(pid, SIGKILL);
                                  }
                                  return "go";
                                });
        const auto daemon = Start(directory);
        ASSERT_NE(daemon, nullptr);
        SnapshotWorld world({daemon->address()}, {.ranks = 1});
        ASSERT_TRUE(world.Start().ok());
        ASSERT_TRUE(world.StepUntil(3));
        ASSERT_TRUE(WaitDurable(*daemon, 3));
        ASSERT_TRUE(world.StepUntil(5));
        left.store(occurrence);
        world.Step().status().IgnoreError();  // the kill may be faster than the answer
        EXPECT_EQ(daemon->Wait(std::chrono::seconds(20)), 128 + SIGKILL);
      }
      const auto daemon = Start(directory);
      ASSERT_NE(daemon, nullptr);
      SnapshotWorld world({daemon->address()}, {.ranks = 1, .resume = Resume::kRequire});
      const absl::Status started = world.Start();
      ASSERT_TRUE(started.ok()) << started;
      const int64_t from = world[0].last_committed_step();
      EXPECT_THAT(from, AnyOf(3, 6));
      renewed += from == 6 ? 1 : 0;
      EXPECT_EQ(world.Weights(), undisturbed_[from]);
      ASSERT_TRUE(world.StepUntil(kSteps));
      EXPECT_EQ(world.Weights(), undisturbed_[kSteps]);
    }
  }
  EXPECT_LT(renewed, runs) << "some kill must have come before the manifest";
}

}  // namespace
}  // namespace dmuond::testing
