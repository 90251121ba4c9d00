// Steps that cannot be, against a real daemon, and the same steps done right afterwards: rows of
// the table "what bad input gets" (layout_input_test.cc says where the others are). Scalars that
// differ between trainers also are a part of tests/client/exactly_once_test.cc.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using Stub = RawTrainer::Stub;

class StepInputTest : public DaemonTest {
 protected:
  void SetUp() override { StartDaemon({}); }
  // Trainers of one world, after a push and `steps` steps.
  void Train(int32_t world, int64_t steps) {
    for (int32_t rank = 0; rank < world; ++rank) {
      trainers_.push_back(std::make_unique<RawTrainer>(daemon_->address()));
    }
    ForAll([&](int32_t rank) {
      RawTrainer& trainer = *trainers_[rank];
      absl::Status status = trainer.Open(rank, world);
      if (status.ok()) status = trainer.Register();
      if (status.ok()) status = trainer.Attach();
      if (status.ok()) status = trainer.Push();
      for (int64_t step = 1; status.ok() && step <= steps; ++step) status = trainer.Step(step);
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  void ForAll(const std::function<void(int32_t rank)>& act) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < trainers_.size(); ++rank) {
      threads.emplace_back(act, static_cast<int32_t>(rank));
    }
    for (std::thread& thread : threads) thread.join();
  }
  absl::Status Submit(int64_t step, const std::function<void(v1::SubmitStepRequest&)>& change) {
    v1::SubmitStepRequest request = trainers_[0]->SubmitRequest(step);
    change(request);
    v1::SubmitStepReply reply;
    return trainers_[0]->Submit(request, &reply);
  }
  std::vector<float> Weights() const {
    return {trainers_[0]->weights(), trainers_[0]->weights() + 128};
  }

  std::vector<std::unique_ptr<RawTrainer>> trainers_;
};

TEST_F(StepInputTest, StepsAndAttemptsOutOfOrderNameBothNumbers) {
  Train(1, 2);
  const std::vector<float> weights = Weights();
  const auto code = StatusCode::kFailedPrecondition;
  const uint64_t open = trainers_[0]->attempt();
  ExpectRefused(Submit(1, [](auto&) {}),
                {code, "STEP_OUT_OF_ORDER", {"rank 0", "step 1", "job at 3", "committed step 2"}});
  ExpectRefused(Submit(5, [](auto&) {}), {code, "STEP_OUT_OF_ORDER", {"rank 0", "step 5", "3"}});
  ExpectRefused(
      Submit(3, [&](auto& request) { request.set_attempt(open + 4); }),
      {code, "ATTEMPT_OUT_OF_ORDER", {"rank 0", std::to_string(open + 4), std::to_string(open)}});
  ExpectRefused(Submit(3, [](auto& request) { request.set_attempt(1); }),
                {code, "ATTEMPT_OUT_OF_ORDER", {"rank 0", "attempt 1 ", std::to_string(open)}});
  v1::WaitStepRequest wait;
  *wait.mutable_key() = trainers_[0]->key();
  wait.set_step(3);
  wait.set_attempt(open);
  v1::WaitStepReply reply;
  ExpectRefused(trainers_[0]->Call(&Stub::WaitStep, wait, &reply),
                {code, "STEP_OUT_OF_ORDER", {"rank 0", "step 3", "without"}});
  EXPECT_EQ(Weights(), weights);
  EXPECT_TRUE(trainers_[0]->Step(3).ok());
}

TEST_F(StepInputTest, NumbersThatCannotBeAreNamed) {
  Train(1, 1);
  const std::vector<float> weights = Weights();
  const auto code = StatusCode::kInvalidArgument;
  const auto group = [](auto& request) { return request.mutable_scalars()->mutable_groups(0); };
  ExpectRefused(Submit(2, [&](auto& request) { group(request)->set_learning_rate(-0.5); }),
                {code, "SCALARS_INVALID", {"rank 0", "groups[0].learning_rate", "-0.5"}});
  ExpectRefused(Submit(2, [&](auto& request) { group(request)->set_momentum(std::nan("")); }),
                {code, "SCALARS_INVALID", {"rank 0", "groups[0].momentum", "nan"}});
  ExpectRefused(
      Submit(2,
             [](auto& request) {
               request.mutable_scalars()->set_loss_scale(std::numeric_limits<double>::infinity());
             }),
      {code, "SCALARS_INVALID", {"rank 0", "loss_scale", "inf"}});
  // Finite, and yet what is computed of them is not.
  ExpectRefused(Submit(2, [&](auto& request) { group(request)->set_beta1(1); }),
                {code, "SCALARS_INVALID", {"rank 0", "groups[0].beta1 = 1;", "less than 1"}});
  ExpectRefused(Submit(2, [&](auto& request) { group(request)->set_learning_rate(1e39); }),
                {code, "SCALARS_INVALID", {"groups[0].learning_rate = 1e+39;", "at most 1e+06"}});
  ExpectRefused(Submit(2, [&](auto& request) { group(request)->set_weight_decay(1e39); }),
                {code, "SCALARS_INVALID", {"groups[0].weight_decay = 1e+39;", "at most 1e+06"}});
  ExpectRefused(Submit(2, [](auto& request) { request.mutable_scalars()->set_loss_scale(1e-40); }),
                {code, "SCALARS_INVALID", {"loss_scale = 1e-40;", "at least 1e-37"}});
  ExpectRefused(Submit(2, [](auto& request) { request.mutable_scalars()->add_groups(); }),
                {code, "SCALARS_DIFFER", {"rank 0", "2 groups", "1 are"}});
  ExpectRefused(Submit(2, [](auto& request) { request.add_absent(9); }),
                {code, "ABSENT_OUT_OF_RANGE", {"rank 0", "parameter 9", "registered 1"}});
  ExpectRefused(Submit(2, [](auto& request) { request.add_absent(-1); }),
                {code, "ABSENT_OUT_OF_RANGE", {"rank 0", "parameter -1"}});
  ExpectRefused(Submit(2, [](auto& request) { request.set_not_finite(1); }),
                {code, "NOT_FINITE_OUT_OF_RANGE", {"rank 0", "parameter 1", "registered 1"}});
  ExpectRefused(Submit(2, [](auto& request) { request.set_not_finite(-1); }),
                {code, "NOT_FINITE_OUT_OF_RANGE", {"rank 0", "parameter -1"}});
  EXPECT_EQ(Weights(), weights);
  EXPECT_TRUE(trainers_[0]->Step(2).ok());
}

TEST_F(StepInputTest, OversizedMessagesAreRefusedAndTheSessionGoesOn) {
  Train(1, 1);
  const std::string state((1 << 20) + 1, 's');
  ExpectRefused(Submit(2, [&](auto& request) { request.set_trainer_state(state); }),
                {StatusCode::kInvalidArgument, "TRAINER_STATE_TOO_LONG", {"1048577", "1048576"}});
  // Beyond 4 MiB gRPC itself refuses, and names both sizes.
  const absl::Status refused =
      Submit(2, [](auto& request) { request.set_trainer_state(std::string(5 << 20, 's')); });
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("4194304"));
  EXPECT_TRUE(trainers_[0]->Step(2).ok());
}

TEST_F(StepInputTest, AStepSubmittedAgainWithOtherContentsIsRefusedAndTheFirstStands) {
  Train(2, 1);
  // Rank 1 has not submitted: the step stays open.
  ASSERT_TRUE(Submit(2, [](auto& request) { request.set_wait_ms(0); }).ok());
  ExpectRefused(
      Submit(2,
             [](auto& request) {
               request.mutable_scalars()->mutable_groups(0)->set_learning_rate(0.5);
             }),
      {StatusCode::kInvalidArgument, "SUBMISSION_DIFFERS", {"rank 0", "step 2", "learning_rate"}});
  ForAll([&](int32_t rank) { EXPECT_TRUE(trainers_[rank]->Step(2).ok()); });
}

TEST_F(StepInputTest, ScalarsThatDifferNameFieldAndBothRanksAndValues) {
  Train(2, 1);
  const std::vector<float> weights = Weights();
  ForAll([&](int32_t rank) {
    v1::SubmitStepRequest request = trainers_[rank]->SubmitRequest(2);
    request.mutable_scalars()->mutable_groups(0)->set_weight_decay(rank == 0 ? 0.25 : 0.75);
    v1::SubmitStepReply reply;
    const absl::Status status = trainers_[rank]->Submit(request, &reply);
    ExpectRefused(status, {StatusCode::kInvalidArgument,
                           "SCALARS_DIFFER",
                           {"weight_decay", "rank 0 has 0.25", "rank 1 has 0.75", "step 2"}});
    for (const auto& [key, value] : server::MetadataOf(status)) {
      if (key == "next_attempt") trainers_[rank]->set_attempt(std::stoull(value));
    }
  });
  EXPECT_EQ(Weights(), weights);
  ForAll([&](int32_t rank) { EXPECT_TRUE(trainers_[rank]->Step(2).ok()); });
}

TEST_F(StepInputTest, APushBesideAStepIsRefusedToBoth) {
  Train(2, 1);
  ForAll([&](int32_t rank) {
    v1::SubmitStepReply reply;
    const absl::Status status = rank == 0
                                    ? trainers_[0]->Push(1)
                                    : trainers_[1]->Submit(trainers_[1]->SubmitRequest(2), &reply);
    ExpectRefused(status, {StatusCode::kInvalidArgument, "KIND_DIFFERS", {"rank 0", "rank 1"}});
    for (const auto& [key, value] : server::MetadataOf(status)) {
      if (key == "next_attempt") trainers_[rank]->set_attempt(std::stoull(value));
    }
  });
  ForAll([&](int32_t rank) { EXPECT_TRUE(trainers_[rank]->Step(2).ok()); });
}

// The one call that is not sent by hand elsewhere: watched twice, cut and watched again.
TEST_F(StepInputTest, AnyNumberOfWatchersSeeTheOutcomesAndChangeNone) {
  Train(1, 1);
  struct Watcher {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::SessionEvent>> reader;
  };
  v1::WatchSessionRequest request;
  *request.mutable_key() = trainers_[0]->key();
  const auto watch = [&] {
    auto watcher = std::make_unique<Watcher>();
    watcher->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    watcher->reader = trainers_[0]->stub().WatchSession(&watcher->context, request);
    return watcher;
  };
  const auto until = [](Watcher& watcher, int64_t step) {
    v1::SessionEvent event;
    while (watcher.reader->Read(&event)) {
      if (event.outcome().step() == step) return event.SerializeAsString();
    }
    return std::string("the stream ended");
  };
  auto first = watch();
  auto second = watch();
  ASSERT_TRUE(trainers_[0]->Step(2).ok());
  const std::string seen = until(*first, 2);
  EXPECT_EQ(seen, until(*second, 2));
  first->context.TryCancel();
  EXPECT_FALSE(first->reader->Finish().ok());
  auto third = watch();
  EXPECT_EQ(seen, until(*third, 2)) << "who comes late hears of the last one";
  ASSERT_TRUE(trainers_[0]->Step(3).ok());
  EXPECT_EQ(until(*second, 3), until(*third, 3));
  EXPECT_TRUE(trainers_[0]->Close().ok());
  v1::SessionEvent event;
  while (second->reader->Read(&event)) {
  }
  ExpectRefused(server::FromGrpc(second->reader->Finish()),
                {StatusCode::kFailedPrecondition, "INCARNATION_OLD", {}});
}

}  // namespace
}  // namespace dmuond::testing
