// What a trainer hears when something is wrong, or somebody dies.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <latch>
#include <memory>
#include <string>
#include <thread>

#include "client/cpp/src/channel.h"
#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainer_proxy.h"
#include "tests/client/trainers.h"

namespace dmuond::client {
namespace {

using testing::DaemonTest;
using ::testing::HasSubstr;
using testing::OnEveryRank;
using testing::World;

Layout OneMatrix(int32_t world_size, int64_t rows = 8) {
  LayoutBuilder builder(world_size);
  builder.Add({.name = "matrix", .shape = {rows, 16}});
  return *builder.Build();
}
void FillWeights(Session& session) {
  for (float& weight : session.Weight<float>(0)) weight = 0.5F;
}
StepScalars Scalars() { return {.groups = {{.learning_rate = 0.1}}}; }
void FillGradients(Session& session) {
  float value = 0;
  for (float& gradient : session.Gradient<float>(0)) gradient = (value += 0.25F);
}

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(open), end(open)));
}

class SessionErrorsTest : public DaemonTest {
 protected:
  void SetUp() override { StartDaemon({.flags = {"--session_linger=0", "--jobs_max=1"}}); }
  std::unique_ptr<World> MakeWorld(int32_t size) {
    return std::make_unique<World>(
        daemon_->address(), size, [size](int32_t) { return OneMatrix(size); }, FillWeights);
  }
};

TEST(Unreachable, NoDaemonIsUnavailableAfterTheGivenTime) {
  const auto session = Session::Open(
      {.address = "/nonexistent/dmuond.sock", .connect_timeout = std::chrono::milliseconds(30)});
  EXPECT_TRUE(absl::IsUnavailable(session.status())) << session.status();
  EXPECT_EQ(ReasonOf(session.status()), "DAEMON_UNREACHABLE");
  EXPECT_THAT(std::string(session.status().message()), HasSubstr("/nonexistent/dmuond.sock"));
}

TEST_F(SessionErrorsTest, ACallToADaemonThatStaysStoppedEnds) {
  Channel channel(
      daemon_->address(), std::chrono::seconds(2), [](std::chrono::milliseconds) { return false; },
      [] { return std::string("has ended"); });
  v1::HelloRequest hello;
  hello.set_version_min(2);
  hello.set_version_max(2);
  v1::HelloReply reply;
  ASSERT_TRUE(channel.Call("Hello", &v1::Trainer::Stub::Hello, hello, reply, {}).ok());
  ASSERT_EQ(::kill(daemon_->pid(), SIGSTOP), 0);
  siginfo_t stopped{};  // its threads run for a moment longer
  ASSERT_EQ(::waitid(P_PID, daemon_->pid(), &stopped, WSTOPPED | WNOWAIT), 0);
  const absl::Status status = channel.Call("Hello", &v1::Trainer::Stub::Hello, hello, reply, {});
  ::kill(daemon_->pid(), SIGCONT);
  EXPECT_EQ(ReasonOf(status), "DAEMON_UNREACHABLE") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("stopped"));
  EXPECT_TRUE(channel.Call("Hello", &v1::Trainer::Stub::Hello, hello, reply, {}).ok());
}

TEST_F(SessionErrorsTest, CallsOutOfOrderAreRefusedByTheClient) {
  auto session = Session::Open({.address = daemon_->address()});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(ReasonOf((*session)->Attach()), "SESSION_STATE");
  EXPECT_EQ(ReasonOf((*session)->Push()), "SESSION_STATE");
  EXPECT_EQ(ReasonOf((*session)->Step(Scalars()).status()), "SESSION_STATE");
  EXPECT_EQ((*session)->WeightBytes(0), nullptr);
  ASSERT_TRUE((*session)->Register(OneMatrix(1)).ok());
  ASSERT_TRUE((*session)->Attach().ok());
  EXPECT_EQ(ReasonOf((*session)->Wait().status()), "SESSION_STATE");
  ASSERT_TRUE((*session)->Close().ok());
  EXPECT_TRUE((*session)->Close().ok());
  EXPECT_EQ(ReasonOf((*session)->Step(Scalars()).status()), "SESSION_STATE");
  // What is mapped stays mapped until the session is destroyed.
  FillWeights(**session);
  EXPECT_EQ((*session)->Weight<float>(0)[0], 0.5F);
}

TEST_F(SessionErrorsTest, ASecondSessionOfARankIsRefusedAndTheFirstGoesOn) {
  auto world = MakeWorld(1);
  ASSERT_TRUE(world->complete());
  const auto second = Session::Open({.address = daemon_->address(), .resume = Resume::kIfPresent});
  EXPECT_EQ(ReasonOf(second.status()), "RANK_TWICE") << second.status();
  const auto other_job = Session::Open({.address = daemon_->address(), .job = "other"});
  EXPECT_EQ(ReasonOf(other_job.status()), "OTHER_JOB") << other_job.status();
  EXPECT_EQ(MetadataOf(other_job.status())["holder"], "default");
  FillGradients((*world)[0]);
  EXPECT_TRUE((*world)[0].Step(Scalars()).ok());
  world->Close();
}

TEST_F(SessionErrorsTest, ShapesThatDifferAreRefusedToBothByName) {
  OnEveryRank(2, [&](int32_t rank) {
    auto session = Session::Open({.address = daemon_->address(), .rank = rank, .world_size = 2});
    ASSERT_TRUE(session.ok()) << session.status();
    const auto registered = (*session)->Register(OneMatrix(2, 8 + rank));
    EXPECT_FALSE(registered.ok());
    EXPECT_THAT(std::string(registered.status().message()), HasSubstr("matrix"));
    EXPECT_NE(ReasonOf(registered.status()), "");
  });
}

TEST_F(SessionErrorsTest, ARefusalWhoseAnswerWasLostIsReadByTheRepeatedCall) {
  testing::TrainerProxy proxy(daemon_->address(), [](const std::string& method, int call) {
    return method != "Hello" && call == 0 ? testing::Fault::kLoseReply : testing::Fault::kNone;
  });
  const auto opened = Session::Open({.address = proxy.address(), .resume = Resume::kRequire});
  EXPECT_EQ(ReasonOf(opened.status()), "JOB_HAS_NO_STATE") << opened.status();
  EXPECT_EQ(MetadataOf(opened.status())["job"], "default");
}

TEST_F(SessionErrorsTest, ALostRefusalOfALayoutIsNoNewRegistration) {
  std::latch registered_again{2};
  OnEveryRank(2, [&](int32_t rank) {
    testing::TrainerProxy proxy(daemon_->address(), [&](const std::string& method, int call) {
      const bool lost = rank == 0 && method == "RegisterLayout" && call == 0;
      return lost ? testing::Fault::kLoseReply : testing::Fault::kNone;
    });
    auto session = Session::Open({.address = proxy.address(), .rank = rank, .world_size = 2});
    if (!session.ok()) {
      registered_again.count_down();
      FAIL() << session.status();
    }
    const auto registered = (*session)->Register(OneMatrix(2, 8 + rank));
    EXPECT_EQ(ReasonOf(registered.status()), "LAYOUT_DIFFERS") << registered.status();
    auto metadata = MetadataOf(registered.status());
    EXPECT_EQ(metadata["parameter"], "matrix");
    EXPECT_EQ(metadata["value"], "8x16");
    EXPECT_EQ(metadata["other_value"], "9x16");
    EXPECT_EQ(metadata["refusals"], "1");
    // The same layout may be right the second time: the other one has changed.
    const auto again = (*session)->Register(OneMatrix(2));
    EXPECT_TRUE(again.ok()) << again.status();
    // Whoever leaves before all have registered takes the registration with it.
    registered_again.arrive_and_wait();
    EXPECT_TRUE((*session)->Close().ok());
  });
}

// In parts, both ways: its routing table is larger than one message, too.
TEST_F(SessionErrorsTest, ALayoutLargerThanAMessageIsRegistered) {
  auto session = Session::Open({.address = daemon_->address()});
  ASSERT_TRUE(session.ok()) << session.status();
  LayoutBuilder builder(1);
  const std::string prefix(230, 'x');
  for (int i = 0; i < 20000; ++i) {
    builder.Add({.name = prefix + std::to_string(i), .shape = {4}, .route = Route::kAdamW});
  }
  const auto registered = (*session)->Register(*builder.Build());
  ASSERT_TRUE(registered.ok()) << registered.status();
  EXPECT_EQ(registered->parameter_bucket.size(), 20000);
  EXPECT_TRUE((*session)->Close().ok());
}

TEST_F(SessionErrorsTest, AMessageBeyondTheDaemonsLimitNamesBothSizes) {
  auto session = Session::Open({.address = daemon_->address()});
  ASSERT_TRUE(session.ok()) << session.status();
  LayoutBuilder builder(1);
  builder.Add({.name = std::string(5 << 20, 'x'), .shape = {4, 4}});
  const absl::Status refused = (*session)->Register(*builder.Build()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(ReasonOf(refused), "MESSAGE_TOO_LARGE");
  EXPECT_EQ(MetadataOf(refused)["limit_bytes"], "4194304");
  EXPECT_GT(std::stoll(MetadataOf(refused)["bytes"]), 5 << 20);
  EXPECT_TRUE((*session)->Register(OneMatrix(1)).ok());
  EXPECT_TRUE((*session)->Close().ok());
}

TEST_F(SessionErrorsTest, AKilledDaemonEndsEveryCallWithAReason) {
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  FillGradients((*world)[0]);
  // The other rank submits nothing: the step stays undecided until the daemon is gone.
  std::thread waiting([&] {
    const absl::StatusOr<Outcome> outcome = (*world)[0].Step(Scalars());
    EXPECT_TRUE(absl::IsUnavailable(outcome.status())) << outcome.status();
    EXPECT_EQ(ReasonOf(outcome.status()), "DAEMON_LOST");
  });
  daemon_->Kill();
  waiting.join();
  EXPECT_TRUE((*world)[0].lost());
  EXPECT_EQ(ReasonOf((*world)[0].Step(Scalars()).status()), "DAEMON_LOST");
  EXPECT_EQ(ReasonOf((*world)[1].Push()), "DAEMON_LOST");
  EXPECT_TRUE((*world)[1].Close().ok());
}

TEST_F(SessionErrorsTest, ATrainerThatGoesAbortsTheStepOfTheOthers) {
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  FillGradients((*world)[0]);
  std::thread waiting([&] {
    const absl::StatusOr<Outcome> outcome = (*world)[0].Step(Scalars());
    EXPECT_FALSE(outcome.ok());
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("rank 1"));
  });
  world->Drop(1);
  waiting.join();
}

TEST_F(SessionErrorsTest, SigtermBetweenStepsEndsTheDaemonWithZero) {
  auto world = MakeWorld(1);
  ASSERT_TRUE(world->complete());
  FillGradients((*world)[0]);
  ASSERT_TRUE((*world)[0].Step(Scalars()).ok());
  EXPECT_EQ(daemon_->Stop(), 0);
  EXPECT_TRUE(absl::IsUnavailable((*world)[0].Step(Scalars()).status()));
}

TEST_F(SessionErrorsTest, SessionsLeaveNoDescriptorsBehind) {
  const auto cycle = [&] {
    auto world = MakeWorld(1);
    ASSERT_TRUE(world->complete());
    world->Close();
  };
  cycle();  // what gRPC opens once
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) cycle();
  EXPECT_LE(OpenDescriptors(), before);
}

}  // namespace
}  // namespace dmuond::client
