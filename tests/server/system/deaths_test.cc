// A trainer or a lane that is killed, at every point of its life: the other trainer's next or
// waiting call ends within seconds with a status that names it, and the daemon takes the next job.
// Deaths in mid-run, of daemons too and across nodes: tests/python/test_deaths.py.
#include <signal.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainers.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/one_matrix.h"

namespace dmuond::testing {
namespace {

using client::Session;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// It takes milliseconds; a busy machine may take longer.
constexpr std::chrono::seconds kNoticedWithin{5};

absl::Status Step(Session& session) {
  return session.Step({.groups = {{.learning_rate = 0.1}}}).status();
}

class DeathsTest : public DaemonTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(
        StartDaemon({.devices = "cpu:2", .flags = {"--threads=1", "--session_linger=0"}}));
    status_ = std::make_unique<DaemonStatus>(daemon_->address());
  }
  std::unique_ptr<ChildProcess> StartOther(const std::string& phase) {
    auto other = ChildProcess::Start("phase_trainer", {daemon_->address(), "1", "2", phase});
    EXPECT_TRUE(other.ok()) << other.status();
    return other.ok() ? *std::move(other) : nullptr;
  }
  // Kills and, meanwhile or afterwards, calls; the call's status, if it came in time.
  static absl::Status KilledDuring(const std::function<void()>& kill,
                                   const std::function<absl::Status()>& call) {
    const Clock::time_point begin = Clock::now();
    absl::Status status;
    std::thread caller([&] { status = call(); });
    kill();
    caller.join();
    EXPECT_LT(Clock::now() - begin, kNoticedWithin);
    return status;
  }
  void ExpectNamesRankOne(const absl::Status& status) {
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(client::ReasonOf(status), AnyOf("TRAINER_LOST", "TRAINER_MISSING", "PUSH_ABORTED"))
        << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  }
  void ExpectNamesLane(const absl::Status& status) {
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(client::ReasonOf(status), AnyOf("LANE_LOST", "PUSH_ABORTED")) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("lane 1"));
  }
  void KillLane() {
    const v1::GetStatusReply status = status_->Get();
    ASSERT_EQ(status.lanes_size(), 2);
    ASSERT_EQ(::kill(status.lanes(1).pid(), SIGKILL), 0);
  }
  // The daemon is free again, and right.
  void ExpectNextJobTrains() {
    ASSERT_TRUE(status_->WaitForNoJob());
    auto session = Session::Open({.address = daemon_->address(), .job = "next"});
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE((*session)->Register(OneMatrix(1)).ok());
    ASSERT_TRUE((*session)->Attach().ok());
    FillOneMatrix(**session);
    ASSERT_TRUE((*session)->Push().ok());
    EXPECT_TRUE(Step(**session).ok());
    EXPECT_TRUE((*session)->Close().ok());
  }
  absl::StatusOr<std::unique_ptr<Session>> OpenFirst(int32_t world = 2) {
    return Session::Open({.address = daemon_->address(), .rank = 0, .world_size = world});
  }

  std::unique_ptr<DaemonStatus> status_;
};

TEST_F(DeathsTest, OfATrainerBeforeItRegisteredLeavesItsPlaceToAReplacement) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("open");
  ASSERT_TRUE(status_->WaitForTrainer(1, "open"));
  other.reset();
  ASSERT_TRUE(
      status_->WaitFor([](const auto& status) { return status.job().trainers_size() == 1; }));
  auto replacement = StartOther("pushed");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  const absl::Status pushed = (*first)->Push();
  EXPECT_TRUE(pushed.ok()) << pushed;
}

TEST_F(DeathsTest, OfATrainerThatHadRegistered) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("registered");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE(status_->WaitForTrainer(1, "registered"));
  ExpectNamesRankOne(KilledDuring([&] { other.reset(); }, [&] { return (*first)->Push(); }));
  first = absl::UnknownError("");
  ExpectNextJobTrains();
}

TEST_F(DeathsTest, OfATrainerThatHadAttached) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("attached");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE(status_->WaitForTrainer(1, "attached"));
  ExpectNamesRankOne(KilledDuring([&] { other.reset(); }, [&] { return (*first)->Push(); }));
  first = absl::UnknownError("");
  ExpectNextJobTrains();
}

TEST_F(DeathsTest, OfATrainerThatHadPushedWhileTheOtherWaitsForItsStep) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("pushed");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE((*first)->Push().ok());
  ExpectNamesRankOne(KilledDuring(
      [&] {
        EXPECT_TRUE(status_->WaitForTrainer(0, "submitted"));
        other.reset();
      },
      [&] { return Step(**first); }));
  first = absl::UnknownError("");
  ExpectNextJobTrains();
}

TEST_F(DeathsTest, OfATrainerThatHadSubmitted) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("submitted");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE((*first)->Push().ok());
  ASSERT_TRUE(status_->WaitForTrainer(1, "submitted"));
  other.reset();
  ExpectNamesRankOne(KilledDuring([] {},
                                  [&] {
                                    // Before or after the daemon has seen it: one of the next steps
                                    // names it.
                                    absl::Status status = Step(**first);
                                    if (status.ok()) status = Step(**first);
                                    return status;
                                  }));
  first = absl::UnknownError("");
  ExpectNextJobTrains();
}

// Lanes are replaced; in mid-run: reformation_test.cc.
TEST_F(DeathsTest, OfALaneBeforeThePush) {
  auto only = OpenFirst(1);
  ASSERT_TRUE(only.ok()) << only.status();
  ASSERT_TRUE((*only)->Register(OneMatrix(1)).ok());
  ASSERT_TRUE((*only)->Attach().ok());
  FillOneMatrix(**only);
  KillLane();
  const absl::Status pushed = (*only)->Push();
  EXPECT_TRUE(pushed.ok()) << pushed;
  EXPECT_TRUE(Step(**only).ok());
}

TEST_F(DeathsTest, OfALaneBetweenSteps) {
  auto only = OpenFirst(1);
  ASSERT_TRUE(only.ok()) << only.status();
  ASSERT_TRUE((*only)->Register(OneMatrix(1)).ok());
  ASSERT_TRUE((*only)->Attach().ok());
  FillOneMatrix(**only);
  ASSERT_TRUE((*only)->Push().ok());
  for (int step = 0; step < 4; ++step) {
    const absl::Status stepped = Step(**only);
    EXPECT_TRUE(stepped.ok()) << stepped;
    KillLane();
  }
}

TEST_F(DeathsTest, OfALaneWhileATrainerWaitsForTheOther) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("pushed");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE((*first)->Push().ok());
  // The wait goes on, for the trainer that is missing.
  ExpectNamesRankOne(KilledDuring(
      [&] {
        EXPECT_TRUE(status_->WaitForTrainer(0, "submitted"));
        KillLane();
        EXPECT_TRUE(status_->WaitFor(
            [](const auto& status) { return status.epoch() == 2 && status.lanes(1).pid() > 0; }));
        other.reset();
      },
      [&] { return Step(**first); }));
  first = absl::UnknownError("");
  ExpectNextJobTrains();
}

TEST_F(DeathsTest, ALaneThatDiesThriceInAStepEndsTheJobWithItsLastWords) {
  auto first = OpenFirst();
  ASSERT_TRUE(first.ok()) << first.status();
  auto other = StartOther("pushed");
  ASSERT_TRUE((*first)->Register(OneMatrix(2)).ok());
  ASSERT_TRUE((*first)->Attach().ok());
  FillOneMatrix(**first);
  ASSERT_TRUE((*first)->Push().ok());
  ExpectNamesLane(KilledDuring(
      [&] {
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
          EXPECT_TRUE(status_->WaitFor([epoch](const auto& status) {
            return status.epoch() == epoch && status.lanes_size() == 2 &&
                   status.lanes(1).state() == "ready";
          }));
          EXPECT_TRUE(status_->WaitForTrainer(0, "submitted"));
          KillLane();
        }
      },
      [&] { return Step(**first); }));
  first = absl::UnknownError("");
  other.reset();
  ExpectNextJobTrains();
}

}  // namespace
}  // namespace dmuond::testing
