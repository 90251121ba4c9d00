// Exactly once over real sockets: whatever happens to a trainer's calls on their way (twice, late,
// again after later ones, lost, answered into nowhere, their connection cut), weights and optimizer
// state are, bit for bit, those of a run that nothing happened to. Under way the trainers also
// disagree on a scalar once, and one takes a step back that it has signalled: aborted attempts, of
// which the same gradients are collected again.
//
// DMUOND_TEST_SEED=N replays the schedule of one random run; a failure prints its N.
#include <cstdlib>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/client/trainer_proxy.h"
#include "tests/client/trainers.h"

namespace dmuond::client {
namespace {

using testing::DaemonProcess;
using testing::Fault;
using ::testing::IsEmpty;
using testing::OnEveryRank;
using testing::TrainerProxy;

constexpr int32_t kWorld = 2;
constexpr int32_t kMatrix = 0;
constexpr int32_t kVector = 1;
constexpr int64_t kSteps = 6;
constexpr const char* kMethods[] = {"Hello",         "OpenSession",    "RegisterLayout",
                                    "AttachBuffers", "PushParameters", "PullParameters",
                                    "SubmitStep",    "WaitStep",       "CloseSession"};

void FillWith(std::span<float> values, int seed) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>((i * 7 + seed * 13) % 33) - 16) / 32;
  }
}
Layout TwoParameters() {
  LayoutBuilder builder(kWorld);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {24, 40}});
  builder.Add({.name = "vector", .shape = {100}, .route = Route::kAdamW});
  return *builder.Build();
}
StepScalars Scalars(double learning_rate) {
  return {.groups = {{.learning_rate = learning_rate, .momentum = 0.95, .beta2 = 0.999}}};
}

// What a rank has in the end.
struct State {
  std::vector<float> weights;  // of both parameters
  std::map<std::pair<int32_t, StateKind>, std::vector<float>> optimizer;
  std::vector<int64_t> steps;  // that committed, in order

  bool operator==(const State&) const = default;
};

constexpr std::pair<int32_t, StateKind> kStates[] = {
    {kMatrix, StateKind::kMaster}, {kMatrix, StateKind::kMomentum}, {kMatrix, StateKind::kStep},
    {kVector, StateKind::kMaster}, {kVector, StateKind::kExpAvg},   {kVector, StateKind::kExpAvgSq},
    {kVector, StateKind::kStep}};

// One trainer's life. `disturbed`: with a disagreement and a withdrawal, which change nothing.
class Trainer {
 public:
  // `pending`: rank 0 has handed step 3 in, and nobody else has.
  Trainer(int32_t rank, bool disturbed, std::latch& pending)
      : rank_(rank), disturbed_(disturbed), pending_(pending) {}

  // A trainer that fails is gone at once: the other one hears of it instead of waiting.
  void Live(const std::string& address) {
    const absl::Status status = Train(address);
    EXPECT_TRUE(status.ok()) << "rank " << rank_ << ": " << status;
    session_.reset();
    SayPending();
  }
  [[nodiscard]] const State& state() const { return state_; }

 private:
  absl::Status Train(const std::string& address) {
    auto session = Session::Open({.address = address, .rank = rank_, .world_size = kWorld});
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    absl::Status status = session_->Register(TwoParameters()).status();
    if (status.ok()) status = session_->Attach();
    if (!status.ok()) return status;
    FillWith(session_->Weight<float>(kMatrix), 1);
    FillWith(session_->Weight<float>(kVector), 2);
    status = session_->Push();
    for (int64_t step = 1; status.ok() && step <= kSteps; ++step) {
      status = OneStep(step);
      if (status.ok() && step == 3) status = DoubleMomentum();
      if (status.ok() && step == 4) status = session_->Push({"vector"});
    }
    for (const auto& [parameter, kind] : kStates) {
      if (!status.ok()) return status;
      auto values = session_->Pull(parameter, kind);
      status = values.status();
      if (values.ok()) state_.optimizer[{parameter, kind}] = *std::move(values);
    }
    if (!status.ok()) return status;
    for (const int32_t parameter : {kMatrix, kVector}) {
      const std::span<float> weights = session_->Weight<float>(parameter);
      state_.weights.insert(state_.weights.end(), weights.begin(), weights.end());
    }
    return session_->Close();
  }

  absl::Status OneStep(int64_t step) {
    const int seed = static_cast<int>((step * 2) + (rank_ * 50));
    FillWith(session_->Gradient<float>(kMatrix), seed);
    FillWith(session_->Gradient<float>(kVector), seed + 1);
    if (disturbed_ && step == 2) {
      const auto refused = session_->Step(Scalars(rank_ == 0 ? 0.1 : 0.2));
      if (ReasonOf(refused.status()) != "SCALARS_DIFFER") {
        return absl::InternalError(
            absl::StrCat("not SCALARS_DIFFER: ", refused.status().ToString()));
      }
    }
    SubmitOptions options;
    options.withdraw = disturbed_ && step == 5 && rank_ == 0;
    // By SubmitStep and WaitStep apart.
    if (step == 3 && rank_ == 0) options.wait = std::chrono::milliseconds(0);
    if (step == 3 && rank_ != 0) pending_.wait();
    absl::StatusOr<Outcome> outcome =
        session_->Step(Scalars(0.01 * static_cast<double>(step)), options);
    if (step == 3) SayPending();
    if (outcome.ok() && outcome->kind == Outcome::Kind::kPending) outcome = session_->Wait();
    if (!outcome.ok()) return outcome.status();
    if (outcome->kind != Outcome::Kind::kCommitted) {
      return absl::InternalError(absl::StrCat("step ", step, ": ", outcome->detail));
    }
    state_.steps.push_back(outcome->step);
    return session_->WaitPublished();
  }
  void SayPending() {
    if (rank_ == 0 && !std::exchange(said_, true)) pending_.count_down();
  }
  absl::Status DoubleMomentum() {
    auto momentum = session_->Pull(kMatrix, StateKind::kMomentum);
    if (!momentum.ok()) return momentum.status();
    for (float& value : *momentum) value *= 2;
    return session_->PushState(
        {{.parameter = kMatrix, .kind = StateKind::kMomentum, .values = *std::move(momentum)},
         {.parameter = kVector, .kind = StateKind::kStep, .values = {7}}});
  }

  const int32_t rank_;
  const bool disturbed_;
  std::latch& pending_;
  bool said_ = false;
  std::unique_ptr<Session> session_;
  State state_;
};

class ExactlyOnceTest : public ::testing::Test {
 public:
  using MakeSchedule = std::function<TrainerProxy::Schedule(int32_t rank)>;

 protected:
  // One daemon for all runs: each must leave it as it found it.
  static void SetUpTestSuite() {
    auto daemon = DaemonProcess::Start({.devices = "cpu:2", .flags = {"--threads=1"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    undisturbed_ = Run({daemon_->address(), daemon_->address()}, false);
    ASSERT_EQ(undisturbed_.size(), kWorld);
    ASSERT_EQ(undisturbed_[0].steps.size(), kSteps);
    ASSERT_EQ(undisturbed_[0].weights, undisturbed_[1].weights);
  }
  static void TearDownTestSuite() {
    EXPECT_EQ(daemon_->Stop(), 0);
    daemon_.reset();
  }
  void TearDown() override {
    if (HasFailure()) std::cerr << daemon_->Log();
  }

  static std::vector<State> Run(const std::vector<std::string>& addresses, bool disturbed) {
    std::latch pending(1);
    std::vector<Trainer> trainers;
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      trainers.emplace_back(rank, disturbed, pending);
    }
    OnEveryRank(kWorld, [&](int32_t rank) { trainers[rank].Live(addresses[rank]); });
    std::vector<State> states;
    for (const Trainer& trainer : trainers) states.push_back(trainer.state());
    return states;
  }

  // A disturbed run, each trainer by its own proxy.
  void RunDisturbed(const MakeSchedule& schedule) {
    RunDisturbed({daemon_->address(), daemon_->address()}, schedule);
  }
  void RunDisturbed(const std::vector<std::string>& daemons, const MakeSchedule& schedule) {
    std::vector<std::unique_ptr<TrainerProxy>> proxies;
    std::vector<std::string> addresses;
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      proxies.push_back(std::make_unique<TrainerProxy>(daemons[rank], schedule(rank)));
      addresses.push_back(proxies.back()->address());
    }
    const std::vector<State> states = Run(addresses, true);
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      EXPECT_TRUE(states[rank] == undisturbed_[rank]) << "rank " << rank << " differs";
      EXPECT_THAT(proxies[rank]->complaints(), IsEmpty()) << "rank " << rank;
      for (const auto& [which, count] : proxies[rank]->done()) done_[which] += count;
    }
  }

  static std::unique_ptr<DaemonProcess> daemon_;
  static std::vector<State> undisturbed_;
  std::map<std::pair<std::string, Fault>, int> done_;
};

std::unique_ptr<DaemonProcess> ExactlyOnceTest::daemon_;
std::vector<State> ExactlyOnceTest::undisturbed_;

class EachFaultTest : public ExactlyOnceTest, public ::testing::WithParamInterface<Fault> {};

TEST_P(EachFaultTest, BefallsEveryMethodAndChangesNothing) {
  // The first call of each method and every third after it; the other rank's are out of step.
  RunDisturbed([](int32_t rank) {
    return [rank](const std::string& method, int call) {
      const bool now =
          call % 3 == (method == "PushParameters" || method == "SubmitStep" ? rank : 0);
      return now ? GetParam() : Fault::kNone;
    };
  });
  for (const char* method : kMethods) {
    EXPECT_GT((done_[{method, GetParam()}]), 0) << method << " has not been hit";
  }
}

INSTANTIATE_TEST_SUITE_P(All, EachFaultTest, ::testing::ValuesIn(testing::kAllFaults),
                         [](const auto& info) { return testing::Name(info.param); });

// Runs `runs` schedules from one seed on, or the one that is to be replayed.
void ForSeeds(int runs, const std::function<void(const ExactlyOnceTest::MakeSchedule&)>& run) {
  uint64_t first = std::random_device()();
  if (const char* given = std::getenv("DMUOND_TEST_SEED"); given != nullptr) {
    first = std::strtoull(given, nullptr, 10);
    runs = 1;
  }
  std::cout << "seeds " << first << " to " << first + runs - 1 << "\n";
  for (uint64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE(absl::StrCat("replay with DMUOND_TEST_SEED=", seed));
    run([seed](int32_t rank) {
      // A trainer's calls come one after the other: what befalls each depends on the seed alone.
      return [random = std::mt19937_64(seed * kWorld + rank)](const std::string&, int) mutable {
        const uint64_t draw = random() % 10;
        return draw < 4 ? Fault::kNone : testing::kAllFaults[draw - 4];
      };
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(ExactlyOnceTest, RandomFaultsChangeNothing) {
  ForSeeds(10, [this](const MakeSchedule& schedule) { RunDisturbed(schedule); });
}

TEST_F(ExactlyOnceTest, RandomFaultsOnTwoNodesChangeNothing) {
  auto group = testing::StartGroup(2, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  const std::vector<std::string> addresses = {(*group)[0]->address(), (*group)[1]->address()};
  ForSeeds(8, [&](const MakeSchedule& schedule) { RunDisturbed(addresses, schedule); });
  for (const auto& daemon : *group) {
    if (HasFailure()) std::cerr << daemon->Log() << "\n";
  }
}

}  // namespace
}  // namespace dmuond::client
