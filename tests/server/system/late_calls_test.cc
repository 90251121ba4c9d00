// Calls that arrive again, at once or late. OpenSession opens one session. The job goes back once,
// and a trainer's memory is its own until it has answered this way back and no earlier one.
#include <gtest/gtest.h>

#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

constexpr int64_t kSaved = 2;
using Stub = v1::Trainer::Stub;

class LateCallsTest : public ::testing::Test {
 protected:
  // A trainer after step 3, with a snapshot of step 2.
  void SetUp() override {
    auto daemon = DaemonProcess::Start(
        {.flags = {absl::StrCat("--snapshot_dir=", scratch_.path(), "/snapshots")}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    trainer_ = std::make_unique<RawTrainer>(daemon_->address());
    ASSERT_TRUE(trainer_->Open().ok());
    ASSERT_TRUE(trainer_->Register().ok());
    ASSERT_TRUE(trainer_->Attach().ok());
    ASSERT_TRUE(trainer_->Push().ok());
    Train(1, kSaved);
    v1::SaveSnapshotRequest save;
    *save.mutable_key() = trainer_->key();
    v1::SaveSnapshotReply saved;
    const absl::Status status = trainer_->Call(&Stub::SaveSnapshot, save, &saved);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(saved.step(), kSaved);
    Train(kSaved + 1, kSaved + 1);
  }
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }

  void Train(int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      const absl::Status status = trainer_->Step(step);
      ASSERT_TRUE(status.ok()) << "step " << step << ": " << status;
    }
  }
  [[nodiscard]] v1::LoadSnapshotRequest Load(uint64_t call) const {
    v1::LoadSnapshotRequest request;
    *request.mutable_key() = trainer_->key();
    request.set_step(kSaved);
    request.set_call(call);
    return request;
  }
  absl::Status Send(const v1::LoadSnapshotRequest& request) {
    v1::LoadSnapshotReply reply;
    absl::Status status = trainer_->Call(&Stub::LoadSnapshot, request, &reply);
    if (status.ok()) {
      EXPECT_EQ(reply.step(), kSaved);
    }
    return status;
  }
  // What the next submit hears of the way back, as the acknowledgement of it.
  v1::AckRollbackRequest Hear(int64_t submitted) {
    v1::SubmitStepReply reply;
    const absl::Status status = trainer_->Submit(trainer_->SubmitRequest(submitted), &reply);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(reply.outcome().kind(), v1::Outcome::KIND_ROLLED_BACK);
    EXPECT_EQ(reply.outcome().to_step(), kSaved);
    v1::AckRollbackRequest request;
    *request.mutable_key() = trainer_->key();
    request.set_to_step(reply.outcome().to_step());
    request.set_epoch(reply.outcome().epoch());
    return request;
  }
  absl::Status Send(const v1::AckRollbackRequest& request) {
    v1::AckRollbackReply reply;
    absl::Status status = trainer_->Call(&Stub::AckRollback, request, &reply);
    if (status.ok()) trainer_->set_attempt(reply.next_attempt());
    return status;
  }
  [[nodiscard]] std::vector<float> Weights() const {
    return {trainer_->weights(), trainer_->weights() + (8 * 16)};
  }

  ScratchDirectory scratch_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<RawTrainer> trainer_;
};

TEST_F(LateCallsTest, ALoadThatArrivesAgainAfterFurtherStepsTakesNoneOfThemBack) {
  ASSERT_TRUE(Send(Load(1)).ok());
  ASSERT_TRUE(Send(Load(1)).ok()) << "again before the trainer has heard";
  ASSERT_TRUE(Send(Hear(kSaved + 2)).ok());
  Train(kSaved + 1, kSaved + 2);
  const absl::Status again = Send(Load(1));
  EXPECT_TRUE(again.ok()) << "the first one's answer, and nothing else: " << again;
  Train(kSaved + 3, kSaved + 3);
  // And a further call is a further way back.
  ASSERT_TRUE(Send(Load(3)).ok());
  ASSERT_TRUE(Send(Hear(kSaved + 4)).ok());
  Train(kSaved + 1, kSaved + 1);
  ExpectRefused(Send(Load(2)), {absl::StatusCode::kFailedPrecondition,
                                "CALL_OUT_OF_ORDER",
                                {"LoadSnapshot 2 of rank 0 comes after 3"}});
  ExpectRefused(Send(Load(0)), {absl::StatusCode::kFailedPrecondition,
                                "CALL_OUT_OF_ORDER",
                                {"LoadSnapshot 0 of rank 0 comes after 3"}});
  Train(kSaved + 2, kSaved + 2);
}

TEST_F(LateCallsTest, LoadsThatArriveAtOnceAreOneWayBack) {
  std::vector<std::thread> copies;
  std::vector<absl::Status> answers(4);
  for (absl::Status& answer : answers) copies.emplace_back([&] { answer = Send(Load(1)); });
  for (std::thread& copy : copies) copy.join();
  for (const absl::Status& answer : answers) EXPECT_TRUE(answer.ok()) << answer;
  const v1::AckRollbackRequest heard = Hear(kSaved + 2);
  ASSERT_TRUE(Send(heard).ok());
  Train(kSaved + 1, kSaved + 1);
  EXPECT_EQ(trainer_->attempt() >> 32, heard.epoch()) << "a second epoch has begun";
}

// The other job has the first place, so that each copy must find the place of its own.
TEST_F(LateCallsTest, OpenSessionsThatArriveAtOnceOpenOneSessionOfASecondJob) {
  constexpr int kRounds = 300;
  for (int round = 0; round < kRounds; ++round) {
    RawTrainer second(daemon_->address());
    second.set_job("second");
    std::vector<std::thread> copies;
    std::vector<std::pair<absl::Status, v1::OpenSessionReply>> answers(4);
    for (auto& [status, reply] : answers) {
      copies.emplace_back([&second, &status = status, &reply = reply] {
        status = second.Call(second.OpenRequest(), &reply);
      });
    }
    for (std::thread& copy : copies) copy.join();
    const v1::OpenSessionReply& opened = answers[0].second;
    for (const auto& [status, reply] : answers) {
      ASSERT_TRUE(status.ok()) << "round " << round << ": " << status;
      ASSERT_EQ(reply.SerializeAsString(), opened.SerializeAsString());
    }
    second.key().set_session(opened.session());
    second.key().set_incarnation(opened.incarnation());
    second.key().set_secret(opened.secret());
    ASSERT_TRUE(second.Close().ok());
  }
}

TEST_F(LateCallsTest, AnAnswerThatWasARefusalIsARefusalLater) {
  v1::LoadSnapshotRequest request = Load(1);
  request.set_step(1);
  const absl::Status first = Send(request);
  EXPECT_FALSE(first.ok());
  request.set_step(kSaved);  // whatever it says: it is the first call
  EXPECT_EQ(Send(request), first);
  Train(kSaved + 2, kSaved + 2);
}

TEST_F(LateCallsTest, AnAcknowledgementThatIsLateAcknowledgesNoLaterWayBack) {
  ASSERT_TRUE(Send(Load(1)).ok());
  const v1::AckRollbackRequest first = Hear(kSaved + 2);
  ASSERT_TRUE(Send(first).ok());
  ASSERT_TRUE(Send(first).ok()) << "repeated, it gets the first one's answer";
  Train(kSaved + 1, kSaved + 2);
  const std::vector<float> before = Weights();
  ASSERT_TRUE(Send(Load(2)).ok());
  const absl::Status late = Send(first);
  EXPECT_EQ(server::ReasonOf(late), "ROLLED_BACK") << late;
  EXPECT_EQ(Weights(), before) << "the trainer has not been asked yet";
  const v1::AckRollbackRequest second = Hear(kSaved + 3);
  EXPECT_GT(second.epoch(), first.epoch());
  ASSERT_TRUE(Send(second).ok());
  EXPECT_EQ(server::ReasonOf(Send(first)), "STEP_OUT_OF_ORDER");
  Train(kSaved + 1, kSaved + 1);
}

}  // namespace
}  // namespace dmuond::testing
