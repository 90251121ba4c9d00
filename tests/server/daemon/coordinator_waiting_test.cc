// What the coordinator tells of who keeps the job waiting, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/plan.h"
#include "server/convert.h"
#include "server/daemon/coordinator.h"
#include "tests/server/daemon/registrations.h"

namespace dmuond::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A job of two ranks on one node.
class CoordinatorWaitingTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kEpoch = 5;
  static constexpr int32_t kRanks = 2;

  CoordinatorWaitingTest() : coordinator_(Options()) {
    std::ignore = coordinator_.OnFormed(now_, kEpoch);
    v1::MemberMessage state;
    state.mutable_member_state()->set_epoch(kEpoch);
    Tell(state);
    for (int32_t rank = 0; rank < kRanks; ++rank) Open(rank, 1);
  }
  static CoordinatorOptions Options() {
    CoordinatorOptions options;
    options.register_timeout = seconds(120);
    options.step.step_timeout = seconds(300);
    options.step.session_linger = seconds(600);
    return options;
  }

  AddressedMessages Tell(const v1::MemberMessage& message) {
    return coordinator_.OnMessage(now_, 0, message);
  }
  void Open(int32_t rank, uint64_t incarnation) {
    v1::MemberMessage session;
    session.mutable_rank_session()->set_rank(rank);
    session.mutable_rank_session()->set_job("job");
    session.mutable_rank_session()->set_world_size(kRanks);
    session.mutable_rank_session()->set_incarnation(incarnation);
    session.mutable_rank_session()->set_pid(4700 + rank);
    Tell(session);
  }
  AddressedMessages Register(int32_t rank) {
    v1::MemberMessage message;
    *message.mutable_registration() = OfOneMatrix(rank, kRanks);
    return Tell(message);
  }
  void Begin() {
    Register(0);
    const AddressedMessages planned = Register(1);
    ASSERT_EQ(planned.size(), 1U);
    const scheduler::Plan plan = *scheduler::MakePlan(*FromProto(planned[0].message.plan()));
    const AddressedMessages open = Tell(LanesReady(plan.digest, coordinator_.epoch()));
    ASSERT_EQ(open.size(), 1U);
    attempt_ = open[0].message.open().attempt();
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      v1::MemberMessage attached;
      attached.mutable_rank_attached()->set_rank(rank);
      attached.mutable_rank_attached()->set_incarnation(1);
      Tell(attached);
    }
  }
  void Submit(int32_t rank) {
    v1::MemberMessage message;
    message.mutable_submitted()->set_rank(rank);
    message.mutable_submitted()->set_attempt(attempt_);
    message.mutable_submitted()->set_step(1);
    message.mutable_submitted()->set_kind(v1::ATTEMPT_KIND_STEP);
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

  scheduler::TimePoint now_{seconds(1000)};
  Coordinator coordinator_;
  uint64_t attempt_ = 0;
};

TEST_F(CoordinatorWaitingTest, ARankThatDoesNotRegisterIsNamedAfterFiveSecondsAndOnce) {
  Register(0);
  EXPECT_THAT(Pass(milliseconds(4900)), IsEmpty());
  EXPECT_THAT(Pass(seconds(60)),
              ElementsAre("rank 1 (pid 4701 on node 0), which has not registered (5000, 115000: "
                          "the others hear RANKS_MISSING)"));
  Register(1);
  EXPECT_THAT(Pass(seconds(1)), ElementsAre("nobody"));
}

TEST_F(CoordinatorWaitingTest, ARankThatDoesNotSubmitIsNamedAndThenThatItHasDied) {
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

TEST_F(CoordinatorWaitingTest, ANodeThatPreparesForLongIsNamedWithWhatItWaitsFor) {
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
}  // namespace dmuond::server
