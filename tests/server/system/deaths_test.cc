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
  // Rank 0, up to where its gradients and weights have numbers. Whoever calls it with a world of
  // two has begun the other rank, for which registering waits.
  void Attach(int32_t world) {
    ASSERT_TRUE(first_->Register(OneMatrix(world)).ok());
    ASSERT_TRUE(first_->Attach().ok());
    FillOneMatrix(*first_);
  }
  void OpenFirst(int32_t world) {
    auto session = Session::Open({.address = daemon_->address(), .rank = 0, .world_size = world});
    ASSERT_TRUE(session.ok()) << session.status();
    first_ = *std::move(session);
  }
  void AttachAlone() {
    ASSERT_NO_FATAL_FAILURE(OpenFirst(1));
    Attach(1);
  }
  // Rank 1 comes as far as `phase`.
  void AttachBeside(const std::string& phase) {
    ASSERT_NO_FATAL_FAILURE(OpenFirst(2));
    other_ = StartOther(phase);
    Attach(2);
  }
  void PushBeside(const std::string& phase) {
    ASSERT_NO_FATAL_FAILURE(AttachBeside(phase));
    ASSERT_TRUE(first_->Push().ok());
  }
  // Both ranks end, if they have not.
  void ExpectNextJobTrainsWithoutThem() {
    first_.reset();
    other_.reset();
    ExpectNextJobTrains();
  }

  std::unique_ptr<DaemonStatus> status_;
  std::unique_ptr<Session> first_;
  std::unique_ptr<ChildProcess> other_;
};

TEST_F(DeathsTest, OfATrainerBeforeItRegisteredLeavesItsPlaceToAReplacement) {
  ASSERT_NO_FATAL_FAILURE(OpenFirst(2));
  other_ = StartOther("open");
  ASSERT_TRUE(status_->WaitForTrainer(1, "open"));
  other_.reset();
  ASSERT_TRUE(
      status_->WaitFor([](const auto& status) { return status.job().trainers_size() == 1; }));
  other_ = StartOther("pushed");
  ASSERT_NO_FATAL_FAILURE(Attach(2));
  const absl::Status pushed = first_->Push();
  EXPECT_TRUE(pushed.ok()) << pushed;
}

TEST_F(DeathsTest, OfATrainerThatHadRegisteredOrAttached) {
  for (const char* phase : {"registered", "attached"}) {
    SCOPED_TRACE(phase);
    ASSERT_NO_FATAL_FAILURE(AttachBeside(phase));
    ASSERT_TRUE(status_->WaitForTrainer(1, phase));
    ExpectNamesRankOne(KilledDuring([&] { other_.reset(); }, [&] { return first_->Push(); }));
    ExpectNextJobTrainsWithoutThem();
  }
}

TEST_F(DeathsTest, OfATrainerThatHadPushedWhileTheOtherWaitsForItsStep) {
  ASSERT_NO_FATAL_FAILURE(PushBeside("pushed"));
  ExpectNamesRankOne(KilledDuring(
      [&] {
        EXPECT_TRUE(status_->WaitForTrainer(0, "submitted"));
        other_.reset();
      },
      [&] { return Step(*first_); }));
  ExpectNextJobTrainsWithoutThem();
}

TEST_F(DeathsTest, OfATrainerThatHadSubmitted) {
  ASSERT_NO_FATAL_FAILURE(PushBeside("submitted"));
  ASSERT_TRUE(status_->WaitForTrainer(1, "submitted"));
  other_.reset();
  ExpectNamesRankOne(KilledDuring([] {},
                                  [&] {
                                    // Before or after the daemon has seen it: one of the next steps
                                    // names it.
                                    absl::Status status = Step(*first_);
                                    if (status.ok()) status = Step(*first_);
                                    return status;
                                  }));
  ExpectNextJobTrainsWithoutThem();
}

// Lanes are replaced; in mid-run: reformation_test.cc.
TEST_F(DeathsTest, OfALaneBeforeThePush) {
  ASSERT_NO_FATAL_FAILURE(AttachAlone());
  KillLane();
  const absl::Status pushed = first_->Push();
  EXPECT_TRUE(pushed.ok()) << pushed;
  EXPECT_TRUE(Step(*first_).ok());
}

TEST_F(DeathsTest, OfALaneBetweenSteps) {
  ASSERT_NO_FATAL_FAILURE(AttachAlone());
  ASSERT_TRUE(first_->Push().ok());
  for (int step = 0; step < 4; ++step) {
    const absl::Status stepped = Step(*first_);
    EXPECT_TRUE(stepped.ok()) << stepped;
    KillLane();
  }
}

TEST_F(DeathsTest, OfALaneWhileATrainerWaitsForTheOther) {
  ASSERT_NO_FATAL_FAILURE(PushBeside("pushed"));
  // The wait goes on, for the trainer that is missing.
  ExpectNamesRankOne(KilledDuring(
      [&] {
        EXPECT_TRUE(status_->WaitForTrainer(0, "submitted"));
        KillLane();
        EXPECT_TRUE(status_->WaitFor(
            [](const auto& status) { return status.epoch() == 2 && status.lanes(1).pid() > 0; }));
        other_.reset();
      },
      [&] { return Step(*first_); }));
  ExpectNextJobTrainsWithoutThem();
}

TEST_F(DeathsTest, ALaneThatDiesThriceInAStepEndsTheJobWithItsLastWords) {
  ASSERT_NO_FATAL_FAILURE(PushBeside("pushed"));
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
      [&] { return Step(*first_); }));
  ExpectNextJobTrainsWithoutThem();
}

}  // namespace
}  // namespace dmuond::testing
