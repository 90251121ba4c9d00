// Daemons that die, and are started again: their trainers go on from the newest snapshot, and end
// where the undisturbed run ends. The example trainer in real processes.
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/example_runs.h"

namespace dmuond::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kEvery = 50;
constexpr int kLong = 1500;  // a snapshot is durable long before the end

// What each step was in the end: one that was gone over again counts anew.
using ByStep = std::map<std::string, std::string>;

ByStep StepsOf(const std::string& output) {
  ByStep steps;
  for (const std::string& line : Steps(output)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    steps[words[1]] = line;
  }
  return steps;
}

// The steps that a trainer was set back to.
std::vector<int> Returns(const std::string& output) {
  std::vector<int> returns;
  std::ifstream file(output);
  for (std::string line; std::getline(file, line);) {
    int step = 0;
    if (absl::StartsWith(line, "back to ") && absl::SimpleAtoi(line.substr(8), &step)) {
      returns.push_back(step);
    }
  }
  return returns;
}

class SurvivalTest : public ExampleRuns {
 protected:
  void StartGroup(int nodes) {
    StartDaemons(nodes, "cpu:2",
                 {"--snapshot_dir=" + directory_, absl::StrCat("--snapshot_every_steps=", kEvery)});
  }
  Trainer StartTrainer(int rank, const std::string& job, std::vector<std::string> flags = {}) {
    flags.insert(flags.end(), {"--job=" + job, "--batch_rows=16", absl::StrCat("--steps=", kLong)});
    return Start(rank, flags);
  }
  std::vector<Trainer> StartTrainers(const std::string& job) {
    std::vector<Trainer> trainers;
    for (int rank = 0; rank < kRanks; ++rank) trainers.push_back(StartTrainer(rank, job));
    return trainers;
  }
  // The trainers of a run, before which there was an undisturbed one: of any group, for they all
  // have its bits.
  std::vector<Trainer> StartBoth() {
    if (expected_.empty()) {
      for (Trainer& trainer : StartTrainers("undisturbed")) {
        ExpectEnd(trainer);
        expected_.push_back(StepsOf(trainer.output));
        EXPECT_THAT(expected_.back(), SizeIs(kLong));
      }
    }
    return StartTrainers("hurt");
  }
  [[nodiscard]] bool HasSnapshot(const std::string& job) const {
    std::error_code ignored;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat(directory_, "/", job), ignored)) {
      if (std::filesystem::exists(entry.path() / "manifest.json")) return true;
    }
    return false;
  }
  void KillAndStartAgain(int node) {
    daemon(node).Kill();
    const absl::Status again = daemon(node).StartAgain();
    ASSERT_TRUE(again.ok()) << again;
  }
  // How often the trainers were set back, all alike.
  std::vector<int> ExpectTheSameRun(std::vector<Trainer>& trainers) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ExpectEnd(trainers[rank]);
      EXPECT_EQ(StepsOf(trainers[rank].output), expected_[rank]) << Text(trainers[rank].output);
    }
    EXPECT_EQ(Returns(trainers[0].output), Returns(trainers[1].output));
    return Returns(trainers[0].output);
  }

  static inline std::vector<ByStep> expected_;  // by rank
};

TEST_F(SurvivalTest, AKilledDaemonSetsTheRunBackToItsNewestSnapshot) {
  StartGroup(1);
  std::vector<Trainer> trainers = StartBoth();
  ASSERT_TRUE(Until([this] { return HasSnapshot("hurt"); }));
  WaitForSteps(trainers[0], kEvery + 5);  // at the snapshot's own step there is nothing to go back
  KillAndStartAgain(0);
  const std::vector<int> returns = ExpectTheSameRun(trainers);
  ASSERT_THAT(returns, SizeIs(1));
  EXPECT_EQ(returns[0] % kEvery, 0);
  EXPECT_GE(returns[0], 50);
  EXPECT_THAT(Text(trainers[0].output), HasSubstr("s for its successor"));
  ExpectDaemonsLeave();
}

TEST_F(SurvivalTest, ADaemonThatIsToldToLeaveLosesNoStep) {
  StartGroup(1);
  std::vector<Trainer> trainers = StartBoth();
  WaitForSteps(trainers[0], 120);
  ASSERT_EQ(daemon().Stop(), 0);
  const absl::Status again = daemon().StartAgain();
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_THAT(ExpectTheSameRun(trainers), IsEmpty()) << "both stand where the snapshot does";
  EXPECT_THAT(Text(trainers[0].output), HasSubstr("with the daemon's successor; nothing is lost"));
  ExpectDaemonsLeave();
}

TEST_F(SurvivalTest, ATrainerAndItsDaemonMayDieTogether) {
  StartGroup(1);
  std::vector<Trainer> trainers = StartBoth();
  ASSERT_TRUE(Until([this] { return HasSnapshot("hurt"); }));
  WaitForSteps(trainers[0], kEvery + 5);
  trainers[1].process->Signal(SIGKILL);
  KillAndStartAgain(0);
  ASSERT_EQ(trainers[1].process->Wait(kPatience), 128 + SIGKILL);
  trainers[1] = StartTrainer(1, "hurt", {"--resume"});
  for (Trainer& trainer : trainers) ExpectEnd(trainer);
  EXPECT_EQ(StepsOf(trainers[0].output), expected_[0]) << Text(trainers[0].output);
  const std::vector<int> returns = Returns(trainers[0].output);
  ASSERT_THAT(returns, SizeIs(1));
  const ByStep after = StepsOf(trainers[1].output);
  EXPECT_EQ(after.size(), static_cast<size_t>(kLong - returns[0]));
  for (const auto& [step, line] : after) EXPECT_EQ(line, expected_[1][step]);
  ExpectDaemonsLeave();
}

TEST_F(SurvivalTest, ATrainerAndTheOtherNodesDaemonMayDieTogether) {
  StartGroup(2);
  std::vector<Trainer> trainers = StartBoth();
  for (const int node : {0, 1}) {
    ASSERT_TRUE(Until([this] { return HasSnapshot("hurt"); }));
    const size_t before = Steps(trainers[1].output).size();
    trainers[0].process->Signal(SIGKILL);
    KillAndStartAgain(node);
    ASSERT_EQ(trainers[0].process->Wait(kPatience), 128 + SIGKILL);
    trainers[0] = StartTrainer(0, "hurt", {"--resume"});
    ASSERT_TRUE(Until([&] { return Steps(trainers[1].output).size() > before + 1; }))
        << Text(trainers[1].output);
  }
  for (Trainer& trainer : trainers) ExpectEnd(trainer);
  EXPECT_EQ(StepsOf(trainers[1].output), expected_[1]) << Text(trainers[1].output);
  const ByStep after = StepsOf(trainers[0].output);
  EXPECT_FALSE(after.empty());
  for (const auto& [step, line] : after) EXPECT_EQ(line, expected_[0][step]);
  ExpectDaemonsLeave();
}

TEST_F(SurvivalTest, WithoutASnapshotTheTrainersSayWhatIsLost) {
  StartDaemons();
  std::vector<Trainer> trainers = StartTrainers("hurt");
  WaitForSteps(trainers[0], 50);
  KillAndStartAgain(0);
  for (Trainer& trainer : trainers) {
    EXPECT_EQ(trainer.process->Wait(kPatience), 1);
    EXPECT_THAT(Text(trainer.output), HasSubstr("STATE_LOST"));
    EXPECT_THAT(Text(trainer.output), HasSubstr("newest snapshot: none is known"));
  }
  ExpectDaemonsLeave();
}

}  // namespace
}  // namespace dmuond::testing
