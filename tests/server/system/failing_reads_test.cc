// Snapshots that cannot be read: when a job begins from one, when a group goes back to one, when
// somebody asks for one. An older one is used, as a whole, or the job stops and names the file;
// what runs and has its memory loses nothing.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
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

namespace fs = std::filesystem;
using client::Outcome;
using client::Resume;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class FailingReadsTest : public SnapshotFixture<8> {
 protected:
  void StartDaemons(int nodes) {
    const std::vector<std::string> flags = {"--threads=1", "--snapshot_dir=" + Snapshots(),
                                            "--snapshot_every_steps=3"};
    auto group = StartGroup(nodes, "cpu:1", flags);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }
  // Of a job whose trainers are all of node 0: node 1 has lanes.
  std::unique_ptr<SnapshotWorld> MakeWorld(const SnapshotWorld::Options& options = {}) {
    return std::make_unique<SnapshotWorld>(std::vector<std::string>{group_[0]->address()}, options);
  }
  // A new job with snapshots of every third step up to `last`.
  std::unique_ptr<SnapshotWorld> LiveUntil(int64_t last) {
    auto world = MakeWorld();
    const absl::Status started = world->Start();
    EXPECT_TRUE(started.ok()) << started;
    for (int64_t step = 1; started.ok() && step <= last; ++step) {
      EXPECT_TRUE(world->StepUntil(step));
      if (step % 3 == 0) {
        EXPECT_TRUE(WaitDurable(step));
      }
    }
    return world;
  }
  void ReplaceDaemon(int node) {
    group_[node]->Kill();
    const absl::Status again = group_[node]->StartAgain();
    ASSERT_TRUE(again.ok()) << again;
  }
  // The next step says that the job has gone back; from there it is the undisturbed run.
  void ExpectGoesOnFrom(SnapshotWorld& world, int64_t step) {
    const auto outcome = world.Step();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->kind, Outcome::Kind::kRolledBack);
    EXPECT_EQ(outcome->to_step, step);
    EXPECT_EQ(outcome->trainer_state, SnapshotWorld::StateOf(0, step));
    EXPECT_EQ(world.Weights(), undisturbed_[step]);
    ASSERT_TRUE(world.StepUntil(kSteps));
    EXPECT_EQ(world.Weights(), undisturbed_[kSteps]);
  }
  [[nodiscard]] std::string Snapshots() const { return scratch_.path() + "/snapshots"; }
  void FlipBit(int64_t step, const std::string& name) const {
    std::fstream file(FileOf(Snapshots(), step, name),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-5, std::ios::end);
    const char flipped = static_cast<char>(file.peek() ^ 1);
    file.seekp(-5, std::ios::end);
    file.put(flipped);
    ASSERT_TRUE(file.good());
  }
};

TEST_F(FailingReadsTest, AnyReadThatFailsWhenAJobBeginsIsNamedOrAnOlderSnapshotIsUsed) {
  StartDaemons(1);
  LiveUntil(6);
  std::atomic<int> left{0};  // reads until one fails; 0: none does
  const DiskDriver driver(
      scratch_.path() + "/driver", [&](pid_t /*pid*/, const std::string& point) -> std::string {
        const bool fails = point == "storage.read" && left.load() > 0 && --left == 0;
        return fails ? absl::StrCat("fail ", EIO) : "go";
      });
  int refused = 0;
  int older = 0;
  bool failed = true;
  for (int read = 1; failed; ++read) {
    SCOPED_TRACE(absl::StrCat("read ", read, " fails"));
    group_[0]->Kill();
    ASSERT_TRUE(group_[0]->StartAgain().ok());
    left.store(read);
    auto world = MakeWorld({.ranks = 1, .resume = Resume::kRequire});
    const absl::Status started = world->Start();
    failed = left.exchange(0) == 0;
    if (!started.ok()) {
      ++refused;
      EXPECT_EQ(client::ReasonOf(started), "SNAPSHOT_BROKEN") << started;
      EXPECT_THAT(std::string(started.message()),
                  AllOf(HasSubstr("run7/step-"), HasSubstr("Input/output error")));
      // The disk is well again: so is the job, with the same daemon.
      world = MakeWorld({.ranks = 1, .resume = Resume::kRequire});
      const absl::Status again = world->Start();
      ASSERT_TRUE(again.ok()) << again;
    }
    const int64_t from = (*world)[0].last_committed_step();
    EXPECT_THAT(from, AnyOf(3, 6));
    if (from == 3) {
      ++older;
      EXPECT_THAT(group_[0]->Log(), HasSubstr("a broken snapshot is passed over"));
    }
    EXPECT_EQ((*world)[0].trainer_state(), SnapshotWorld::StateOf(0, from));
    EXPECT_EQ(world->Weights(), undisturbed_[from]);
    ASSERT_TRUE(world->StepUntil(from + 1));
    EXPECT_EQ(world->Weights(), undisturbed_[from + 1]);
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(older, 0);
}

TEST_F(FailingReadsTest, AJobWhoseSnapshotsAreAllBrokenDoesNotBeginAnew) {
  StartDaemons(1);
  LiveUntil(3);
  const std::string file = FileOf(Snapshots(), 3, "lane-00000.safetensors");
  fs::resize_file(file, fs::file_size(file) - 1);
  ReplaceDaemon(0);
  for (const Resume resume : {Resume::kIfPresent, Resume::kRequire}) {
    const absl::Status started = MakeWorld({.resume = resume})->Start();
    EXPECT_EQ(client::ReasonOf(started), "SNAPSHOT_BROKEN") << started;
    EXPECT_THAT(std::string(started.message()), HasSubstr("lane-00000.safetensors"));
  }
}

TEST_F(FailingReadsTest, AGroupGoesBackToTheOlderSnapshotWhenABitOfTheNewestHasFlipped) {
  StartDaemons(2);
  auto world = LiveUntil(7);
  FlipBit(6, "lane-00001.safetensors");
  ReplaceDaemon(1);
  ExpectGoesOnFrom(*world, 3);
  EXPECT_THAT(absl::StrCat(group_[0]->Log(), group_[1]->Log()),
              AllOf(HasSubstr("a snapshot cannot be restored"),
                    HasSubstr("lane-00001.safetensors: tensor")));
  world->Close();
}

TEST_F(FailingReadsTest, AGroupGoesBackToTheOlderSnapshotWhenWhatTrainersGaveCannotBeRead) {
  StartDaemons(2);
  auto world = LiveUntil(7);
  FlipBit(6, "trainers-00000.safetensors");
  ReplaceDaemon(1);
  ExpectGoesOnFrom(*world, 3);
  world->Close();
}

TEST_F(FailingReadsTest, AGroupPassesOverATruncatedSnapshot) {
  StartDaemons(2);
  auto world = LiveUntil(7);
  const std::string file = FileOf(Snapshots(), 6, "lane-00000.safetensors");
  fs::resize_file(file, fs::file_size(file) - 1);
  ReplaceDaemon(1);
  ExpectGoesOnFrom(*world, 3);
  world->Close();
}

TEST_F(FailingReadsTest, AGroupStopsAndNamesTheFileWhenThereIsNoOlderSnapshot) {
  StartDaemons(2);
  auto world = LiveUntil(5);
  FlipBit(3, "lane-00001.safetensors");
  ReplaceDaemon(1);
  const auto outcome = world->Step();
  ASSERT_FALSE(outcome.ok()) << static_cast<int>(outcome->kind);
  EXPECT_EQ(client::ReasonOf(outcome.status()), "SNAPSHOT_BROKEN") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("lane-00001.safetensors"));
}

TEST_F(FailingReadsTest, ASnapshotThatIsAskedForAndBrokenIsRefusedAndTheJobGoesOn) {
  StartDaemons(2);
  auto world = LiveUntil(7);
  FlipBit(3, "lane-00001.safetensors");
  const auto named = (*world)[0].LoadSnapshot(3);
  EXPECT_EQ(client::ReasonOf(named.status()), "SNAPSHOT_BROKEN") << named.status();
  EXPECT_THAT(std::string(named.status().message()), HasSubstr("lane-00001.safetensors: tensor"));
  const std::string file = FileOf(Snapshots(), 6, "lane-00000.safetensors");
  fs::resize_file(file, fs::file_size(file) - 1);
  const auto truncated = (*world)[0].LoadSnapshot(6);
  EXPECT_EQ(client::ReasonOf(truncated.status()), "SNAPSHOT_BROKEN") << truncated.status();
  ASSERT_TRUE(world->StepUntil(kSteps));
  EXPECT_EQ(world->Weights(), undisturbed_[kSteps]);
  world->Close();
}

TEST_F(FailingReadsTest, ASnapshotThatCannotBeReadIsRefusedByWhoIsAskedAndStopsTheJobElsewhere) {
  std::atomic<pid_t> fails{0};  // whose reads fail
  const DiskDriver driver(scratch_.path() + "/driver",
                          [&](pid_t pid, const std::string& point) -> std::string {
                            const bool broken = point == "storage.read" && pid == fails.load();
                            return broken ? absl::StrCat("fail ", EIO) : "go";
                          });
  StartDaemons(2);
  auto world = LiveUntil(7);
  // Of the asking daemon: the job goes on.
  fails.store(group_[0]->pid());
  const auto refused = (*world)[0].LoadSnapshot(6);
  EXPECT_EQ(client::ReasonOf(refused.status()), "SNAPSHOT_BROKEN") << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("Input/output error"));
  // Of another one, which has given its state up when it finds out: nothing can be read there, so
  // the job stops.
  fails.store(group_[1]->pid());
  const auto loaded = (*world)[0].LoadSnapshot(6);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto outcome = world->Step();
  ASSERT_FALSE(outcome.ok()) << static_cast<int>(outcome->kind);
  EXPECT_EQ(client::ReasonOf(outcome.status()), "SNAPSHOT_BROKEN") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()),
              AllOf(HasSubstr("node 1"), HasSubstr("Input/output error")));
}

}  // namespace
}  // namespace dmuond::testing
