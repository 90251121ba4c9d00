// Daemons that are told to leave while a job runs, and come back: no step is lost, whoever leaves,
// wherever the trainers are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/server/system/rollback_runs.h"

namespace dmuond::testing {
namespace {

using ::testing::HasSubstr;

// No snapshot falls due by itself.
constexpr int kNever = 0;

struct Layout {
  int nodes;
  std::vector<int> trainers;  // node of each rank
  int leaver;
};
void PrintTo(const Layout& layout, std::ostream* out) {
  *out << layout.nodes << " nodes, trainers on " << layout.trainers.front() << " and "
       << layout.trainers.back() << ", node " << layout.leaver << " leaves";
}

class LeavingTest : public RollbackRuns {
 protected:
  // A step is lost when it has to be done again: a rank that goes back prints it a second time.
  void ExpectNoStepLost(std::vector<Trainer>& trainers, const std::vector<Lines>& expected) {
    for (int rank = 0; rank < kRanks; ++rank) {
      ExpectEnd(trainers[rank]);
      EXPECT_EQ(Steps(trainers[rank].output), expected[rank]) << Text(trainers[rank].output);
    }
  }
  int64_t Committed(int node = 0) {
    return DaemonStatus(daemon(node).address()).Get().job().last_committed_step();
  }
  void WaitForMoreSteps(const Trainer& trainer, size_t more) {
    WaitForSteps(trainer, Steps(trainer.output).size() + more);
  }
};

class LeavingOfOneTest : public LeavingTest, public ::testing::WithParamInterface<Layout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, LeavingOfOneTest,
                         ::testing::Values(Layout{1, {0, 0}, 0}, Layout{2, {0, 1}, 1},
                                           Layout{2, {0, 1}, 0}, Layout{2, {0, 0}, 1},
                                           Layout{2, {0, 0}, 0}, Layout{2, {1, 1}, 0}));

TEST_P(LeavingOfOneTest, LosesNoStep) {
  const Layout& layout = GetParam();
  trainer_nodes_ = layout.trainers;
  const std::vector<Lines> expected = StartWithSnapshots(layout.nodes, kNever);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  for (int time = 1; time <= 3; ++time) {
    EXPECT_EQ(daemon(layout.leaver).Stop(), 0);
    const absl::Status again = daemon(layout.leaver).StartAgain();
    ASSERT_TRUE(again.ok()) << again;
    WaitForMoreSteps(trainers[0], 15);
  }
  ExpectNoStepLost(trainers, expected);
  EXPECT_EQ(TimesBack(trainers[0].output), 0) << Text(trainers[0].output);
  ExpectDaemonsLeave();
}

TEST_F(LeavingTest, AWholeGroupThatLeavesAtOnceLosesNoStep) {
  const std::vector<Lines> expected = StartWithSnapshots(2, kNever);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  for (const auto& daemon : daemons_) ::kill(daemon->pid(), SIGTERM);
  for (const auto& daemon : daemons_) EXPECT_EQ(daemon->Wait(kPatience), 0);
  for (const auto& daemon : daemons_) ASSERT_TRUE(daemon->StartAgain().ok());
  ExpectNoStepLost(trainers, expected);
  ExpectDaemonsLeave();
}

// What dmuonctl says is where the job goes on, and trainers, who stand there, hear nothing.
TEST_F(LeavingTest, WhoDrainsIsToldTheStepThatIsSaved) {
  const std::vector<Lines> expected = StartWithSnapshots(2, kNever);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  const std::string output = directory_ + "/ctl";
  auto ctl = ChildProcess::Start("dmuonctl", {"drain", "--address=" + daemon(1).address()}, output);
  ASSERT_TRUE(ctl.ok()) << ctl.status();
  EXPECT_EQ((*ctl)->Wait(kPatience), 0) << Text(output);
  EXPECT_EQ(daemon(1).Wait(kPatience), 0);
  const int64_t committed = Committed();
  EXPECT_THAT(Text(output),
              HasSubstr(absl::StrCat("left after step ", committed, ", which is saved")));
  ASSERT_TRUE(daemon(1).StartAgain().ok());
  ExpectNoStepLost(trainers, expected);
  EXPECT_EQ(TimesBack(trainers[0].output), 0)
      << "it stands at that step: " << Text(trainers[0].output);
  ExpectDaemonsLeave();
}

TEST_F(LeavingTest, WithoutSnapshotsItIsSaidWhatIsLost) {
  StartDaemons(2);
  std::vector<Trainer> trainers = StartAll();
  WaitForSteps(trainers[0], 20);
  const std::string output = directory_ + "/ctl";
  auto ctl = ChildProcess::Start("dmuonctl", {"drain", "--address=" + daemon(1).address()}, output);
  ASSERT_TRUE(ctl.ok()) << ctl.status();
  EXPECT_EQ((*ctl)->Wait(kPatience), 0) << Text(output);
  EXPECT_THAT(Text(output), HasSubstr("there is no snapshot"));
  EXPECT_EQ(daemon(1).Wait(kPatience), 0);
  EXPECT_THAT(daemon(1).Log(), HasSubstr("the job's state goes with this daemon: there is no"));
  ASSERT_TRUE(daemon(1).StartAgain().ok());
  for (Trainer& trainer : trainers) {
    EXPECT_EQ(trainer.process->Wait(kPatience), 1);
    EXPECT_THAT(Text(trainer.output), HasSubstr("STATE_LOST"));
  }
}

}  // namespace
}  // namespace dmuond::testing
