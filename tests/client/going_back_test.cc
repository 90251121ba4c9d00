// The session when the job goes back to a step: told by its daemon, or by its daemon's successor.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_daemon.h"

namespace dmuond::client {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kEpoch = uint64_t{1} << 32;

StepScalars Scalars() { return {.groups = {{.learning_rate = 0.1}}}; }

class GoingBackTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string directory = std::filesystem::temp_directory_path() / "dmuond-back-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
    daemon_ = std::make_unique<FakeDaemon>(path(), FakeDaemon::State{});
  }
  void TearDown() override {
    session_.reset();
    daemon_.reset();
    std::filesystem::remove_all(directory_);
  }
  [[nodiscard]] std::string path() const { return directory_ + "/d.sock"; }

  // A session that has trained to a step.
  void Train(int64_t steps, milliseconds reconnect_timeout = milliseconds(10'000)) {
    auto session = Session::Open({.address = path(),
                                  .reconnect_timeout = reconnect_timeout,
                                  .log = [this](const std::string& what) { logged_ += what; }});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    LayoutBuilder builder(1);
    builder.Add({.name = "matrix", .shape = {4, 4}});
    ASSERT_TRUE(session_->Register(*builder.Build()).ok());
    ASSERT_TRUE(session_->Attach().ok());
    ASSERT_TRUE(session_->Push().ok());
    while (session_->last_committed_step() < steps) {
      const auto outcome = session_->Step(Scalars());
      ASSERT_TRUE(outcome.ok()) << outcome.status();
    }
  }
  void Succeed(FakeDaemon::State state) {
    daemon_->Die();
    daemon_ = std::make_unique<FakeDaemon>(path(), std::move(state));
  }
  // Whether a step, or whatever else, ended with the job at `step` and its weights in the arena.
  void ExpectBackAt(int64_t step, const std::string& trainer_state) {
    EXPECT_EQ(session_->last_committed_step(), step);
    EXPECT_EQ(session_->trainer_state(), trainer_state);
    EXPECT_THAT(session_->Weight<float>(0), Each(static_cast<float>(step)));
    const auto outcome = session_->Step(Scalars());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    EXPECT_EQ(outcome->step, step + 1);
  }
  void ExpectRolledBack(const absl::StatusOr<Outcome>& outcome, int64_t step,
                        const std::string& trainer_state, bool fresh_memory) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kRolledBack);
    EXPECT_EQ(outcome->to_step, step);
    EXPECT_EQ(outcome->trainer_state, trainer_state);
    EXPECT_EQ(outcome->fresh_memory, fresh_memory);
    ExpectBackAt(step, trainer_state);
  }

  static void ExpectCommitted(const absl::StatusOr<Outcome>& outcome, int64_t step) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    EXPECT_EQ(outcome->step, step);
  }

  std::string directory_;
  std::string logged_;
  std::unique_ptr<FakeDaemon> daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(GoingBackTest, AStepSaysWhereTo) {
  Train(3);
  daemon_->GoBackTo(1, "position 1");
  ExpectRolledBack(session_->Step(Scalars(), {.trainer_state = "position 4"}), 1, "position 1",
                   false);
  EXPECT_THAT(daemon_->acknowledged(), ElementsAre(1));
  EXPECT_GT(session_->next_attempt(), 2 * kEpoch);
}

TEST_F(GoingBackTest, SubmitAndPushAndAWaitForWeightsSaySoToo) {
  Train(5);
  daemon_->GoBackTo(4, "");
  ExpectRolledBack(session_->Submit(Scalars()), 4, "", false);
  daemon_->GoBackTo(3, "three");
  const absl::Status pushed = session_->Push();
  EXPECT_EQ(ReasonOf(pushed), "ROLLED_BACK") << pushed;
  EXPECT_EQ(MetadataOf(pushed)["to_step"], "3");
  EXPECT_EQ(MetadataOf(pushed)["fresh_memory"], "false");
  ExpectBackAt(3, "three");
  daemon_->HoldPublishing(true);
  const auto outcome = session_->Submit(Scalars());
  ASSERT_TRUE(outcome.ok() && outcome->kind == Outcome::Kind::kCommitted);
  daemon_->HoldPublishing(false);
  daemon_->GoBackTo(2, "two");  // nobody publishes what was decided
  EXPECT_EQ(ReasonOf(session_->WaitPublished()), "ROLLED_BACK");
  ExpectBackAt(2, "two");
}

TEST_F(GoingBackTest, WhereTheWeightsDoNotComeTheNextCallSaysWhereTo) {
  Succeed({.published_timeout_ms = 300});
  Train(3);
  daemon_->GoBackTo(1, "position 1");
  daemon_->HoldPublishing(true);
  EXPECT_EQ(ReasonOf(session_->Step(Scalars()).status()), "NOT_PUBLISHED");
  EXPECT_EQ(ReasonOf(session_->WaitPublished(milliseconds(1))), "NOT_PUBLISHED");
  EXPECT_THAT(daemon_->submits(), SizeIs(4));
  daemon_->HoldPublishing(false);
  daemon_->BeginEpoch();  // whose lanes publish the weights at last
  ExpectRolledBack(session_->Step(Scalars()), 1, "position 1", false);
  EXPECT_THAT(daemon_->acknowledged(), ElementsAre(1));
}

TEST_F(GoingBackTest, ASnapshotThatIsLoadedSetsTheNextStepBack) {
  Train(3);
  const auto loaded = session_->LoadSnapshot(2);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(*loaded, 2);
  ExpectRolledBack(session_->Step(Scalars()), 2, "of the snapshot", false);
  // Each a call of its own to the daemon, which answers a repeated one as the first.
  ASSERT_TRUE(session_->LoadSnapshot(1).ok());
  EXPECT_THAT(daemon_->loads(), ElementsAre(1, 2));
}

TEST_F(GoingBackTest, ANewEpochLosesNothing) {
  Train(2);
  daemon_->AbortNextSubmit();
  auto outcome = session_->Step(Scalars());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 3);
  EXPECT_GT(outcome->attempt, 2 * kEpoch);
  // And when it begins between two steps.
  session_->MarkReady(0);
  daemon_->BeginEpoch();
  outcome = session_->Step(Scalars());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 4);
  EXPECT_GT(outcome->attempt, 3 * kEpoch);
  EXPECT_THAT(daemon_->acknowledged(), IsEmpty());
}

TEST_F(GoingBackTest, APushThatANewEpochAbortsIsPushedAgainWithItsWeights) {
  Train(2);
  std::ranges::fill(session_->Weight<float>(0), 42.0F);
  daemon_->AbortNextPush();  // and publishes the masters over them
  const absl::Status pushed = session_->Push();
  ASSERT_TRUE(pushed.ok()) << pushed;
  EXPECT_THAT(daemon_->pushed(), Each(42.0F));
}

TEST_F(GoingBackTest, WeightsThatANewEpochMayHaveOverwrittenAreNotPushedInSilence) {
  Train(2);
  std::ranges::fill(session_->Weight<float>(0), 42.0F);
  daemon_->BeginEpoch();
  EXPECT_EQ(ReasonOf(session_->Push()), "WEIGHTS_REPUBLISHED");
  std::ranges::fill(session_->Weight<float>(0), 43.0F);
  const absl::Status pushed = session_->Push();
  ASSERT_TRUE(pushed.ok()) << pushed;
  EXPECT_THAT(daemon_->pushed(), Each(43.0F));
}

TEST_F(GoingBackTest, ASessionOutlivesItsDaemon) {
  Train(5);
  const std::span<float> old = session_->Weight<float>(0);
  Succeed({.step = 3, .trainer_state = "position 3", .epoch = 4});
  ExpectRolledBack(session_->Step(Scalars()), 3, "position 3", true);
  EXPECT_NE(session_->Weight<float>(0).data(), old.data());
  EXPECT_THAT(old, Each(5.0F));  // still mapped
  session_->ReleaseStale();
  EXPECT_GT(session_->next_attempt(), 4 * kEpoch);
  EXPECT_EQ(session_->durable_step(), 3);
  EXPECT_THAT(logged_,
              AllOf(HasSubstr("after step 5"),
                    HasSubstr(absl::StrCat("the daemon (pid ", ::getpid(),
                                           "), which has not ended, has closed its connection"))));
  EXPECT_TRUE(session_->Close().ok());
}

TEST_F(GoingBackTest, AnErrorSaysOnceThatTheMemoryIsAnother) {
  Train(5);
  const std::span<float> old = session_->Weight<float>(0);
  Succeed({.step = 3, .trainer_state = "position 3", .epoch = 4});
  const absl::Status pushed = session_->Push();
  EXPECT_EQ(ReasonOf(pushed), "ROLLED_BACK") << pushed;
  EXPECT_EQ(MetadataOf(pushed)["fresh_memory"], "true");
  EXPECT_NE(session_->Weight<float>(0).data(), old.data());
  ExpectBackAt(3, "position 3");
  daemon_->GoBackTo(2, "position 2");
  ExpectRolledBack(session_->Step(Scalars()), 2, "position 2", false);
}

TEST_F(GoingBackTest, WhereASuccessorsWeightsDoNotComeTheNextCallSaysWhereTo) {
  Train(3);
  Succeed({.step = 2, .trainer_state = "position 2", .epoch = 4, .published_timeout_ms = 300});
  daemon_->HoldPublishing(true);
  EXPECT_EQ(ReasonOf(session_->Step(Scalars()).status()), "NOT_PUBLISHED");
  daemon_->HoldPublishing(false);
  daemon_->BeginEpoch();
  ExpectRolledBack(session_->Step(Scalars()), 2, "position 2", true);
}

TEST_F(GoingBackTest, AWaitForWeightsEndsWithTheDaemonAndGoesOnWithTheNext) {
  Train(2);
  daemon_->HoldPublishing(true);
  std::thread dying([this] {
    while (daemon_->submits().size() < 3) std::this_thread::yield();
    Succeed({.step = 2, .epoch = 2});
  });
  const auto outcome = session_->Step(Scalars());
  dying.join();
  ExpectRolledBack(outcome, 2, "", true);
}

TEST_F(GoingBackTest, WeightsThatAreNeverPublishedAreWaitedForAsLongAsTheDaemonSays) {
  constexpr milliseconds kPromised{1500};
  Succeed({.published_timeout_ms = kPromised.count()});
  Train(2);
  daemon_->HoldPublishing(true);
  const auto begun = std::chrono::steady_clock::now();
  const auto outcome = session_->Step(Scalars());
  EXPECT_GE(std::chrono::steady_clock::now() - begun, kPromised);
  EXPECT_EQ(ReasonOf(outcome.status()), "NOT_PUBLISHED") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("step 3"));
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("not published after 1500 ms"));
}

TEST_F(GoingBackTest, ADrainingDaemonsSuccessorIsWaitedFor) {
  Train(2);
  daemon_->RefuseAsDraining();
  std::thread leaving([this] {
    while (daemon_->submits().size() < 3) std::this_thread::yield();
    Succeed({.step = 2, .epoch = 2});
  });
  const auto outcome = session_->Step(Scalars());
  leaving.join();
  ExpectCommitted(outcome, 3);  // from step 2, where it stands, it need not go back
}

// Under torchrun each failure of a start costs one of its restarts.
TEST_F(GoingBackTest, AStartDuringADrainWaitsForTheSuccessor) {
  for (const bool opened : {false, true}) {
    std::promise<void> told;
    const auto open = [&](milliseconds reconnect_timeout) {
      return Session::Open({.address = path(),
                            .connect_timeout = milliseconds(0),
                            .reconnect_timeout = reconnect_timeout,
                            .log = [&](const std::string& what) {
                              EXPECT_THAT(what, HasSubstr("is leaving; waiting up to"));
                              told.set_value();
                            }});
    };
    std::thread leaving([&] {
      told.get_future().wait();
      Succeed({});
    });
    if (!opened) daemon_->RefuseAsDraining();
    auto session = open(milliseconds(10'000));
    ASSERT_TRUE(session.ok()) << session.status();
    if (opened) daemon_->RefuseAsDraining();
    LayoutBuilder builder(1);
    builder.Add({.name = "matrix", .shape = {4, 4}});
    const auto registered = (*session)->Register(*builder.Build());
    EXPECT_TRUE(registered.ok()) << registered.status();
    leaving.join();
  }
}

TEST_F(GoingBackTest, AStartDuringADrainNamesASuccessorThatDoesNotCome) {
  const auto open = [&](milliseconds reconnect_timeout) {
    daemon_->RefuseAsDraining();
    return Session::Open({.address = path(),
                          .reconnect_timeout = reconnect_timeout,
                          .log = [](const std::string&) {}})
        .status();
  };
  EXPECT_EQ(ReasonOf(open(milliseconds(0))), "DRAINING") << "it is not to wait";
  const absl::Status nobody = open(milliseconds(100));
  EXPECT_EQ(ReasonOf(nobody), "DAEMON_LOST") << nobody;
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("was leaving when rank 0 came, and no "
                                                       "successor took over within 0.1 s"));
}

TEST_F(GoingBackTest, WhereASessionStandsItGoesOnInTheMemoryThatItHas) {
  Train(2);
  const std::span<float> weights = session_->Weight<float>(0);
  const std::span<float> gradients = session_->Gradient<float>(0);
  std::ranges::fill(gradients, 5.0F);
  std::ranges::fill(weights, 7.0F);  // as a daemon that dies while it writes those of a next step
  Succeed({.step = 2, .trainer_state = "two", .epoch = 4});
  // A call between two steps; the successor, a fake, makes no snapshots.
  EXPECT_EQ(session_->SaveSnapshot().status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(weights, Each(2.0F));
  EXPECT_THAT(daemon_->gradients(), Each(5.0F));
  EXPECT_EQ(session_->Weight<float>(0).data(), weights.data());
  EXPECT_EQ(session_->Gradient<float>(0).data(), gradients.data());
  std::ranges::fill(gradients, 6.0F);
  ExpectCommitted(session_->Step(Scalars(), {.trainer_state = "three"}), 3);
  EXPECT_THAT(weights, Each(3.0F));
  EXPECT_THAT(daemon_->gradients(), Each(6.0F));
  EXPECT_THAT(logged_, HasSubstr("goes on after step 2 with the daemon's successor"));
}

TEST_F(GoingBackTest, TheLossOfAnotherNodesMemoryAtThisStepIsAcknowledgedAndNotTold) {
  Train(2);
  daemon_->GoBackTo(2, "two", /*asked=*/false);
  ExpectCommitted(session_->Step(Scalars()), 3);
  EXPECT_THAT(daemon_->acknowledged(), ElementsAre(2));
  daemon_->GoBackTo(3, "three", /*asked=*/true);
  ExpectRolledBack(session_->Step(Scalars()), 3, "three", false);
}

TEST_F(GoingBackTest, WhatWasPushedAfterTheStepMayNotBeInItsSnapshot) {
  Train(2);
  ASSERT_TRUE(session_->Push().ok());
  Succeed({.step = 2, .trainer_state = "two", .epoch = 4});
  ExpectRolledBack(session_->Step(Scalars()), 2, "two", true);
}

TEST_F(GoingBackTest, ASuccessorWithoutTheStateSaysWhatIsLost) {
  Train(3);
  Succeed({});
  const auto outcome = session_->Step(Scalars());
  EXPECT_EQ(outcome.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(outcome.status()), "STATE_LOST");
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("after step 3"));
}

TEST_F(GoingBackTest, ASuccessorHearsNothingOfASessionThatClosesWithoutComingBack) {
  Train(2);
  Succeed({.step = 2, .epoch = 2});
  const absl::Status closed = session_->Close();
  EXPECT_TRUE(closed.ok()) << closed;
  EXPECT_EQ(daemon_->closes(), 0);
}

TEST_F(GoingBackTest, WithoutASuccessorInTimeTheDaemonIsLost) {
  Train(3, milliseconds(300));
  daemon_->Die();
  const auto outcome = session_->Step(Scalars());
  EXPECT_EQ(ReasonOf(outcome.status()), "DAEMON_LOST") << outcome.status();
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("within 0.3 s"));
  EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("step 3"));
  // Asked again, it looks again.
  daemon_ = std::make_unique<FakeDaemon>(path(), FakeDaemon::State{.step = 3, .epoch = 2});
  ExpectCommitted(session_->Step(Scalars()), 4);
}

}  // namespace
}  // namespace dmuond::client
