// Daemons that die and have successors, and snapshots that are loaded into a running job: trainers
// live on, the job goes back to a snapshot, and from there the run is the undisturbed one bit for
// bit.
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/server/system/rollback_runs.h"

namespace dmuond::testing {
namespace {

using RollbackTest = RollbackRuns;

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

}  // namespace
}  // namespace dmuond::testing
