// LoadSnapshot while the group is broken: it is answered when the group has formed, and the answer
// is what has become of the job.
#include <csignal>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/snapshot_fixture.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using client::Outcome;
using ::testing::HasSubstr;

// One trainer, of node 0, which is asked; the other node goes.
class BrokenLoadsTest : public SnapshotFixture<8> {
 protected:
  void SetUp() override {
    auto group = StartGroup(2, "cpu:1",
                            {"--threads=1", absl::StrCat("--snapshot_dir=", scratch_.path(), "/s"),
                             "--snapshot_every_steps=3"});
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    world_ = std::make_unique<SnapshotWorld>(std::vector<std::string>{group_[0]->address()},
                                             SnapshotWorld::Options{.ranks = 1});
    const absl::Status started = world_->Start();
    ASSERT_TRUE(started.ok()) << started;
    for (const int64_t saved : {3, 6}) {
      ASSERT_TRUE(world_->StepUntil(saved));
      ASSERT_TRUE(WaitDurable(saved));
    }
    ASSERT_TRUE(world_->StepUntil(7));
  }
  bool WaitBroken() {
    return DaemonStatus(group_[0]->address()).WaitFor([](const v1::GetStatusReply& reply) {
      return !reply.missing_nodes().empty();
    });
  }
  // Asks for a snapshot while the link is broken: the question has reached the daemon. The answer
  // comes when the link is there again, not before.
  std::future<absl::StatusOr<int64_t>> LoadInVain(int64_t step) {
    auto loaded = std::async(std::launch::async, [this, step] {
      absl::StatusOr<int64_t> answer = (*world_)[0].LoadSnapshot(step);
      EXPECT_TRUE(DaemonStatus(group_[0]->address()).Get().missing_nodes().empty())
          << "the job is nowhere, and it is said to be back";
      return answer;
    });
    EXPECT_TRUE(group_[0]->WaitLogged(absl::StrCat("asks for a snapshot\" rank=0 step=", step)))
        << group_[0]->Log();
    return loaded;
  }
  void ExpectUndisturbedUntil(int64_t step) {
    ASSERT_TRUE(world_->StepUntil(step));
    EXPECT_EQ(world_->Weights(), undisturbed_[step]);
  }
  void ExpectBackTo(int64_t step) {
    const auto outcome = world_->Step();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->kind, Outcome::Kind::kRolledBack);
    EXPECT_EQ(outcome->to_step, step);
    EXPECT_EQ(world_->Weights(), undisturbed_[step]);
  }

  std::unique_ptr<SnapshotWorld> world_;
};

TEST_F(BrokenLoadsTest, AJobWhoseLinkBreaksGoesBackWhenTheLinkIsThereAgain) {
  ASSERT_EQ((*world_)[0].LoadSnapshot(6).value_or(-1), 6) << "so that it has gone back before";
  ExpectBackTo(6);
  ExpectUndisturbedUntil(7);
  ::kill(group_[1]->pid(), SIGSTOP);
  ASSERT_TRUE(WaitBroken());
  auto loaded = LoadInVain(3);
  ::kill(group_[1]->pid(), SIGCONT);
  EXPECT_EQ(loaded.get().value_or(-1), 3);
  ExpectBackTo(3);
  ExpectUndisturbedUntil(5);
  world_->Close();
}

TEST_F(BrokenLoadsTest, AJobThatLosesADaemonGoesBackToTheNewestAndWhoAskedForAnotherIsTold) {
  group_[1]->Kill();
  ASSERT_TRUE(WaitBroken());
  auto loaded = LoadInVain(3);
  ASSERT_TRUE(group_[1]->StartAgain().ok());
  const absl::StatusOr<int64_t> told = loaded.get();
  EXPECT_EQ(client::ReasonOf(told.status()), "ROLLED_BACK") << told.status();
  EXPECT_THAT(std::string(told.status().message()), HasSubstr("step 6"));
  EXPECT_EQ((*world_)[0].last_committed_step(), 6);
  EXPECT_EQ(world_->Weights(), undisturbed_[6]);
  ExpectUndisturbedUntil(7);
  world_->Close();
}

}  // namespace
}  // namespace dmuond::testing
