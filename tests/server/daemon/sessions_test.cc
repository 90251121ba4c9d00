// Trainers that come, step, go and die while others look and drain.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <latch>
#include <memory>
#include <semaphore>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"
#include "tests/server/daemon/sessions_fixture.h"

namespace dmuond::server {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

class SeveralJobsTest : public SessionsTest {
 protected:
  static constexpr int kJobs = 3;

  void Join(DaemonOptions& options) override { options.places = kJobs; }
};

TEST_F(SeveralJobsTest, JobsBeginStepAndEndBesideEachOtherWhileSomebodyLooks) {
  constexpr int kLives = 4;
  constexpr int kSteps = 5;
  const std::jthread looker([this](const std::stop_token& stop) {
    while (!stop.stop_requested()) looked_ += daemon_->node().Jobs().jobs_size();
  });
  std::vector<std::jthread> threads;
  for (int job = 0; job < kJobs; ++job) {
    threads.emplace_back([&, job] {
      for (int life = 0; life < kLives; ++life) {
        const auto trainer = NewTrainer();
        trainer->set_job(absl::StrCat("job", job));
        const absl::Status begun = trainer->Begin(0, 1);
        ASSERT_TRUE(begun.ok()) << begun;
        StepsOf(*trainer, 1, kSteps);
        EXPECT_TRUE(trainer->Close().ok());
      }
    });
  }
  threads.clear();
  EXPECT_GT(looked_, 0);
  EXPECT_EQ(daemon_->node().Jobs().jobs_size(), 0);
}

TEST_F(SessionsTest, RanksStepWhileOthersLookAndAreRefused) {
  constexpr int kSteps = 20;
  const std::jthread looker = Looker();
  std::vector<std::unique_ptr<InProcessTrainer>> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(NewTrainer());
  std::atomic<bool> attached[2] = {};
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const absl::Status begun = ranks[rank]->Begin(rank, 2);
        attached[rank] = true;
        ASSERT_TRUE(begun.ok()) << begun;
        StepsOf(*ranks[rank], 1, kSteps);
      });
    }
    // Wrong worlds, wrong keys, connections that say nothing: each with an answer of its own.
    threads.emplace_back([&] {
      while (!attached[0] || !attached[1]) std::this_thread::yield();
      for (int i = 0; i < 30; ++i) {
        const auto stranger = NewTrainer();
        EXPECT_EQ(ReasonOf(stranger->Open(2, 3)), "WORLD_DIFFERS");
        stranger->key().set_session(ranks[0]->key().session() + 1'000);
        EXPECT_EQ(ReasonOf(stranger->Close()), "INCARNATION_OLD");
      }
    });
  }
  EXPECT_EQ(daemon_->place(0).admin.Status().job().last_committed_step(), kSteps);
  EXPECT_THAT(std::vector<float>(ranks[0]->weights(), ranks[0]->weights() + 128),
              ElementsAreArray(ranks[1]->weights(), 128));
  for (const auto& rank : ranks) EXPECT_TRUE(rank->Close().ok());
  EXPECT_GT(looked_, 0);
}

TEST_F(SessionsTest, ManyComeAndGoAtEveryPoint) {
  const std::jthread looker = Looker();
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < 3; ++worker) {
      threads.emplace_back([this, worker] {
        for (int round = 0; round < 5; ++round) {
          const auto trainer = NewTrainer();
          if (!trainer->Open(0, 1).ok()) continue;  // another worker's job is there
          const int until = (round + worker) % 5;
          if (until > 0 && !trainer->Register().ok()) continue;
          if (until > 1 && !trainer->Attach().ok()) continue;
          if (until > 2 && !trainer->Push().ok()) continue;
          if (until > 3) {
            const absl::Status stepped = trainer->Step(1);
            EXPECT_TRUE(stepped.ok()) << stepped;
          }
          if (round % 2 != 0) continue;  // its connection ends: a death
          EXPECT_TRUE(trainer->Close().ok());
        }
      });
    }
  }
  ExpectUsable();
}

TEST_F(SessionsTest, WhoWaitsForADeadRankIsToldSo) {
  auto survivor = NewTrainer();
  auto dead = NewTrainer();
  {
    const std::jthread other([&] { EXPECT_TRUE(dead->Begin(1, 2).ok()); });
    const absl::Status begun = survivor->Begin(0, 2);
    ASSERT_TRUE(begun.ok()) << begun;
  }
  std::jthread death([&] { dead.reset(); });
  const absl::Status stepped = survivor->Step(1);
  EXPECT_FALSE(stepped.ok());
  EXPECT_THAT(std::string(stepped.message()), HasSubstr("rank 1"));
  death.join();
  survivor.reset();
  ExpectUsable();
}

TEST_F(SessionsTest, LanesAreReplacedUnderTrainersThatStep) {
  const std::jthread looker = Looker();
  auto trainer = NewTrainer();
  const absl::Status begun = trainer->Begin(0, 1);
  ASSERT_TRUE(begun.ok()) << begun;
  for (int64_t step = 1; step <= 9; ++step) {
    if (step % 3 == 0) {
      const v1::GetStatusReply status = daemon_->place(0).admin.Status();
      ASSERT_EQ(status.lanes_size(), 2);
      const int32_t pid = status.lanes(static_cast<int>(step / 3) % 2).pid();
      if (pid > 0) ::kill(pid, SIGKILL);
    }
    absl::Status done;
    // An attempt that the death has aborted is taken again; the step is applied once.
    for (int tries = 0; tries < 10; ++tries) {
      done = trainer->Step(step);
      if (done.ok() || !absl::IsInternal(done)) break;
      trainer->set_attempt(daemon_->place(0).admin.Status().job().attempt());
    }
    ASSERT_TRUE(done.ok()) << done;
  }
  EXPECT_EQ(daemon_->place(0).admin.Status().job().last_committed_step(), 9);
}

// As one that was stopped in state_dict() does, when no more fits into its socket.
TEST_F(SessionsTest, WhoDoesNotTakeWhatItHasAskedForKeepsNobodyWaiting) {
  auto trainer = NewTrainer();
  const absl::Status begun = trainer->Begin(0, 1);
  ASSERT_TRUE(begun.ok()) << begun;
  ASSERT_TRUE(trainer->Step(1).ok());
  v1::PullParametersRequest request;
  *request.mutable_key() = trainer->key();
  std::latch stopped(1);
  std::latch goes_on(1);
  absl::Status pulled;
  std::thread pull([&] {
    bool first = true;
    pulled = daemon_->place(0).tensors.PullParameters(
        request, [] { return false; },
        [&](const v1::PullParametersReply&) {
          if (std::exchange(first, false)) {
            stopped.count_down();
            goes_on.wait();
          }
          return true;
        });
  });
  stopped.wait();
  EXPECT_EQ(daemon_->place(0).admin.Status().job().last_committed_step(), 1);
  EXPECT_TRUE(trainer->Close().ok());
  ExpectUsable();
  goes_on.count_down();
  pull.join();
  EXPECT_FALSE(pulled.ok()) << "the job of the rest has ended";
}

TEST_F(SessionsTest, DrainEndsEveryCall) {
  const std::jthread looker = Looker();
  std::atomic<int> stepping = 0;
  std::latch left{1};
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([this, rank, &stepping, &left] {
      const auto trainer = NewTrainer();
      const absl::Status begun = trainer->Begin(rank, 2);
      ASSERT_TRUE(begun.ok()) << begun;
      int64_t step = 1;
      absl::Status told;
      for (; told.ok(); ++step) {
        ++stepping;
        told = trainer->Step(step);
      }
      // Weights that do not come any more are poisoned; who asks is told why.
      if (told.message() == "poisoned") told = trainer->Step(step);
      EXPECT_EQ(ReasonOf(told), "DRAINING") << told;
      left.wait();
      told = trainer->Step(step);
      EXPECT_EQ(ReasonOf(told), "DRAINING") << told << ": a call that comes late is told no more";
    });
  }
  while (stepping < 10) std::this_thread::yield();
  EXPECT_TRUE(daemon_->place(0).admin.PrepareToLeave(kPatience).ok());
  EXPECT_TRUE(daemon_->place(0).admin.Leave(std::chrono::steady_clock::now() + kPatience));
  left.count_down();
  for (std::jthread& thread : threads) thread.join();
  EXPECT_FALSE(NewTrainer()->Open().ok()) << "it is leaving";
}

// Where the daemon hears late that a trainer's attach connection has ended.
class LateNewsTest : public SessionsTest {
 protected:
  void OnGone(AttachId id) override {
    ended_.count_down();
    hears_.wait();
    daemon_->OnAttachGone(id);
  }

  std::latch ended_{1};
  std::latch hears_{1};
};

TEST_F(LateNewsTest, WhoAttachesIsToldThatItsSessionIsGoneAsAnybodyElse) {
  auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  ASSERT_TRUE(trainer->Register().ok());
  const v1::AttachBuffersRequest request = trainer->AttachRequest();
  trainer.reset();
  ended_.wait();
  // Twice the same call: one waits for the news, the other for the first one's answer, and while a
  // call waits for that the daemon asks whether its caller is still there. So the news comes when
  // both wait, or when one has been told too early.
  std::counting_semaphore<> waits_or_ends{0};
  const auto attach = [&] {
    const absl::Status told = daemon_->place(0)
                                  .buffers
                                  .AttachBuffers(request,
                                                 [&] {
                                                   waits_or_ends.release();
                                                   return false;
                                                 })
                                  .status();
    waits_or_ends.release();
    return told;
  };
  auto first = std::async(std::launch::async, attach);
  auto second = std::async(std::launch::async, attach);
  waits_or_ends.acquire();
  hears_.count_down();
  for (auto* answer : {&first, &second}) {
    const absl::Status told = answer->get();
    EXPECT_EQ(ReasonOf(told), "INCARNATION_OLD") << told;
  }
}

}  // namespace
}  // namespace dmuond::server
