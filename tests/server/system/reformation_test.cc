// Lanes that die, and groups that break and form anew with all their memory: no step is lost, and
// the run is the undisturbed one bit for bit.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/client/example_runs.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/disk_driver.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class ReformationTest : public ExampleRuns {
 protected:
  pid_t LanePid(int node, int lane) {
    const v1::GetStatusReply status = DaemonStatus(daemon(node).address()).Get();
    EXPECT_GT(status.lanes_size(), lane);
    return lane < status.lanes_size() ? static_cast<pid_t>(status.lanes(lane).pid()) : 0;
  }
  // Signals a lane when the trainer has printed so many steps, and waits for two more.
  void HurtLane(int node, int lane, int signal, const Trainer& trainer, size_t steps) {
    WaitForSteps(trainer, steps);
    const pid_t pid = LanePid(node, lane);
    ASSERT_GT(pid, 0);
    const size_t before = Steps(trainer.output).size();
    const auto hurt = Clock::now();
    ASSERT_EQ(::kill(pid, signal), 0);
    // The step that is under way may be through already; the one after it is not.
    WaitForSteps(trainer, before + 2);
    const auto back = Clock::now() - hurt;
    RecordProperty("back_ms", static_cast<int>(back / milliseconds(1)));
    EXPECT_LT(back, std::chrono::seconds(10));
  }
  void ExpectUndisturbed(std::vector<Trainer>& trainers, const std::vector<Lines>& expected) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ExpectEnd(trainers[rank]);
      EXPECT_EQ(Steps(trainers[rank].output), expected[rank]);
    }
  }
};

TEST_F(ReformationTest, KilledLanesOfOneDaemonAreReplaced) {
  StartDaemons();
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  HurtLane(0, 0, SIGKILL, trainers[0], 20);
  HurtLane(0, 1, SIGKILL, trainers[0], 50);
  HurtLane(0, 0, SIGSEGV, trainers[1], 80);
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

TEST_F(ReformationTest, KilledLanesOfAGroupAreReplaced) {
  StartDaemons(2);
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  HurtLane(0, 0, SIGKILL, trainers[0], 20);
  HurtLane(1, 1, SIGKILL, trainers[0], 50);
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

TEST_F(ReformationTest, ATrainerAndALaneTogether) {
  StartDaemons();
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  KillAt(trainers[1], 30);
  ASSERT_EQ(::kill(LanePid(0, 1), SIGKILL), 0);
  trainers[1] = Start(1, {"--resume"});
  ExpectEnd(trainers[0]);
  ExpectEnd(trainers[1]);
  EXPECT_EQ(Steps(trainers[0].output), expected[0]);
  const Lines last = Steps(trainers[1].output);
  EXPECT_EQ(last,
            Lines(expected[1].end() - static_cast<ptrdiff_t>(last.size()), expected[1].end()));
  ExpectDaemonsLeave();
}

TEST_F(ReformationTest, AStoppedMemberComesBackWithItsMemory) {
  StartDaemons(2);
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  for (const int node : {1, 0}) {
    WaitForSteps(trainers[0], Steps(trainers[0].output).size() + 20);
    ASSERT_EQ(::kill(daemon(node).pid(), SIGSTOP), 0);
    ASSERT_TRUE(daemon(1 - node).WaitLogged("the job waits for the group"));
    ASSERT_EQ(::kill(daemon(node).pid(), SIGCONT), 0);
    WaitForSteps(trainers[0], Steps(trainers[0].output).size() + 2);
  }
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

// Node 1 cuts its links as it hears that a step is decided, and once more as it says what it holds.
// What node 0 has heard between the two, that every rank has left, is told again.
TEST_F(ReformationTest, AJobWhoseRanksLeaveBetweenTwoCutsEndsWhenTheGroupHasFormedAnew) {
  std::atomic<pid_t> node1 = 0;
  std::atomic<int> decisions = 0;  // that node 1 has heard: a push, then a step
  DiskDriver driver(
      directory_ + "/driver",
      [&](pid_t pid, const std::string& point) -> std::string {
        if (pid != node1) return "go";
        if (point == "daemon.broken") return decisions == 2 ? "hold" : "go";
        if (point == "daemon.decision") return ++decisions == 2 ? "cut tcp" : "go";
        if (decisions != 2) return "go";
        decisions = 3;
        return "cut tcp";  // daemon.member_state
      },
      "daemon.decision,daemon.broken,daemon.member_state");
  StartDaemons(2);
  node1 = daemon(1).pid();
  {
    RawTrainer alone(daemon(0).address());
    ASSERT_TRUE(alone.Open().ok());
    ASSERT_TRUE(alone.Register().ok());
    ASSERT_TRUE(alone.Attach().ok());
    ASSERT_TRUE(alone.Push().ok());
    ASSERT_TRUE(alone.Step(1).ok());
    ASSERT_TRUE(driver.WaitHeld());
    ASSERT_TRUE(daemon(0).WaitLogged("the job waits for the group"));
    ASSERT_TRUE(alone.Close().ok());
  }
  driver.Release();
  ASSERT_TRUE(DaemonStatus(daemon(0).address()).WaitForNoJob());
  ExpectDaemonsLeave();
}

TEST_F(ReformationTest, ALostDaemonWithoutASnapshotEndsTheJobNamingWhatIsLost) {
  StartDaemons(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  daemons_[1]->Kill();
  ASSERT_TRUE(daemon(0).WaitLogged("the job waits for the group"));
  // Its successor has nothing.
  auto successor = DaemonProcess::Start(
      {.devices = "cpu:2", .flags = GroupFlags(1, 2, coordinator_), .wait_for = "live"});
  ASSERT_TRUE(successor.ok()) << successor.status();
  EXPECT_EQ(trainers[0].process->Wait(kPatience), 1);
  EXPECT_TRUE(absl::StrContains(Text(trainers[0].output), "STATE_LOST"))
      << Text(trainers[0].output);
  EXPECT_TRUE(absl::StrContains(Text(trainers[0].output), "node 1")) << Text(trainers[0].output);
  daemons_[1] = *std::move(successor);
  trainers[1].process->Signal(SIGKILL);
  trainers[1].process->Wait(kPatience);
  // The group serves the next job.
  EXPECT_EQ(Undisturbed().size(), kRanks);
}

}  // namespace
}  // namespace dmuond::testing
