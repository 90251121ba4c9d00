// Trainers that die, and others that take their places: the example trainer in real processes.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/client/example_runs.h"

namespace dmuond::testing {
namespace {

using std::chrono::milliseconds;

class ReplacementTest : public ExampleRuns {};

TEST_F(ReplacementTest, AReplacedTrainersRunIsTheUndisturbedOneBitForBit) {
  StartDaemons();
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  // Thrice, each time somewhere in a step: after so many steps of its own.
  for (const size_t own : {60, 1, 14}) {
    KillAt(trainers[1], own);
    const auto killed = std::chrono::steady_clock::now();
    trainers[1] = Start(1, {"--resume"});
    ASSERT_TRUE(Until([&] { return !Steps(trainers[1].output).empty(); })) << daemon().Log();
    const auto back = std::chrono::steady_clock::now() - killed;
    RecordProperty("back_ms", static_cast<int>(back / milliseconds(1)));
    EXPECT_LT(back, std::chrono::seconds(20));
  }
  ExpectEnd(trainers[0]);
  ExpectEnd(trainers[1]);
  EXPECT_EQ(Steps(trainers[0].output), expected[0]);
  // The dead ones may have committed a step that they did not live to print.
  const Lines last = Steps(trainers[1].output);
  ASSERT_FALSE(last.empty());
  EXPECT_EQ(last,
            Lines(expected[1].end() - static_cast<ptrdiff_t>(last.size()), expected[1].end()));
  ExpectDaemonsLeave();
}

TEST_F(ReplacementTest, AllTrainersDeadAndReplacedGoOnWhereTheyWere) {
  StartDaemons();
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  KillAt(trainers[0], 50);
  trainers[1].process->Signal(SIGKILL);
  ASSERT_EQ(trainers[1].process->Wait(kPatience), 128 + SIGKILL);
  for (int rank = 0; rank < kRanks; ++rank) trainers[rank] = Start(rank, {"--resume"});
  for (int rank = 0; rank < kRanks; ++rank) {
    ExpectEnd(trainers[rank]);
    const Lines last = Steps(trainers[rank].output);
    ASSERT_GT(last.size(), 0);
    ASSERT_LT(last.size(), kSteps - 40);
    EXPECT_EQ(last, Lines(expected[rank].end() - static_cast<ptrdiff_t>(last.size()),
                          expected[rank].end()));
  }
  ExpectDaemonsLeave();
}

TEST_F(ReplacementTest, WithoutAReplacementTheOthersAreToldWhenTheLingerEnds) {
  StartDaemons(1, "cpu:2", {"--session_linger=300ms"});
  std::vector<Trainer> trainers = StartAll();
  KillAt(trainers[1], 5);
  EXPECT_EQ(trainers[0].process->Wait(kPatience), 1);
  const std::string words = Text(trainers[0].output);
  EXPECT_TRUE(absl::StrContains(words, "rank 1")) << words;
  EXPECT_TRUE(absl::StrContains(words, "no replacement came within 300 ms")) << words;
  // The job is over: its name is free.
  EXPECT_EQ(Undisturbed().size(), kRanks);
  ExpectDaemonsLeave();
}

TEST_F(ReplacementTest, AnotherLayoutOrAFreshStartIsRefusedAndTheRightOneGoesOn) {
  StartDaemons();
  std::vector<Trainer> trainers = StartAll();
  KillAt(trainers[1], 5);
  Trainer fresh = Start(1);
  EXPECT_EQ(fresh.process->Wait(kPatience), 1);
  EXPECT_TRUE(absl::StrContains(Text(fresh.output), "JOB_HAS_STATE")) << Text(fresh.output);
  Trainer wider = Start(1, {"--resume", "--hidden=48"});
  EXPECT_EQ(wider.process->Wait(kPatience), 1);
  EXPECT_TRUE(absl::StrContains(Text(wider.output), "LAYOUT_DIFFERS")) << Text(wider.output);
  EXPECT_TRUE(absl::StrContains(Text(wider.output), "layer0.weight")) << Text(wider.output);
  trainers[1] = Start(1, {"--resume"});
  ExpectEnd(trainers[0]);
  ExpectEnd(trainers[1]);
  ExpectDaemonsLeave();
}

TEST_F(ReplacementTest, AStoppedTrainerCountsAsDeadAndMustEndBeforeItIsReplaced) {
  StartDaemons(1, "cpu:2", {"--step_timeout=2s", "--register_timeout=4s"});
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[1], 5);
  trainers[1].process->Signal(SIGSTOP);
  ASSERT_TRUE(daemon().WaitLogged("counts as dead"));
  // It waits: the stopped one could still write into the memory that both would have.
  Trainer early = Start(1, {"--resume"});
  EXPECT_NE(early.process->Wait(kPatience), 0);
  EXPECT_TRUE(absl::StrContains(Text(early.output), "PREDECESSOR_RUNS")) << Text(early.output);
  Trainer successor = Start(1, {"--resume"});
  trainers[1].process->Signal(SIGKILL);
  trainers[1].process->Wait(kPatience);
  ExpectEnd(trainers[0]);
  ExpectEnd(successor);
  ExpectDaemonsLeave();
}

}  // namespace
}  // namespace dmuond::testing
