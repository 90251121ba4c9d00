// What the coordinator tells of who keeps the job waiting, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/plan.h"
#include "tests/scheduler/job/group_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A job of two ranks on one node.
class GroupJobWaitingTest : public OneNodeJobTest {
 protected:
  static constexpr int32_t kRanks = 2;

  GroupJobWaitingTest() : OneNodeJobTest(kRanks, Options()) {
    for (int32_t rank = 0; rank < kRanks; ++rank) Open(rank, 1);
  }
  static GroupJobOptions Options() {
    GroupJobOptions options;
    options.register_timeout = seconds(120);
    options.step.step_timeout = seconds(300);
    options.step.session_linger = seconds(600);
    return options;
  }

  void Open(int32_t rank, uint64_t incarnation) {
    std::ignore = OneNodeJobTest::Open(rank, /*restore_step=*/0, incarnation);
  }
  void Begin() {
    Register(0);
    TakePlan(Register(1));
    const AddressedMessages open = LanesReady();
    ASSERT_EQ(open.size(), 1U);
    attempt_ = open[0].message.open().attempt();
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      Tell(Attached(rank, coordinator_.epoch(), /*incarnation=*/1));
    }
  }
  void Submit(int32_t rank) {
    v1::MemberMessage message;
    v1::RankSubmitted& submitted = *message.mutable_reports()->add_submitted();
    submitted.set_rank(rank);
    submitted.set_attempt(attempt_);
    submitted.set_step(1);
    submitted.set_kind(v1::ATTEMPT_KIND_STEP);
    Tell(message);
  }
  // What is told as time passes, tick by tick: "what (since, patience: otherwise)".
  std::vector<std::string> Pass(milliseconds time) {
    std::vector<std::string> told;
    for (milliseconds passed(0); passed < time; passed += milliseconds(100)) {
      now_ += milliseconds(100);
      for (const Addressed& addressed : coordinator_.OnTick(now_)) {
        if (!addressed.message.has_waiting()) continue;
        EXPECT_FALSE(addressed.node.has_value()) << "everybody is told";
        const v1::Waiting& waiting = addressed.message.waiting();
        if (waiting.awaited().empty()) told.emplace_back("nobody");
        for (const v1::Awaited& one : waiting.awaited()) {
          told.push_back(absl::StrCat(one.what(), " (", one.since_ms(), ", ", one.patience_ms(),
                                      ": ", one.otherwise(), ")"));
        }
      }
    }
    return told;
  }

  uint64_t attempt_ = 0;
};

TEST_F(GroupJobWaitingTest, ARankThatDoesNotRegisterIsNamedAfterFiveSecondsAndOnce) {
  Register(0);
  EXPECT_THAT(Pass(milliseconds(4900)), IsEmpty());
  EXPECT_THAT(Pass(seconds(60)),
              ElementsAre("rank 1 (pid 4701 on node 0), which has not registered (5000, 115000: "
                          "the others hear RANKS_MISSING)"));
  Register(1);
  EXPECT_THAT(Pass(seconds(1)), ElementsAre("nobody"));
}

TEST_F(GroupJobWaitingTest, ARankThatDoesNotSubmitIsNamedAndThenThatItHasDied) {
  Begin();
  EXPECT_THAT(Pass(seconds(20)), IsEmpty()) << "nobody waits";
  Submit(0);
  EXPECT_THAT(Pass(milliseconds(5000)),
              ElementsAre("rank 1 (pid 4701 on node 0), which has not submitted step 1 (5000, "
                          "295000: it counts as dead, and a replacement is awaited)"));
  v1::MemberMessage gone;
  gone.mutable_rank_gone()->set_rank(1);
  gone.mutable_rank_gone()->set_incarnation(1);
  gone.mutable_rank_gone()->set_detail("it is gone");
  Tell(gone);
  EXPECT_THAT(
      Pass(seconds(10)),
      ElementsAre("nobody",
                  "rank 1 (pid 4701 on node 0), whose trainer has died (5000, 595000: the job ends "
                  "with TRAINER_MISSING, unless a replacement has come)"));
  // The group is told anew when it has formed anew, as who joined it knows nothing.
  std::ignore = coordinator_.OnFormed(now_, kEpoch + 1);
  EXPECT_THAT(Pass(milliseconds(100)), testing::SizeIs(1));
}

TEST_F(GroupJobWaitingTest, ANodeThatPreparesForLongIsNamedWithWhatItWaitsFor) {
  Register(0);
  Register(1);
  v1::MemberMessage progress;
  progress.mutable_node_progress()->set_epoch(coordinator_.epoch());
  progress.mutable_node_progress()->set_awaited("lane 0 to be ready");
  Tell(progress);
  EXPECT_THAT(Pass(seconds(10)),
              ElementsAre("node 0, which gets ready: lane 0 to be ready (5000, 115000: it is given "
                          "up with NODE_NOT_READY, unless it gets something done)"));
}

}  // namespace
}  // namespace dmuond::scheduler
