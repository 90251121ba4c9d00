// A session's whole life against a real daemon.
#include "dmuond/client/session.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainers.h"

namespace dmuond::client {
namespace {

using testing::DaemonTest;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using testing::OnEveryRank;
using testing::World;

constexpr int32_t kMatrix = 0;
constexpr int32_t kVector = 1;
constexpr int64_t kRows = 24;
constexpr int64_t kColumns = 40;

// A muon matrix and an adamw vector, replicated.
Layout Replicated(int32_t world_size) {
  LayoutBuilder builder(world_size);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {kRows, kColumns}});
  builder.Add({.name = "vector", .shape = {100}, .route = Route::kAdamW});
  return *builder.Build();
}

// Numbers that differ from element to element, and are exact in fp32.
void FillWith(std::span<float> values, int seed) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>((i * 7 + seed * 13) % 33) - 16) / 32;
  }
}
std::vector<float> Copy(std::span<float> values) { return {values.begin(), values.end()}; }

void FillWeights(Session& session) {
  FillWith(session.Weight<float>(kMatrix), 1);
  FillWith(session.Weight<float>(kVector), 2);
}
void FillGradients(Session& session, int seed) {
  FillWith(session.Gradient<float>(kMatrix), seed);
  FillWith(session.Gradient<float>(kVector), seed + 1);
}

StepScalars Scalars(double learning_rate) {
  return {.groups = {{.learning_rate = learning_rate, .momentum = 0.95, .beta2 = 0.999}}};
}

class SessionTest : public DaemonTest {
 protected:
  void StartDaemon(const std::string& devices = "cpu:1") {
    DaemonTest::StartDaemon({.devices = devices});
  }
  std::unique_ptr<World> MakeWorld(int32_t size) {
    auto world = std::make_unique<World>(
        daemon_->address(), size, [size](int32_t) { return Replicated(size); }, FillWeights);
    if (!world->complete()) ADD_FAILURE() << daemon_->Log();
    return world;
  }
};

TEST_F(SessionTest, OneTrainersStepDoesWhatAdamWAndMuonDo) {
  StartDaemon();
  auto world = MakeWorld(1);
  ASSERT_TRUE(world->complete());
  Session& session = (*world)[0];
  const std::vector<float> matrix = Copy(session.Weight<float>(kMatrix));
  const std::vector<float> vector = Copy(session.Weight<float>(kVector));
  FillGradients(session, 5);
  const std::vector<float> gradient = Copy(session.Gradient<float>(kVector));
  const absl::StatusOr<Outcome> outcome = session.Step(Scalars(0.01));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
  EXPECT_EQ(outcome->step, 1);
  EXPECT_EQ(outcome->matrices, 1);
  EXPECT_EQ(session.last_committed_step(), 1);

  // AdamW's first step: its moments are the gradient and its square after bias correction.
  for (size_t i = 0; i < vector.size(); ++i) {
    const double g = gradient[i];
    EXPECT_NEAR(session.Weight<float>(kVector)[i], vector[i] - (0.01 * g / (std::fabs(g) + 1e-8)),
                1e-6);
  }
  // Muon's update has singular values of about 1 (0.7 to 1.2), and as many as there are rows.
  double squares = 0;
  for (size_t i = 0; i < matrix.size(); ++i) {
    const double update = (matrix[i] - session.Weight<float>(kMatrix)[i]) / 0.01;
    squares += update * update;
  }
  const double mean_singular_value = std::sqrt(squares / kRows);
  EXPECT_GT(mean_singular_value, 0.6);
  EXPECT_LT(mean_singular_value, 1.3);
  EXPECT_GT(outcome->gradient_norm, 0);
  EXPECT_TRUE(session.Close().ok());
}

TEST_F(SessionTest, ReplicasThatBeganUnequalAreEqualAfterThePush) {
  StartDaemon();
  World world(
      daemon_->address(), 2, [](int32_t) { return Replicated(2); },
      [](Session& session) { FillWith(session.Weight<float>(kMatrix), 1 + session.rank()); });
  ASSERT_TRUE(world.complete());
  std::vector<float> of_rank_0(kRows * kColumns);
  FillWith(of_rank_0, 1);
  EXPECT_THAT(Copy(world[0].Weight<float>(kMatrix)), ElementsAreArray(of_rank_0));
  EXPECT_THAT(Copy(world[1].Weight<float>(kMatrix)), ElementsAreArray(of_rank_0));
  world.Close();
}

TEST_F(SessionTest, ATrainerThatDiedBeginsAnewAtOnceWithDiscard) {
  StartDaemon();
  const auto open = [&](Resume resume) {
    return Session::Open({.address = daemon_->address(), .resume = resume});
  };
  {
    auto world = MakeWorld(1);
    ASSERT_TRUE(world->complete());
    FillGradients((*world)[0], 5);
    ASSERT_TRUE((*world)[0].Step(Scalars(0.01)).ok());
  }
  const absl::Status refused = open(Resume::kNever).status();
  EXPECT_EQ(ReasonOf(refused), "JOB_HAS_STATE");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("DMUOND_RESUME=discard"));
  auto session = open(Resume::kDiscard);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->has_state());
  EXPECT_EQ((*session)->last_committed_step(), 0);
  EXPECT_TRUE((*session)->Close().ok());
  const absl::Status nameless =
      Session::Open({.address = daemon_->address(), .world_size = 2, .resume = Resume::kDiscard})
          .status();
  EXPECT_THAT(std::string(nameless.message()), HasSubstr("DMUOND_LAUNCH"));
}

// Four steps of one trainer with the mean of the gradients that two trainers have.
TEST_F(SessionTest, TwoTrainersOnTwoLanesAreOneTrainerWithTheMeanOfTheirGradients) {
  constexpr int kSteps = 4;
  std::vector<float> expected;
  {
    StartDaemon();
    auto world = MakeWorld(1);
    ASSERT_TRUE(world->complete());
    Session& session = (*world)[0];
    for (int step = 1; step <= kSteps; ++step) {
      for (const int32_t parameter : {kMatrix, kVector}) {
        const std::span<float> gradient = session.Gradient<float>(parameter);
        std::vector<float> other(gradient.size());
        FillWith(gradient, step);
        FillWith(other, step + 50);
        for (size_t i = 0; i < other.size(); ++i) gradient[i] = (gradient[i] + other[i]) / 2;
      }
      ASSERT_TRUE(session.Step(Scalars(0.01)).ok());
    }
    expected = Copy(session.Weight<float>(kMatrix));
    const std::vector<float> vector = Copy(session.Weight<float>(kVector));
    expected.insert(expected.end(), vector.begin(), vector.end());
    world->Close();
    EXPECT_EQ(daemon_->Stop(), 0);
  }
  StartDaemon("cpu:2");
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  for (int step = 1; step <= kSteps; ++step) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      for (const int32_t parameter : {kMatrix, kVector}) {
        FillWith((*world)[rank].Gradient<float>(parameter), step + (50 * rank));
      }
    }
    for (const auto& outcome : world->Step(Scalars(0.01))) {
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    }
  }
  for (int32_t rank = 0; rank < 2; ++rank) {
    std::vector<float> weights = Copy((*world)[rank].Weight<float>(kMatrix));
    const std::vector<float> vector = Copy((*world)[rank].Weight<float>(kVector));
    weights.insert(weights.end(), vector.begin(), vector.end());
    EXPECT_THAT(weights, ElementsAreArray(expected)) << "rank " << rank;
  }
  world->Close();
}

TEST_F(SessionTest, ShardsOfUnevenAndNoRowsGiveTheWholesWeights) {
  std::vector<float> expected;
  StartDaemon();
  {
    auto world = MakeWorld(1);
    ASSERT_TRUE(world->complete());
    FillGradients((*world)[0], 3);
    ASSERT_TRUE((*world)[0].Step(Scalars(0.02)).ok());
    expected = Copy((*world)[0].Weight<float>(kMatrix));
    world->Close();
  }
  const std::vector<int64_t> cuts{0, 17, 17, kRows};
  const auto begin_of = [&](int32_t rank) { return static_cast<size_t>(cuts[rank] * kColumns); };
  std::vector<float> whole(kRows * kColumns);
  const auto cut = [&](int32_t rank, int seed, std::span<float> to) {
    FillWith(whole, seed);
    std::copy_n(whole.begin() + static_cast<int64_t>(begin_of(rank)), to.size(), to.begin());
  };
  StartDaemon("cpu:2");
  World world(
      daemon_->address(), 3,
      [&](int32_t rank) {
        LayoutBuilder builder(3);
        builder.AddGroup({.preset = "torch"});
        builder.Add({.name = "matrix",
                     .shape = {kRows, kColumns},
                     .box = Box{{cuts[rank], 0}, {cuts[rank + 1], kColumns}}});
        return *builder.Build();
      },
      [](Session&) {});
  ASSERT_TRUE(world.complete());
  EXPECT_EQ(world[1].Size(kMatrix), 0);
  EXPECT_EQ(world[1].WeightBytes(kMatrix), nullptr);
  for (int32_t rank = 0; rank < 3; ++rank) {
    cut(rank, 1, world[rank].Weight<float>(kMatrix));
    cut(rank, 3, world[rank].Gradient<float>(kMatrix));
  }
  OnEveryRank(3, [&](int32_t rank) { EXPECT_TRUE(world[rank].Push().ok()); });
  for (const auto& outcome : world.Step(Scalars(0.02))) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
  }
  for (const int32_t rank : {0, 2}) {
    const std::vector<float> part(expected.begin() + static_cast<int64_t>(begin_of(rank)),
                                  expected.begin() + static_cast<int64_t>(begin_of(rank + 1)));
    EXPECT_THAT(Copy(world[rank].Weight<float>(kMatrix)), ElementsAreArray(part));
  }
  world.Close();
}

TEST_F(SessionTest, AParameterAbsentEverywhereKeepsItsWeights) {
  StartDaemon();
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  const std::vector<float> vector = Copy((*world)[0].Weight<float>(kVector));
  const std::vector<float> matrix = Copy((*world)[0].Weight<float>(kMatrix));
  for (int32_t rank = 0; rank < 2; ++rank) {
    FillGradients((*world)[rank], 3);
    // What lies where no gradient is must not matter.
    std::ranges::fill((*world)[rank].Gradient<float>(kVector),
                      std::numeric_limits<float>::quiet_NaN());
  }
  for (const auto& outcome : world->Step(Scalars(0.1), {.absent = {kVector}})) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
  }
  EXPECT_THAT(Copy((*world)[0].Weight<float>(kVector)), ElementsAreArray(vector));
  EXPECT_NE(Copy((*world)[0].Weight<float>(kMatrix)), matrix);
  world->Close();
}

TEST_F(SessionTest, WhatIsMarkedReadyIsNotAbsentUnlessItIsWithdrawn) {
  StartDaemon();
  auto world = MakeWorld(1);
  ASSERT_TRUE(world->complete());
  Session& session = (*world)[0];
  FillGradients(session, 3);
  const int32_t bucket = session.registered().parameter_bucket[kVector];
  session.MarkReady(bucket);
  const absl::Status refused = session.Step(Scalars(0.1), {.absent = {kVector}}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(refused.message(),
              HasSubstr(absl::StrCat("parameter ", kVector, ", but its bucket ", bucket)));
  const std::vector<float> vector = Copy(session.Weight<float>(kVector));
  const absl::StatusOr<Outcome> withdrawn =
      session.Step(Scalars(0.1), {.absent = {kVector}, .withdraw = true});
  ASSERT_TRUE(withdrawn.ok()) << withdrawn.status();
  EXPECT_EQ(withdrawn->kind, Outcome::Kind::kCommitted);
  EXPECT_THAT(Copy(session.Weight<float>(kVector)), ElementsAreArray(vector));
  world->Close();
}

TEST_F(SessionTest, ANonFiniteGradientSkipsTheStepAndTakesItsNumber) {
  StartDaemon();
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  const std::vector<float> matrix = Copy((*world)[0].Weight<float>(kMatrix));
  FillGradients((*world)[0], 3);
  FillGradients((*world)[1], 3);
  (*world)[1].Gradient<float>(kMatrix)[7] = std::numeric_limits<float>::infinity();
  for (const auto& outcome : world->Step(Scalars(0.1))) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kSkipped);
    EXPECT_EQ(outcome->reason, Outcome::Reason::kNonFinite);
  }
  EXPECT_THAT(Copy((*world)[0].Weight<float>(kMatrix)), ElementsAreArray(matrix));
  FillGradients((*world)[1], 3);
  for (const auto& outcome : world->Step(Scalars(0.1))) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    EXPECT_EQ(outcome->step, 2);
  }
  // One that no lane reads is the trainer's to tell.
  OnEveryRank(2, [&](int32_t rank) {
    const SubmitOptions options{.not_finite = rank == 1 ? std::optional(kVector) : std::nullopt};
    const absl::StatusOr<Outcome> outcome = (*world)[rank].Step(Scalars(0.1), options);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kSkipped);
    EXPECT_EQ(outcome->detail, "the gradient of parameter \"vector\" is not finite on rank 1");
  });
  const absl::Status unknown = (*world)[0].Step(Scalars(0.1), {.not_finite = 2}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(unknown)) << unknown;
  EXPECT_THAT(unknown.message(), HasSubstr("parameter 2 of 2"));
  world->Close();
}

TEST_F(SessionTest, ScalarsThatDifferAreRefusedAndACorrectedSubmitWorks) {
  StartDaemon();
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  FillGradients((*world)[0], 3);
  FillGradients((*world)[1], 4);
  OnEveryRank(2, [&](int32_t rank) {
    const absl::StatusOr<Outcome> outcome = (*world)[rank].Step(Scalars(rank == 0 ? 0.1 : 0.2));
    EXPECT_TRUE(absl::IsInvalidArgument(outcome.status())) << outcome.status();
    EXPECT_EQ(ReasonOf(outcome.status()), "SCALARS_DIFFER");
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr("learning_rate"));
    EXPECT_EQ(MetadataOf(outcome.status())["next_attempt"],
              std::to_string((*world)[rank].next_attempt()));
  });
  for (const auto& outcome : world->Step(Scalars(0.1))) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    EXPECT_EQ(outcome->step, 1);
  }
  world->Close();
}

TEST_F(SessionTest, BucketsMayBeMarkedEarlyAndTheWaitsTakenApart) {
  StartDaemon();
  auto world = MakeWorld(1);
  ASSERT_TRUE(world->complete());
  Session& session = (*world)[0];
  const std::vector<float> matrix = Copy(session.Weight<float>(kMatrix));
  for (int64_t step = 1; step <= 3; ++step) {
    FillGradients(session, static_cast<int>(step));
    session.MarkReady(0);
    absl::StatusOr<Outcome> outcome =
        session.Submit(Scalars(0.01), {.wait = std::chrono::milliseconds(0)});
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    // In the last step by asking again and again.
    const std::chrono::milliseconds once =
        step < 3 ? std::chrono::seconds(10) : std::chrono::milliseconds(0);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (outcome.ok() && outcome->kind == Outcome::Kind::kPending &&
           std::chrono::steady_clock::now() < deadline) {
      outcome = session.Wait(once);
    }
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, Outcome::Kind::kCommitted);
    EXPECT_EQ(outcome->step, step);
    const absl::Status published = session.WaitPublished();
    ASSERT_TRUE(published.ok()) << published;
  }
  EXPECT_NE(Copy(session.Weight<float>(kMatrix)), matrix);
  world->Close();
}

TEST_F(SessionTest, StateCanBePulledAndPushedBack) {
  StartDaemon();
  auto world = MakeWorld(2);
  ASSERT_TRUE(world->complete());
  Session& session = (*world)[0];
  for (int step = 1; step <= 2; ++step) {
    for (int32_t rank = 0; rank < 2; ++rank) FillGradients((*world)[rank], step);
    for (const auto& outcome : world->Step(Scalars(0.01))) ASSERT_TRUE(outcome.ok());
  }
  const auto pull = [&](int32_t parameter, StateKind kind) {
    absl::StatusOr<std::vector<float>> values = session.Pull(parameter, kind);
    EXPECT_TRUE(values.ok()) << values.status();
    return values.ok() ? *std::move(values) : std::vector<float>();
  };
  EXPECT_THAT(pull(kMatrix, StateKind::kMaster),
              ElementsAreArray(Copy(session.Weight<float>(kMatrix))));
  EXPECT_THAT(pull(kVector, StateKind::kStep), ElementsAreArray({2.0F}));
  const std::vector<float> momentum = pull(kMatrix, StateKind::kMomentum);
  ASSERT_EQ(momentum.size(), kRows * kColumns);

  std::vector<float> doubled = momentum;
  for (float& value : doubled) value *= 2;
  OnEveryRank(2, [&](int32_t rank) {
    const absl::Status pushed = (*world)[rank].PushState(
        {{.parameter = kMatrix, .kind = StateKind::kMomentum, .values = doubled}});
    EXPECT_TRUE(pushed.ok()) << pushed;
  });
  EXPECT_THAT(pull(kMatrix, StateKind::kMomentum), ElementsAreArray(doubled));
  const absl::Status wrong = session.PushState({{.parameter = kMatrix, .values = {1, 2}}});
  EXPECT_TRUE(absl::IsInvalidArgument(wrong)) << wrong;
  world->Close();
}

TEST_F(SessionTest, TrainersThatSayThatTheyBeginUnequalAreTold) {
  StartDaemon();
  const std::string one(16, '1');
  OnEveryRank(2, [&](int32_t rank) {
    auto session = Session::Open({.address = daemon_->address(), .rank = rank, .world_size = 2});
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE((*session)->Register(Replicated(2)).ok());
    const std::string other = rank == 0 ? one : std::string(16, '2');
    absl::Status status = (*session)->Attach({.digests = {one, other}});
    if (status.ok()) {
      FillWeights(**session);
      status = (*session)->Push();
    }
    EXPECT_EQ(ReasonOf(status), "WEIGHTS_DIFFER") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("parameter 'vector', box [0:100]"));
  });
}

TEST_F(SessionTest, PoisonedWeightsAreAllWrittenBeforeAStepReturns) {
  StartDaemon();
  auto session = Session::Open({.address = daemon_->address(), .poison = true});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->Register(Replicated(1)).ok());
  ASSERT_TRUE((*session)->Attach().ok());
  FillWeights(**session);
  ASSERT_TRUE((*session)->Push().ok());
  for (int step = 1; step <= 20; ++step) {
    FillGradients(**session, step);
    ASSERT_TRUE((*session)->Step(Scalars(0.01)).ok());
    for (const int32_t parameter : {kMatrix, kVector}) {
      EXPECT_TRUE(std::ranges::all_of((*session)->Weight<float>(parameter),
                                      [](float weight) { return std::isfinite(weight); }));
    }
  }
  EXPECT_TRUE((*session)->Close().ok());
}

}  // namespace
}  // namespace dmuond::client
