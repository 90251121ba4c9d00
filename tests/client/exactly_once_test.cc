// Exactly once over real sockets: whatever happens to a trainer's calls on their way (twice, late,
// again after later ones, lost, answered into nowhere, their connection cut), weights and optimizer
// state are, bit for bit, those of a run that nothing happened to. Under way the trainers also
// disagree on a scalar once, and one takes a step back that it has signalled: aborted attempts, of
// which the same gradients are collected again. And one has the job go back to a snapshot, once.
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
#include "dmuond/v1/trainer.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/client/session_watcher.h"
#include "tests/client/trainer_proxy.h"
#include "tests/client/trainers.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::client {
namespace {

using testing::DaemonProcess;
using testing::Fault;
using ::testing::IsEmpty;
using testing::OnEveryRank;
using testing::SessionWatcher;
using testing::TrainerProxy;

constexpr int32_t kWorld = 2;
constexpr int32_t kMatrix = 0;
constexpr int32_t kVector = 1;
constexpr int64_t kSteps = 9;
constexpr int64_t kSaved = 6;      // the step of the snapshot
constexpr int64_t kLoadAfter = 8;  // the job goes back to it after this one

// Of the service, as the protocol has them: a new one must be hit, too.
std::vector<std::string> Methods() {
  const google::protobuf::ServiceDescriptor* service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
          v1::Trainer::service_full_name());
  std::vector<std::string> names;
  for (int i = 0; i < service->method_count(); ++i) names.push_back(service->method(i)->name());
  return names;
}

// A job of its own for each run: snapshots outlive it.
std::string NextJob() {
  static int jobs = 0;
  return absl::StrCat("run", ++jobs);
}

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

// What one rank of a run waits for; it is said at the latest when the other one ends.
struct Milestones {
  std::latch pending{1};      // rank 0 has handed step 3 in, and nobody else has
  std::latch before_load{1};  // rank 1 has read how the step before the load ended
  std::latch heard{kWorld};   // whoever watches has heard of the last step: nobody closes before
};

// One trainer's life. `disturbed`: with a disagreement, a withdrawal and a snapshot that is loaded,
// which change nothing; whoever knows the session's key watches it.
class Trainer {
 public:
  using KeyOf = std::function<v1::SessionKey(int32_t rank)>;  // null: nobody does
  Trainer(int32_t rank, KeyOf key, Milestones& milestones)
      : rank_(rank), disturbed_(key != nullptr), key_(std::move(key)), milestones_(milestones) {}

  // A trainer that fails is gone at once: the other one hears of it instead of waiting.
  void Live(const std::string& address, const std::string& job) {
    const absl::Status status = Train(address, job);
    watcher_.reset();
    EXPECT_TRUE(status.ok()) << "rank " << rank_ << ": " << status;
    session_.reset();
    SayPending();
    SayBeforeLoad();
    SayHeard();
  }
  [[nodiscard]] const State& state() const { return state_; }

 private:
  absl::Status Train(const std::string& address, const std::string& job) {
    auto session =
        Session::Open({.address = address, .job = job, .rank = rank_, .world_size = kWorld});
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    if (key_ != nullptr) watcher_ = std::make_unique<SessionWatcher>(address, key_(rank_));
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
      if (status.ok() && disturbed_ && step == kSaved) status = Save();
      if (status.ok() && disturbed_ && step == kLoadAfter && state_.steps.size() == kLoadAfter &&
          !std::exchange(gone_back_, true)) {
        status = GoBack();
        step = kSaved;
      }
    }
    for (const auto& [parameter, kind] : kStates) {
      if (!status.ok()) return status;
      auto values = session_->Pull(parameter, kind);
      status = values.status();
      if (values.ok()) state_.optimizer[{parameter, kind}] = *std::move(values);
    }
    if (!status.ok()) return status;
    if (watcher_ != nullptr && !watcher_->HearsOf(kSteps, attempt_)) {
      return absl::InternalError("who watches the session has not heard of its last step");
    }
    SayHeard();
    milestones_.heard.wait();
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
    if (step == 3 && rank_ != 0) milestones_.pending.wait();
    absl::StatusOr<Outcome> outcome =
        session_->Step(Scalars(0.01 * static_cast<double>(step)), options);
    if (step == 3) SayPending();
    if (outcome.ok() && outcome->kind == Outcome::Kind::kPending) outcome = session_->Wait();
    if (!outcome.ok()) return outcome.status();
    if (outcome->kind != Outcome::Kind::kCommitted) {
      return absl::InternalError(absl::StrCat("step ", step, ": ", outcome->detail));
    }
    state_.steps.push_back(outcome->step);
    attempt_ = outcome->attempt;
    return session_->WaitPublished();
  }
  absl::Status Save() {
    if (rank_ != 0) return absl::OkStatus();
    const auto saved = session_->SaveSnapshot();
    if (!saved.ok()) return saved.status();
    if (saved->step == kSaved) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("step ", saved->step, " was saved"));
  }
  // Every rank hears of it by its next step.
  absl::Status GoBack() {
    SayBeforeLoad();
    if (rank_ == 0) {
      milestones_.before_load.wait();
      const auto loaded = session_->LoadSnapshot(kSaved);
      if (!loaded.ok()) return loaded.status();
      if (*loaded != kSaved) return absl::InternalError(absl::StrCat("step ", *loaded));
    }
    const auto outcome = session_->Step(Scalars(1));
    if (!outcome.ok()) return outcome.status();
    if (outcome->kind != Outcome::Kind::kRolledBack || outcome->to_step != kSaved) {
      return absl::InternalError(absl::StrCat("not back: ", outcome->detail));
    }
    state_.steps.resize(kSaved);
    return absl::OkStatus();
  }
  void SayPending() {
    if (rank_ == 0 && !std::exchange(said_, true)) milestones_.pending.count_down();
  }
  void SayHeard() {
    if (!std::exchange(heard_said_, true)) milestones_.heard.count_down();
  }
  void SayBeforeLoad() {
    if (rank_ == 1 && !std::exchange(before_load_said_, true)) milestones_.before_load.count_down();
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
  const KeyOf key_;
  Milestones& milestones_;
  bool said_ = false;
  bool before_load_said_ = false;
  bool heard_said_ = false;
  bool gone_back_ = false;
  uint64_t attempt_ = 0;  // that committed the last step
  std::unique_ptr<Session> session_;
  std::unique_ptr<SessionWatcher> watcher_;
  State state_;
};

class ExactlyOnceTest : public ::testing::Test {
 public:
  using MakeSchedule = std::function<TrainerProxy::Schedule(int32_t rank)>;

 protected:
  // One daemon for all runs: each must leave it as it found it.
  static void SetUpTestSuite() {
    auto daemon = DaemonProcess::Start({.devices = "cpu:2", .flags = Flags()});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    undisturbed_ = Run({daemon_->address(), daemon_->address()}, nullptr);
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

  static std::vector<std::string> Flags() {
    return {"--threads=1", absl::StrCat("--snapshot_dir=", snapshots_->path(), "/snapshots"),
            "--snapshot_keep=16"};  // late copies save later steps, too
  }

  static std::vector<State> Run(const std::vector<std::string>& addresses,
                                const Trainer::KeyOf& key) {
    Milestones milestones;
    const std::string job = NextJob();
    std::vector<Trainer> trainers;
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      trainers.emplace_back(rank, key, milestones);
    }
    OnEveryRank(kWorld, [&](int32_t rank) { trainers[rank].Live(addresses[rank], job); });
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
    const std::vector<State> states =
        Run(addresses, [&](int32_t rank) { return proxies[rank]->key(); });
    for (int32_t rank = 0; rank < kWorld; ++rank) {
      EXPECT_TRUE(states[rank] == undisturbed_[rank]) << "rank " << rank << " differs";
      EXPECT_THAT(proxies[rank]->complaints(), IsEmpty()) << "rank " << rank;
      for (const auto& [which, count] : proxies[rank]->done()) done_[which] += count;
    }
  }

  static inline const auto snapshots_ = std::make_unique<testing::ScratchDirectory>();
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
  for (const std::string& method : Methods()) {
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
      // A trainer's calls come one after the other, and so do its watcher's: what befalls each
      // depends on the seed alone.
      return [random = std::mt19937_64(seed * kWorld + rank),
              watching = std::mt19937_64(~(seed * kWorld + rank))](const std::string& method,
                                                                   int) mutable {
        constexpr uint64_t kUndisturbed = 4;  // of so many more
        const uint64_t draw = (method == "WatchSession" ? watching : random)() %
                              (kUndisturbed + std::size(testing::kAllFaults));
        return draw < kUndisturbed ? Fault::kNone : testing::kAllFaults[draw - kUndisturbed];
      };
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(ExactlyOnceTest, RandomFaultsChangeNothing) {
  ForSeeds(10, [this](const MakeSchedule& schedule) { RunDisturbed(schedule); });
}

TEST_F(ExactlyOnceTest, RandomFaultsOnTwoNodesChangeNothing) {
  auto group = testing::StartGroup(2, "cpu:1", Flags());
  ASSERT_TRUE(group.ok()) << group.status();
  const std::vector<std::string> addresses = {(*group)[0]->address(), (*group)[1]->address()};
  ForSeeds(8, [&](const MakeSchedule& schedule) { RunDisturbed(addresses, schedule); });
  for (const auto& daemon : *group) {
    if (HasFailure()) std::cerr << daemon->Log() << "\n";
  }
}

}  // namespace
}  // namespace dmuond::client
