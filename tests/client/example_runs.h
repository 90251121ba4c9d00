// Runs of the example trainer in real processes, and what is done to them: the fixture of tests in
// which something dies and the run is to be the undisturbed one all the same.
#ifndef DMUOND_TESTS_CLIENT_EXAMPLE_RUNS_H_
#define DMUOND_TESTS_CLIENT_EXAMPLE_RUNS_H_

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {

using Lines = std::vector<std::string>;

// A whole run, of 1,500 steps, while thirty others want the processor.
inline constexpr std::chrono::seconds kPatience = 4 * kHangsAfter;

// What a trainer has printed of its steps so far.
inline Lines Steps(const std::string& path) {
  std::ifstream file(path);
  Lines lines;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (absl::StartsWith(line, "step ")) lines.push_back(line);
  }
  return lines;
}

inline std::string Text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline bool Until(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));  // between looks, not instead of them
  }
  return true;
}

class ExampleRuns : public ::testing::Test {
 protected:
  static constexpr int kSteps = 400;
  static constexpr int kRanks = 2;

  struct Trainer {
    std::unique_ptr<ChildProcess> process;
    std::string output;
  };

  void SetUp() override {
    std::string directory = std::filesystem::temp_directory_path() / "dmuond-runs-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
  }
  void TearDown() override {
    for (const auto& daemon : daemons_) {
      if (HasFailure() && daemon != nullptr) std::cerr << daemon->Log();
    }
    std::filesystem::remove_all(directory_);
  }

  // Of `nodes` daemons; rank r trains on node r modulo nodes, or by `trainer_nodes_`.
  void StartDaemons(int nodes = 1, const std::string& devices = "cpu:2",
                    const std::vector<std::string>& flags = {}) {
    coordinator_ = FreeAddress();
    auto group = StartGroup(nodes, devices, flags, coordinator_);
    ASSERT_TRUE(group.ok()) << group.status();
    daemons_ = *std::move(group);
  }
  [[nodiscard]] DaemonProcess& daemon(int node = 0) const { return *daemons_[node]; }
  Trainer Start(int rank, const std::vector<std::string>& flags = {}) {
    Trainer trainer{nullptr, absl::StrCat(directory_, "/", started_++)};
    const auto node = trainer_nodes_.empty() ? rank % static_cast<int>(daemons_.size())
                                             : trainer_nodes_[rank % trainer_nodes_.size()];
    std::vector<std::string> all = {"--address=" + daemon(node).address(),
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
  static void WaitForSteps(const Trainer& trainer, size_t steps) {
    ASSERT_TRUE(Until([&] { return Steps(trainer.output).size() >= steps; }))
        << Text(trainer.output);
  }
  static void KillAt(Trainer& trainer, size_t steps) {
    WaitForSteps(trainer, steps);
    trainer.process->Signal(SIGKILL);
    EXPECT_EQ(trainer.process->Wait(kPatience), 128 + SIGKILL);
  }
  void ExpectDaemonsLeave() {
    for (const auto& daemon : daemons_) EXPECT_EQ(daemon->Stop(), 0);
  }

  std::string directory_;
  int started_ = 0;
  std::vector<int> trainer_nodes_;
  std::string coordinator_;  // address
  DaemonGroup daemons_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_EXAMPLE_RUNS_H_
