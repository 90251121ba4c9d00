// Trainers that die, and others that take their places: the example trainer in real processes.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/client/daemon_process.h"

namespace dmuond {
namespace {

using std::chrono::milliseconds;
using testing::ChildProcess;
using testing::DaemonProcess;

constexpr int kSteps = 400;
constexpr int kRanks = 2;
constexpr std::chrono::seconds kPatience{60};

using Lines = std::vector<std::string>;

// What a trainer has printed of its steps so far.
Lines Steps(const std::string& path) {
  std::ifstream file(path);
  Lines lines;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (absl::StartsWith(line, "step ")) lines.push_back(line);
  }
  return lines;
}

std::string Text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool Until(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));  // between looks, not instead of them
  }
  return true;
}

class ReplacementTest : public ::testing::Test {
 protected:
  struct Trainer {
    std::unique_ptr<ChildProcess> process;
    std::string output;
  };

  void SetUp() override {
    std::string directory = std::filesystem::temp_directory_path() / "dmuond-replaced-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
  }
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
    std::filesystem::remove_all(directory_);
  }

  void StartDaemon(std::vector<std::string> flags = {}) {
    auto daemon = DaemonProcess::Start({.devices = "cpu:2", .flags = std::move(flags)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  Trainer Start(int rank, std::vector<std::string> flags = {}) {
    Trainer trainer{nullptr, absl::StrCat(directory_, "/", started_++)};
    std::vector<std::string> all = {"--address=" + daemon_->address(),
                                    absl::StrCat("--rank=", rank),
                                    absl::StrCat("--world_size=", kRanks),
                                    absl::StrCat("--steps=", kSteps), "--learning_rate=0.002"};
    all.insert(all.end(), flags.begin(), flags.end());
    auto process = ChildProcess::Start("dmuond-example-trainer", all, trainer.output);
    EXPECT_TRUE(process.ok()) << process.status();
    trainer.process = *std::move(process);
    return trainer;
  }
  std::vector<Trainer> StartAll() {
    std::vector<Trainer> trainers;
    for (int rank = 0; rank < kRanks; ++rank) trainers.push_back(Start(rank));
    return trainers;
  }
  static void ExpectEnd(Trainer& trainer) {
    EXPECT_EQ(trainer.process->Wait(kPatience), 0) << Text(trainer.output);
  }
  // Every rank's steps in a run that nothing disturbs.
  std::vector<Lines> Undisturbed() {
    std::vector<Trainer> trainers = StartAll();
    std::vector<Lines> runs;
    for (Trainer& trainer : trainers) {
      ExpectEnd(trainer);
      runs.push_back(Steps(trainer.output));
      EXPECT_EQ(runs.back().size(), kSteps);
    }
    return runs;
  }
  static void KillAt(Trainer& trainer, size_t steps) {
    ASSERT_TRUE(Until([&] { return Steps(trainer.output).size() >= steps; }));
    trainer.process->Signal(SIGKILL);
    EXPECT_EQ(trainer.process->Wait(kPatience), 128 + SIGKILL);
  }

  std::string directory_;
  int started_ = 0;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(ReplacementTest, AReplacedTrainersRunIsTheUndisturbedOneBitForBit) {
  StartDaemon();
  const std::vector<Lines> expected = Undisturbed();
  std::vector<Trainer> trainers = StartAll();
  Lines steps;
  // Thrice, each time somewhere in a step.
  for (const size_t at : {60, 61, 75}) {
    KillAt(trainers[1], at - steps.size());
    const Lines before = Steps(trainers[1].output);
    steps.insert(steps.end(), before.begin(), before.end());
    const auto killed = std::chrono::steady_clock::now();
    trainers[1] = Start(1, {"--resume"});
    ASSERT_TRUE(Until([&] { return !Steps(trainers[1].output).empty(); })) << daemon_->Log();
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
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(ReplacementTest, AllTrainersDeadAndReplacedGoOnWhereTheyWere) {
  StartDaemon();
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
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(ReplacementTest, WithoutAReplacementTheOthersAreToldWhenTheLingerEnds) {
  StartDaemon({"--session_linger=300ms"});
  std::vector<Trainer> trainers = StartAll();
  KillAt(trainers[1], 5);
  EXPECT_EQ(trainers[0].process->Wait(kPatience), 1);
  const std::string words = Text(trainers[0].output);
  EXPECT_TRUE(absl::StrContains(words, "rank 1")) << words;
  EXPECT_TRUE(absl::StrContains(words, "no replacement came within 300 ms")) << words;
  // The job is over: its name is free.
  EXPECT_EQ(Undisturbed().size(), kRanks);
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(ReplacementTest, AnotherLayoutOrAFreshStartIsRefusedAndTheRightOneGoesOn) {
  StartDaemon();
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
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(ReplacementTest, AStoppedTrainerCountsAsDeadAndMustEndBeforeItIsReplaced) {
  StartDaemon({"--step_timeout=500ms"});
  std::vector<Trainer> trainers = StartAll();
  ASSERT_TRUE(Until([&] { return Steps(trainers[1].output).size() >= 5; }));
  trainers[1].process->Signal(SIGSTOP);
  ASSERT_TRUE(Until([&] { return absl::StrContains(daemon_->Log(), "counts as dead"); }));
  Trainer successor = Start(1, {"--resume"});
  // It waits: the stopped one could still write into the memory that both would have.
  EXPECT_EQ(successor.process->Wait(milliseconds(1000)), -1);
  EXPECT_TRUE(Steps(successor.output).empty());
  trainers[1].process->Signal(SIGKILL);
  trainers[1].process->Wait(kPatience);
  ExpectEnd(trainers[0]);
  ExpectEnd(successor);
  EXPECT_EQ(daemon_->Stop(), 0);
}

}  // namespace
}  // namespace dmuond
