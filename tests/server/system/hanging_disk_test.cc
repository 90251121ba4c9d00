// A snapshot directory that does not answer, as that of a file server that is gone: a write of a
// snapshot that never returns is noticed, training goes on, nobody waits for it, and when it
// returns after all nothing is the worse for it.
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <utility>
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

using client::Outcome;
using client::Resume;
using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kNotSaved = 3;  // dmuond's exit code

class HangingDiskTest : public SnapshotFixture<11> {
 protected:
  void StartDaemons(int nodes, std::vector<std::string> flags = {}) {
    snapshots_ = absl::StrCat(memory_.path(), "/", runs_++);
    driver_ = nullptr;  // its successor says where it is
    driver_ = std::make_unique<DiskDriver>(
        snapshots_ + ".driver",
        [this](pid_t pid, const std::string& point) -> std::string {
          if (pid != victim_.load()) return "go";
          if (point == after_) after_.clear();
          return after_.empty() && point == point_ && --passings_ == 0 ? "hold" : "go";
        },
        "daemon.member_state");
    flags.insert(flags.end(),
                 {"--threads=1", "--snapshot_dir=" + snapshots_, "--snapshot_every_steps=3"});
    auto group = StartGroup(nodes, "cpu:1", flags);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }
  // A daemon, the last node's, is going to hang at the so many-th time that it comes to the point.
  void HangAt(const std::string& point, int passings = 1) {
    HangAt(point, passings, group_.back()->pid());
  }
  // `after`: counted from there.
  void HangAt(const std::string& point, int passings, pid_t victim, const std::string& after = "") {
    point_ = point;
    passings_ = passings;
    after_ = after;
    victim_.store(victim);
  }
  void Release() {
    victim_.store(0);
    driver_->Release();
  }
  // Dies, and has a successor.
  void ReplaceDaemon(int node) {
    group_[node]->Kill();
    ASSERT_TRUE(group_[node]->StartAgain().ok());
  }
  // The next step says that the job has gone back; from there it is the undisturbed run.
  void ExpectGoesOnFrom(int64_t step) {
    const auto outcome = world_->Step();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->kind, Outcome::Kind::kRolledBack);
    EXPECT_EQ(outcome->to_step, step);
    EXPECT_EQ(world_->Weights(), undisturbed_[step]);
    ASSERT_TRUE(world_->StepUntil(step + 2));
    EXPECT_EQ(world_->Weights(), undisturbed_[step + 2]);
  }
  void StartWorld() { Start(MakeWorld({.ranks = 2})); }
  // Trainers of node 0 alone, who live on when another daemon dies.
  void StartWorldOfNode0(Resume resume = Resume::kNever) { Start(WorldOf(0, resume)); }
  std::unique_ptr<SnapshotWorld> WorldOf(int node, Resume resume) {
    return std::make_unique<SnapshotWorld>(std::vector<std::string>{group_[node]->address()},
                                           SnapshotWorld::Options{.ranks = 2, .resume = resume});
  }
  void Start(std::unique_ptr<SnapshotWorld> world) {
    world_ = std::move(world);
    const absl::Status started = world_->Start();
    ASSERT_TRUE(started.ok()) << started;
  }
  // Another life of the job.
  void Restart(Resume resume = Resume::kRequire) {
    for (const auto& daemon : group_) ASSERT_TRUE(daemon->StartAgain().ok());
    for (const auto& daemon : group_) {
      ASSERT_TRUE(daemon->WaitServing("ready", std::chrono::seconds(30)).ok());
    }
    Start(MakeWorld({.ranks = 2, .resume = resume}));
  }
  bool WaitFailed(int64_t snapshots) {
    return DaemonStatus(group_[0]->address()).WaitFor([&](const v1::GetStatusReply& reply) {
      return reply.job().snapshots_failed() >= snapshots;
    });
  }
  [[nodiscard]] std::vector<std::string> Directories() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(snapshots_ + "/run7")) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  // Nothing hangs here but what is told to, while a busy disk may take longer than 700 ms.
  ScratchDirectory memory_{"/dev/shm"};
  std::string snapshots_;
  int runs_ = 0;
  std::string point_;
  int passings_ = 0;
  std::string after_;
  std::atomic<pid_t> victim_{0};
  std::unique_ptr<DiskDriver> driver_;
  std::unique_ptr<SnapshotWorld> world_;
};

class NodesTest : public HangingDiskTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Nodes, NodesTest, ::testing::Values(1, 2));

TEST_P(NodesTest, AWriteThatHangsFailsItsSnapshotAndTrainingGoesOnAndLaterOnesWorkWhenItReturns) {
  StartDaemons(GetParam(), {"--snapshot_timeout=700ms"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  HangAt("storage.write");
  ASSERT_TRUE(world_->StepUntil(7)) << "the snapshot of step 6 is being written";
  ASSERT_TRUE(driver_->WaitHeld());
  ASSERT_TRUE(WaitFailed(1));
  EXPECT_TRUE(group_.back()->WaitLogged("level=warn msg=\"the snapshot directory hangs\""));
  EXPECT_THAT(group_.back()->Log(),
              AllOf(HasSubstr("what=\"write to " + snapshots_), HasSubstr("since=20")));
  EXPECT_TRUE(group_[0]->WaitLogged("a snapshot failed; training goes on"));

  DaemonStatus status(group_.back()->address());
  EXPECT_THAT(status.Get().snapshot_dir_hangs(), StartsWith("write to " + snapshots_));

  const auto refused = (*world_)[0].SaveSnapshot();
  EXPECT_EQ(client::ReasonOf(refused.status()), "SNAPSHOT_DIR_HANGS") << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("step 7 was not saved"),
                    HasSubstr(absl::StrCat("node ", GetParam() - 1, ": write to ", snapshots_))));
  const auto loaded = (*world_)[1].LoadSnapshot(3);
  EXPECT_EQ(client::ReasonOf(loaded.status()), "SNAPSHOT_DIR_HANGS") << loaded.status();
  ASSERT_TRUE(world_->StepUntil(10));
  ASSERT_TRUE(WaitFailed(3)) << "the one that falls due three steps later fails as well";
  EXPECT_EQ(world_->Weights(), undisturbed_[10]);
  EXPECT_EQ((*world_)[1].durable_step(), 3);

  Release();
  ASSERT_TRUE(group_.back()->WaitLogged("the snapshot directory answers again"));
  EXPECT_EQ(status.Get().snapshot_dir_hangs(), "");
  const auto saved = (*world_)[1].SaveSnapshot();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->step, 10);
  EXPECT_THAT(Directories(), ::testing::ElementsAre(StartsWith("step-000000000003."),
                                                    StartsWith("step-000000000010.")))
      << "nothing is left of those that failed";
  for (const auto& daemon : group_) daemon->Kill();
  Restart();
  EXPECT_EQ((*world_)[0].last_committed_step(), 10);
  EXPECT_EQ(world_->Weights(), undisturbed_[10]);
  ASSERT_TRUE(world_->StepUntil(kSteps));
  EXPECT_EQ(world_->Weights(), undisturbed_[kSteps]);
  world_->Close();
}

// What removes an ended job's snapshots has as much time as it likes.
TEST_F(HangingDiskTest, ASaveDoesNotWaitForTheRemovalOfAnEndedJobsSnapshots) {
  StartDaemons(1,
               {"--snapshot_timeout=700ms", "--snapshots_of_ended_jobs=1s", "--group_name=ours"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  HangAt("storage.fsync_directory");
  world_->Close();
  ASSERT_TRUE(driver_->WaitHeld());
  Start(MakeWorld({.ranks = 2, .job = "run8"}));
  ASSERT_TRUE(world_->StepUntil(1));
  const auto saved = (*world_)[0].SaveSnapshot();
  EXPECT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(group_[0]->WaitLogged("the snapshot directory hangs"));
  Release();
  EXPECT_TRUE(group_[0]->WaitLogged("the snapshots of an ended job are removed"));
  world_->Close();
}

TEST_F(HangingDiskTest, WhoWaitsForASnapshotThatHangsIsToldSo) {
  StartDaemons(1, {"--snapshot_timeout=700ms"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(2));
  HangAt("storage.fsync");
  const auto saved = (*world_)[0].SaveSnapshot();
  EXPECT_EQ(client::ReasonOf(saved.status()), "SNAPSHOT_DIR_HANGS") << saved.status();
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("fsync " + snapshots_));
  Release();
}

// The directory after what hung has come to its end has the old snapshot or the new one.
TEST_F(HangingDiskTest, WhatCompletesLateLeavesTheOldSnapshotOrTheNewOne) {
  int renewed = 0;
  for (const std::string point : {"storage.create", "storage.write", "storage.fsync",
                                  "storage.rename", "storage.fsync_directory"}) {
    for (int passing = 1; passing <= 3; ++passing) {
      SCOPED_TRACE(absl::StrCat(point, ", time ", passing));
      StartDaemons(1, {"--snapshot_timeout=700ms"});
      StartWorld();
      ASSERT_TRUE(world_->StepUntil(3));
      ASSERT_TRUE(WaitDurable(3));
      ASSERT_TRUE(world_->StepUntil(5));
      HangAt(point, passing);
      ASSERT_TRUE(world_->StepUntil(8));
      ASSERT_TRUE(WaitFailed(1));
      EXPECT_EQ(world_->Weights(), undisturbed_[8]);
      Release();
      ASSERT_TRUE(group_.back()->WaitLogged("the snapshot directory answers again"));
      group_[0]->Kill();
      Restart();
      const int64_t from = (*world_)[0].last_committed_step();
      EXPECT_THAT(from, AnyOf(3, 6));
      renewed += from == 6 ? 1 : 0;
      EXPECT_EQ(world_->Weights(), undisturbed_[from]);
      ASSERT_TRUE(world_->StepUntil(7));
      EXPECT_EQ(world_->Weights(), undisturbed_[7]);
      const auto saved = (*world_)[0].SaveSnapshot();
      EXPECT_TRUE(saved.ok()) << saved.status();
      world_->Close();
    }
  }
  EXPECT_GT(renewed, 0) << "a manifest's rename that completes late makes its snapshot exist";
  EXPECT_LT(renewed, 15) << "some must have hung before the manifest";
}

struct Departure {
  int nodes;
  std::string snapshot_timeout;
};
void PrintTo(const Departure& departure, std::ostream* out) {
  *out << departure.nodes << " nodes, --snapshot_timeout=" << departure.snapshot_timeout;
}
class DepartureTest : public HangingDiskTest, public ::testing::WithParamInterface<Departure> {};
// Noticed before the drain gives up, and not.
INSTANTIATE_TEST_SUITE_P(Departures, DepartureTest,
                         ::testing::Values(Departure{1, "700ms"}, Departure{1, "1h"},
                                           Departure{2, "700ms"}, Departure{2, "1h"}));

TEST_P(DepartureTest, ADaemonWhoseLastWriteHangsLeavesInTimeAndSaysWhatIsLost) {
  StartDaemons(GetParam().nodes, {"--snapshot_timeout=" + GetParam().snapshot_timeout,
                                  "--drain_timeout=3s", "--session_linger=60s"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(5));
  HangAt("storage.write");
  const auto began = steady_clock::now();
  EXPECT_EQ(group_.back()->Stop(), kNotSaved);
  // Half of the rest that is allowed for it: nothing but the write has hung.
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(3 + 5));
  EXPECT_THAT(
      group_.back()->Log(),
      AllOf(HasSubstr("the last steps are not in a snapshot"),
            HasSubstr("after_step=3 last_step=5"), HasSubstr("write to " + snapshots_),
            HasSubstr("leaving while the snapshot directory hangs"), HasSubstr("msg=left")));
  Release();
  for (const auto& daemon : group_) {
    if (daemon != group_.back()) daemon->Kill();
  }
  Restart();
  EXPECT_EQ((*world_)[0].last_committed_step(), 3);
  EXPECT_EQ(world_->Weights(), undisturbed_[3]);
  world_->Close();
}

TEST_F(HangingDiskTest, WhoOpensASessionIsToldThatTheDirectoryHangsAndOpensItWhenItAnswers) {
  StartDaemons(1, {"--snapshot_timeout=700ms"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  group_[0]->Kill();
  ASSERT_TRUE(group_[0]->StartAgain().ok());
  HangAt("storage.read");
  world_ = MakeWorld({.ranks = 2, .resume = Resume::kRequire});
  const absl::Status refused = world_->Start();
  EXPECT_EQ(client::ReasonOf(refused), "SNAPSHOT_DIR_HANGS") << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("node 0"), HasSubstr("read from " + snapshots_)));
  Release();
  ASSERT_TRUE(group_.back()->WaitLogged("the snapshot directory answers again"));
  world_ = MakeWorld({.ranks = 2, .resume = Resume::kRequire});
  const absl::Status started = world_->Start();
  ASSERT_TRUE(started.ok()) << started;
  EXPECT_EQ(world_->Weights(), undisturbed_[3]);
  world_->Close();
}

TEST_F(HangingDiskTest, WhoLoadsASnapshotIsToldThatTheDirectoryHangsAndNothingHasChanged) {
  StartDaemons(1, {"--snapshot_timeout=700ms"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(5));
  HangAt("storage.read");
  const auto loaded = (*world_)[0].LoadSnapshot(3);
  EXPECT_EQ(client::ReasonOf(loaded.status()), "SNAPSHOT_DIR_HANGS") << loaded.status();
  ASSERT_TRUE(world_->StepUntil(7)) << "a snapshot of step 6 is made meanwhile";
  ASSERT_TRUE(WaitDurable(6));
  EXPECT_EQ(world_->Weights(), undisturbed_[7]);
  Release();
  world_->Close();
}

// Memory is enough to go on with: nobody waits for the directory.
TEST_F(HangingDiskTest, AGroupWhoseLinkBreaksGoesOnWhileTheDirectoryHangs) {
  StartDaemons(2, {"--snapshot_timeout=700ms"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(5));
  HangAt("storage.read");
  ::kill(group_[1]->pid(), SIGSTOP);
  ASSERT_TRUE(DaemonStatus(group_[0]->address()).WaitFor([](const v1::GetStatusReply& reply) {
    return !reply.missing_nodes().empty();
  }));
  ::kill(group_[1]->pid(), SIGCONT);
  ASSERT_TRUE(world_->StepUntil(7));
  EXPECT_EQ(world_->Weights(), undisturbed_[7]);
  EXPECT_FALSE(driver_->held()) << "the disk was read";
  Release();
  world_->Close();
}

TEST_F(HangingDiskTest, AGroupThatLosesADaemonWhileTheDirectoryHangsEndsTheJobAndNotItsSnapshots) {
  StartDaemons(2, {"--snapshot_timeout=700ms"});
  StartWorldOfNode0();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(5));
  // Later than it reads what the other one has put there to be let in.
  HangAt("storage.read", 1, group_[0]->pid(), "daemon.member_state");
  ReplaceDaemon(1);
  const auto outcome = world_->Step();
  EXPECT_EQ(client::ReasonOf(outcome.status()), "PEER_LOST") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()),
              AllOf(HasSubstr("whether there is a snapshot cannot be said"),
                    HasSubstr("read from " + snapshots_)));
  Release();
  ASSERT_TRUE(group_[0]->WaitLogged("the snapshot directory answers again"));
  world_.reset();
  StartWorldOfNode0(Resume::kRequire);
  EXPECT_EQ((*world_)[0].last_committed_step(), 3);
  EXPECT_EQ(world_->Weights(), undisturbed_[3]);
  world_->Close();
}

// A disk that is slow, not one that hangs: what is left of the snapshot would take longer than the
// group waits.
TEST_F(HangingDiskTest, AJobThatGoesBackDoesNotWaitForASnapshotThatNobodyWants) {
  StartDaemons(2, {"--snapshot_timeout=1h", "--register_timeout=20s"});
  StartWorldOfNode0();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  HangAt("storage.write", 1, group_[0]->pid());
  ASSERT_TRUE(world_->StepUntil(7)) << "the state of step 6 is copied, and not written";
  ASSERT_TRUE(driver_->WaitHeld());
  ReplaceDaemon(1);
  ASSERT_TRUE(group_[0]->WaitLogged("the job goes back to a snapshot"));
  Release();
  HangAt("storage.fsync", 1, group_[0]->pid());
  ExpectGoesOnFrom(3);
  EXPECT_FALSE(driver_->held()) << "the rest was written, and synced";
  Release();
  world_->Close();
}

// That an fsync hangs is known after minutes; a group gives up who gets nothing done sooner.
TEST_F(HangingDiskTest, AJobGoesBackWhileAWriteHangsAndWhatIsNewerCountsNoMore) {
  StartDaemons(1, {"--snapshot_timeout=1h", "--register_timeout=20s"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(6));
  ASSERT_TRUE(WaitDurable(6));
  HangAt("storage.fsync");
  ASSERT_TRUE(world_->StepUntil(9));
  ASSERT_TRUE(driver_->WaitHeld());
  const auto loaded = (*world_)[0].LoadSnapshot(3);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ExpectGoesOnFrom(3);
  // Whoever ends now has gone back, whatever becomes of the write.
  group_[0]->Kill();
  Release();
  Restart();
  EXPECT_EQ((*world_)[0].last_committed_step(), 3);
  world_->Close();
}

// The last thing of a snapshot, and the first that would make it count after all.
TEST_F(HangingDiskTest, AManifestThatCompletesAfterTheJobHasGoneBackCountsNoMore) {
  StartDaemons(1, {"--snapshot_timeout=1h", "--register_timeout=20s"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  ASSERT_TRUE(world_->StepUntil(5));
  HangAt("storage.rename", 3);
  ASSERT_TRUE(world_->StepUntil(6));
  ASSERT_TRUE(driver_->WaitHeld()) << "after those of a lane's file and of the trainers' states";
  ASSERT_TRUE((*world_)[0].LoadSnapshot(3).ok());
  ExpectGoesOnFrom(3);
  Release();
  const auto saved = (*world_)[0].SaveSnapshot();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->step, 5);
  group_[0]->Kill();
  Restart();
  EXPECT_EQ((*world_)[0].last_committed_step(), 5);
  EXPECT_THAT(Directories(), ::testing::Contains(StartsWith("step-000000000006.")));
  const auto set_aside = (*world_)[0].LoadSnapshot(6);
  EXPECT_THAT(std::string(set_aside.status().message()), HasSubstr("no snapshot of step 6"));
  world_->Close();
}

// It would be told to a coordinator that is gone.
TEST_F(HangingDiskTest, ASessionWhoseDaemonLosesItsGroupMeanwhileBeginsInTheNextGroup) {
  StartDaemons(2);
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(WaitDurable(3));
  world_->Close();
  HangAt("storage.read");
  world_ = WorldOf(1, Resume::kRequire);
  std::future<absl::Status> started =
      std::async(std::launch::async, [this] { return world_->Start(); });
  ASSERT_TRUE(driver_->WaitHeld());
  group_[0]->Kill();
  EXPECT_TRUE(group_.back()->WaitLogged("joining again"));
  Release();
  ASSERT_TRUE(group_[0]->StartAgain().ok());
  const absl::Status status = started.get();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ((*world_)[0].last_committed_step(), 3);
  ASSERT_TRUE(world_->StepUntil(5));
  EXPECT_EQ(world_->Weights(), undisturbed_[5]);
  world_->Close();
}

// A daemon that joins shows that it has the same directory: node 0 reads what it wrote there.
TEST_F(HangingDiskTest, ADaemonLeavesInTimeWhoeverElseHangsInTheDirectory) {
  StartDaemons(2);
  group_[1]->Kill();
  HangAt("storage.read", 1, group_[0]->pid());
  ASSERT_TRUE(group_[1]->StartAgain().ok());
  ASSERT_TRUE(driver_->WaitHeld());
  const auto began = steady_clock::now();
  EXPECT_EQ(group_[0]->Stop(), 0) << "nothing is lost";
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(15));
  EXPECT_THAT(group_[0]->Log(), HasSubstr("leaving without those who do not end"));
}

TEST_F(HangingDiskTest, ASecondSignalEndsADaemonAtOnceWhateverHangs) {
  StartDaemons(1, {"--snapshot_timeout=1h", "--drain_timeout=1h"});
  StartWorld();
  ASSERT_TRUE(world_->StepUntil(2));
  HangAt("storage.write");
  ::kill(group_[0]->pid(), SIGTERM);
  ::kill(group_[0]->pid(), SIGINT);  // so soon that it is the same wish
  ASSERT_TRUE(driver_->WaitHeld());
  EXPECT_EQ(group_[0]->Wait(std::chrono::milliseconds(600)), -1);
  ::kill(group_[0]->pid(), SIGTERM);
  EXPECT_EQ(group_[0]->Wait(std::chrono::seconds(10)), 1);
  EXPECT_THAT(group_[0]->Log(), HasSubstr("a second signal: ending at once"));
}

// The coordinator ends between the manifest and the news of it. Nobody can tell the other daemon
// that its state is saved, but the directory.
TEST_F(HangingDiskTest, WhoLeavesFindsTheSnapshotOfWhichADeadCoordinatorSaidNothing) {
  StartDaemons(2, {"--drain_timeout=30s"});
  StartWorld();
  // The lane's file, the trainers' file and the manifest are renamed, and the directory synced.
  HangAt("storage.fsync_directory", 3, group_[0]->pid(), /*after=*/"storage.rename");
  ASSERT_TRUE(world_->StepUntil(3));
  ASSERT_TRUE(driver_->WaitHeld());
  ASSERT_THAT(Directories(), ::testing::SizeIs(1));
  ASSERT_TRUE(std::filesystem::exists(
      absl::StrCat(snapshots_, "/run7/", Directories().front(), "/manifest.json")));
  group_[0]->Kill();
  const auto begun = steady_clock::now();
  EXPECT_EQ(group_[1]->Stop(), 0);
  EXPECT_LT(steady_clock::now() - begun, std::chrono::seconds(20));
  EXPECT_THAT(group_[1]->Log(), ::testing::Not(HasSubstr("not in a snapshot")));
}

}  // namespace
}  // namespace dmuond::testing
