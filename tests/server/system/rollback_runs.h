// Runs of the example trainer with snapshots, whose daemons go and come back: the fixture of tests
// in which trainers live on and the job goes back.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_ROLLBACK_RUNS_H_
#define DMUOND_TESTS_SERVER_SYSTEM_ROLLBACK_RUNS_H_

#include <gtest/gtest.h>

#include <chrono>
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

inline constexpr int kSnapshotEvery = 20;

// The last line that a trainer has printed of each step.
inline std::map<int, std::string> LastOfEachStep(const std::string& path) {
  std::map<int, std::string> lines;
  for (const std::string& line : Steps(path)) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    int step = 0;
    EXPECT_TRUE(absl::SimpleAtoi(words[1], &step)) << line;
    lines[step] = line;
  }
  return lines;
}

inline int TimesBack(const std::string& path) {
  std::ifstream file(path);
  int times = 0;
  for (std::string line; std::getline(file, line);) times += absl::StartsWith(line, "back to ");
  return times;
}

class RollbackRuns : public ExampleRuns {
 protected:
  // Starts daemons that make snapshots. The undisturbed run, which has had daemons of its own.
  std::vector<Lines> StartWithSnapshots(int nodes, int every = kSnapshotEvery) {
    // The same on any number of daemons.
    static std::vector<Lines> expected;
    if (expected.empty()) {
      StartDaemons(nodes);
      expected = Undisturbed();
      ExpectDaemonsLeave();
      daemons_.clear();
    }
    StartDaemons(nodes, "cpu:2",
                 {absl::StrCat("--snapshot_dir=", directory_, "/snapshots"),
                  absl::StrCat("--snapshot_every_steps=", every)});
    return expected;
  }
  void WaitForSnapshot() {
    ASSERT_TRUE(Until([&] {
      return DaemonStatus(daemon().address()).Get().job().durable_step() >= kSnapshotEvery;
    }));
  }
  // Kills a node's daemon in mid-run and starts its successor. A trainer that stands at the step of
  // the newest snapshot does not hear that the job goes back there.
  void ReplaceDaemon(int node, const Trainer& trainer) {
    const int before = TimesBack(trainer.output);
    const auto killed = std::chrono::steady_clock::now();
    daemon(node).Kill();
    const std::string stands_at =
        absl::StrCat(" step=", LastOfEachStep(trainer.output).rbegin()->first, "\n");
    const absl::Status again = daemon(node).StartAgain();
    ASSERT_TRUE(again.ok()) << again;
    const auto is_back = [&] {
      if (TimesBack(trainer.output) > before) return true;
      const std::string log = daemon(node).Log();
      const size_t restored = log.find("msg=restored ");
      return restored != log.npos &&
             absl::EndsWith(log.substr(restored, log.find('\n', restored) + 1 - restored),
                            stands_at);
    };
    ASSERT_TRUE(Until(is_back)) << Text(trainer.output) << daemon(node).Log();
    RecordProperty("back_ms", static_cast<int>((std::chrono::steady_clock::now() - killed) /
                                               std::chrono::milliseconds(1)));
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

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_ROLLBACK_RUNS_H_
