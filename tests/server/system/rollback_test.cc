// Daemons that die and have successors, and snapshots that are loaded into a running job: trainers
// live on, the job goes back to a snapshot, and from there the run is the undisturbed one bit for
// bit.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/client/example_runs.h"
#include "tests/server/system/daemon_status.h"

namespace dmuond::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kSnapshotEvery = 20;

// The last line that a trainer has printed of each step.
std::map<int, std::string> LastOfEachStep(const std::string& path) {
  std::map<int, std::string> lines;
  for (const std::string& line : Steps(path)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    int step = 0;
    EXPECT_TRUE(absl::SimpleAtoi(words[1], &step)) << line;
    lines[step] = line;
  }
  return lines;
}

int TimesBack(const std::string& path) {
  std::ifstream file(path);
  int times = 0;
  for (std::string line; std::getline(file, line);) times += absl::StartsWith(line, "back to ");
  return times;
}

class RollbackTest : public ExampleRuns {
 protected:
  // Starts daemons that make snapshots. The undisturbed run, which has had daemons of its own.
  std::vector<Lines> StartWithSnapshots(int nodes) {
    StartDaemons(nodes);
    std::vector<Lines> expected = Undisturbed();
    ExpectDaemonsLeave();
    daemons_.clear();
    StartDaemons(nodes, "cpu:2",
                 {absl::StrCat("--snapshot_dir=", directory_, "/snapshots"),
                  absl::StrCat("--snapshot_every_steps=", kSnapshotEvery)});
    return expected;
  }
  void WaitForSnapshot() {
    ASSERT_TRUE(Until([&] {
      return DaemonStatus(daemon().address()).Get().job().durable_step() >= kSnapshotEvery;
    }));
  }
  // Kills a node's daemon in mid-run and starts its successor.
  void ReplaceDaemon(int node, const Trainer& trainer) {
    const int before = TimesBack(trainer.output);
    const auto killed = Clock::now();
    daemon(node).Kill();
    const absl::Status again = daemon(node).StartAgain();
    ASSERT_TRUE(again.ok()) << again;
    ASSERT_TRUE(Until([&] { return TimesBack(trainer.output) > before; }))
        << Text(trainer.output) << daemon(node).Log();
    RecordProperty("back_ms", static_cast<int>((Clock::now() - killed) / milliseconds(1)));
  }
  void ExpectUndisturbed(std::vector<Trainer>& trainers, const std::vector<Lines>& expected) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ExpectEnd(trainers[rank]);
      Lines last;
      for (const auto& [step, line] : LastOfEachStep(trainers[rank].output)) last.push_back(line);
      EXPECT_EQ(last, expected[rank]) << Text(trainers[rank].output);
    }
  }
};

TEST_F(RollbackTest, TheOnlyDaemonHasASuccessor) {
  const std::vector<Lines> expected = StartWithSnapshots(1);
  std::vector<Trainer> trainers = StartAll();
  WaitForSnapshot();
  ReplaceDaemon(0, trainers[0]);
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

TEST_F(RollbackTest, AMemberHasASuccessor) {
  const std::vector<Lines> expected = StartWithSnapshots(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSnapshot();
  ReplaceDaemon(1, trainers[0]);
  WaitForSteps(trainers[1], Steps(trainers[1].output).size() + 5);
  ReplaceDaemon(1, trainers[1]);
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

TEST_F(RollbackTest, TheCoordinatorHasASuccessor) {
  const std::vector<Lines> expected = StartWithSnapshots(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSnapshot();
  ReplaceDaemon(0, trainers[1]);
  ExpectUndisturbed(trainers, expected);
  ExpectDaemonsLeave();
}

TEST_F(RollbackTest, ADaemonAndATrainerOfAnotherNodeTogether) {
  const std::vector<Lines> expected = StartWithSnapshots(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSnapshot();
  daemon(1).Kill();
  trainers[0].process->Signal(SIGKILL);
  ASSERT_EQ(trainers[0].process->Wait(kPatience), 128 + SIGKILL);
  const absl::Status again = daemon(1).StartAgain();
  ASSERT_TRUE(again.ok()) << again;
  trainers[0] = Start(0, {"--resume"});
  ExpectEnd(trainers[0]);
  ExpectEnd(trainers[1]);
  const auto last = LastOfEachStep(trainers[0].output);
  ASSERT_FALSE(last.empty());
  EXPECT_EQ(last.begin()->first % kSnapshotEvery, 1) << "it begins after a snapshot";
  for (const auto& [step, line] : last) EXPECT_EQ(line, expected[0][step - 1]);
  ExpectDaemonsLeave();
}

TEST_F(RollbackTest, ASnapshotIsLoadedIntoTheRunningJob) {
  const std::vector<Lines> expected = StartWithSnapshots(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSnapshot();
  auto ctl = ChildProcess::Start(
      "dmuonctl", {"snapshot", "load", "--address=" + daemon(1).address()}, directory_ + "/ctl");
  ASSERT_TRUE(ctl.ok()) << ctl.status();
  EXPECT_EQ((*ctl)->Wait(kPatience), 0) << Text(directory_ + "/ctl");
  EXPECT_TRUE(absl::StrContains(Text(directory_ + "/ctl"), "goes back to step"));
  ExpectUndisturbed(trainers, expected);
  EXPECT_EQ(TimesBack(trainers[0].output), 1) << Text(trainers[0].output);
  EXPECT_EQ(TimesBack(trainers[1].output), 1) << Text(trainers[1].output);
  ExpectDaemonsLeave();
}

TEST_F(RollbackTest, ADaemonThatLeavesSavesItsLastStep) {
  const std::vector<Lines> expected = StartWithSnapshots(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 30);
  EXPECT_EQ(daemon(1).Stop(), 0);
  const int64_t committed = DaemonStatus(daemon(0).address()).Get().job().last_committed_step();
  const absl::Status again = daemon(1).StartAgain();
  ASSERT_TRUE(again.ok()) << again;
  ExpectUndisturbed(trainers, expected);
  EXPECT_TRUE(
      absl::StrContains(Text(trainers[0].output), absl::StrCat("back to ", committed, "\n")))
      << committed << "\n"
      << Text(trainers[0].output);
  ExpectDaemonsLeave();
}

}  // namespace
}  // namespace dmuond::testing
