// Sessions of a job that goes back to a snapshot.
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/trainer.pb.h"
#include "dmuond/wire/timeline.h"
#include "gtest/gtest.h"
#include "server/storage/posix_storage.h"
#include "tests/server/daemon/sessions_fixture.h"

namespace dmuond::server {
namespace {

class GoingBackSessionsTest : public SessionsTest {
 protected:
  void Join(DaemonOptions& options) override {
    absl::StatusOr<std::unique_ptr<storage::Storage>> opened =
        storage::OpenPosixStorage(dir_.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    snapshots_ = *std::move(opened);
    options.storage = snapshots_.get();
    options.coordinator.snapshots = true;
    options.coordinator.step.session_linger = kPatience;
  }
  // Both ranks after step 1.
  void StepAndSave() {
    for (auto& rank : ranks_) rank = NewTrainer();
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([this, rank] {
        const absl::Status begun = ranks_[rank]->Begin(rank, 2);
        ASSERT_TRUE(begun.ok()) << begun;
        StepsOf(*ranks_[rank], 1, 1);
      });
    }
    threads.clear();
    v1::SaveSnapshotRequest save;
    *save.mutable_key() = ranks_[0]->key();
    const auto saved = daemon_->place(0).snapshots.SaveSnapshot(save, kNever);
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  void GoBack() {
    const auto back = daemon_->place(0).snapshots.LoadJob({}, kNever);
    ASSERT_TRUE(back.ok()) << back.status();
  }
  v1::AckRollbackRequest Hear(InProcessTrainer& trainer) {
    v1::SubmitStepReply reply;
    EXPECT_TRUE(trainer.Submit(trainer.SubmitRequest(2), &reply).ok());
    EXPECT_EQ(reply.outcome().kind(), v1::Outcome::KIND_ROLLED_BACK);
    v1::AckRollbackRequest request;
    *request.mutable_key() = trainer.key();
    request.set_to_step(reply.outcome().to_step());
    request.set_epoch(reply.outcome().epoch());
    return request;
  }

  const Daemon::Cancelled kNever = [] { return false; };
  const Daemon::Cancelled kAtOnce = [] { return true; };
  std::unique_ptr<storage::Storage> snapshots_;
  std::unique_ptr<InProcessTrainer> ranks_[2];
};

// Rank 1 dies between the restart and the answer to rank 0, and with it the attempt that was open.
TEST_F(GoingBackSessionsTest, WeightsOfTheAttemptBeforeTheToldOneComeOnce) {
  StepAndSave();
  GoBack();
  const v1::AckRollbackRequest mine = Hear(*ranks_[0]);
  EXPECT_TRUE(absl::IsCancelled(daemon_->place(0).buffers.AckRollback(mine, kAtOnce).status()))
      << "the other has not acknowledged";
  const auto others = daemon_->place(0).buffers.AckRollback(Hear(*ranks_[1]), kNever);
  ASSERT_TRUE(others.ok()) << others.status();
  ranks_[1].reset();
  while (daemon_->place(0).admin.Status().job().attempt() == others->next_attempt())
    std::this_thread::yield();

  const auto answer = daemon_->place(0).buffers.AckRollback(mine, kNever);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_GT(answer->next_attempt(), others->next_attempt());
  const uint64_t before = answer->next_attempt() - 1;
  EXPECT_EQ(wire::WaitAtLeast(ranks_[0]->page().published(0, 1), before,
                              std::chrono::steady_clock::now() + kPatience),
            before);
  const auto late = daemon_->place(0).buffers.AckRollback(mine, kNever);
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->next_attempt(), answer->next_attempt());
}

// As the stream of a host that waits for it, and makes no call meanwhile.
TEST_F(GoingBackSessionsTest, AWaitForWeightsThatNobodyPublishesEndsBeforeItsTrainerCalls) {
  StepAndSave();
  const uint64_t last = ranks_[0]->attempt() - 1;
  wire::TimelineWord& late = ranks_[0]->page().published(0, 1);
  wire::Advance(late, last - 1);  // as if they had not come
  GoBack();
  const uint64_t found =
      wire::WaitAtLeast(late, last, std::chrono::steady_clock::now() + kPatience);
  EXPECT_TRUE(wire::IsRollbackMark(found)) << found;
  EXPECT_GT(found, last);
  EXPECT_EQ(wire::Read(ranks_[1]->page().published(0, 1)), last) << "the other has its weights";
}

}  // namespace
}  // namespace dmuond::server
