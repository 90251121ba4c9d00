// The daemon's tables of sessions, attach connections and the job, without any service before them:
// trainers call it from threads of their own, while others come, go, die, look and drain. What the
// thread sanitizer is to see, so nothing here links gRPC; lanes are real processes.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/timeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_memory.h"
#include "kernels/mutex.h"
#include "server/common/errors.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/daemon.h"
#include "server/daemon/process/socket_dir.h"
#include "server/storage/posix_storage.h"
#include "tests/scheduler/job/registrations.h"
#include "tests/server/daemon/in_process_trainer.h"
#include "tests/server/daemon/links_of_a_member.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr int64_t kJobMemoryBytes = int64_t{10} << 20;

// Memory that takes as long as a test wants.
class HeldMemory final : public kernels::MemoryHolder {
 public:
  absl::StatusOr<wire::UniqueFd> Allocate(size_t bytes, const std::string& name) override {
    {
      MutexLock lock(mutex_);
      ++waiting_;
      changed_.NotifyAll();
      while (held_) changed_.Wait(mutex_);
      --waiting_;
    }
    return memory_.Allocate(bytes, name);
  }
  absl::Status Check(int fd, size_t bytes) override { return memory_.Check(fd, bytes); }

  void Hold() {
    MutexLock lock(mutex_);
    held_ = true;
  }
  void Release() {
    MutexLock lock(mutex_);
    held_ = false;
    changed_.NotifyAll();
  }
  // Until somebody waits for memory.
  void WaitUntilHeld() {
    MutexLock lock(mutex_);
    while (waiting_ == 0) changed_.Wait(mutex_);
  }

 private:
  kernels::cpu::CpuMemoryHolder memory_;
  Mutex mutex_;
  CondVar changed_;
  bool held_ DMUOND_GUARDED_BY(mutex_) = false;
  int waiting_ DMUOND_GUARDED_BY(mutex_) = 0;
};

class SessionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.lanes = 2;
    options.socket = socket_;
    options.job_memory_bytes = kJobMemoryBytes;
    options.lane_binary =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dmuond-lane";
    options.coordinator.lanes_per_node = options.lanes;
    Join(options);
    daemon_ = std::make_unique<Daemon>(std::move(options), *device_);
    auto attach = AttachServer::Start({.path = socket_ + SocketDir::kAttachSuffix},
                                      {.on_gone = [this](AttachId id) { OnGone(id); }});
    ASSERT_TRUE(attach.ok()) << attach.status();
    attach_ = *std::move(attach);
    daemon_->Bind(attach_.get(), Links());
    daemon_->core().OnFormed(1);
    ticker_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        daemon_->core().Tick();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a clock's tick, no wait
      }
    });
  }
  void TearDown() override {
    EXPECT_TRUE(daemon_->admin().PrepareToLeave(kPatience).ok());
    EXPECT_TRUE(daemon_->admin().Leave());
    ticker_ = {};
    attach_.reset();
    daemon_.reset();
  }

  // Alone, where a test does not say otherwise.
  virtual void Join(DaemonOptions& /*options*/) {}
  virtual PeerLinks* Links() { return nullptr; }
  virtual void OnGone(AttachId id) { daemon_->core().OnAttachGone(id); }

  std::unique_ptr<InProcessTrainer> NewTrainer() {
    return std::make_unique<InProcessTrainer>(*daemon_, socket_);
  }
  // Somebody who looks at everything until the test's end.
  [[nodiscard]] std::jthread Looker() {
    return std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        looked_ += daemon_->admin().Status().lanes_size() + (daemon_->admin().Plan().ok() ? 1 : 0) +
                   (daemon_->admin().Routing().ok() ? 1 : 0);
      }
    });
  }
  // Of the job that runs.
  void StepsOf(InProcessTrainer& trainer, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      const absl::Status done = trainer.Step(step);
      ASSERT_TRUE(done.ok()) << done;
    }
  }
  // A session with an attached matrix of extent x extent.
  std::unique_ptr<InProcessTrainer> OfMatrix(int64_t extent) {
    auto trainer = NewTrainer();
    EXPECT_TRUE(trainer->Open().ok());
    v1::RegisterLayoutRequest layout = trainer->LayoutRequest();
    v1::Fragment& fragment = *layout.mutable_fragments(0);
    for (const int dimension : {0, 1}) {
      layout.mutable_parameters(0)->set_shape(dimension, extent);
      fragment.mutable_box()->set_end(dimension, extent);
    }
    fragment.mutable_gradient()->set_strides(0, extent);
    fragment.mutable_weight()->set_strides(0, extent);
    v1::RegisterLayoutReply registered;
    EXPECT_TRUE(trainer->Call(layout, &registered).ok());
    v1::AttachBuffersRequest attach = trainer->AttachRequest();
    for (v1::Arena& arena : *attach.mutable_arenas()) {
      arena.set_size_bytes(extent * extent * static_cast<int64_t>(sizeof(float)));
    }
    v1::AttachBuffersReply attached;
    const absl::Status status = trainer->Call(attach, &attached);
    EXPECT_TRUE(status.ok()) << status;
    return trainer;
  }
  // Calls that have pushed the masters and go no further, until one is refused.
  absl::Status PushUntilRefused(InProcessTrainer& trainer, int64_t extent,
                                std::deque<PushedState>& calls) {
    v1::StateChunk chunk;
    chunk.set_parameter("matrix");
    chunk.set_kind(v1::STATE_KIND_MASTER);
    chunk.set_data(std::string(extent * extent * sizeof(float), 0));
    absl::Status kept;
    while (kept.ok() && calls.size() < 100) {
      kept = daemon_->tensors().KeepStateChunk(trainer.key(), chunk, calls.emplace_back());
    }
    return kept;
  }
  // A fresh trainer gets the whole daemon, as soon as what was there before has ended.
  void ExpectUsable() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    std::unique_ptr<InProcessTrainer> trainer;
    absl::Status begun;
    do {
      trainer = NewTrainer();
      begun = trainer->Begin(0, 1);
    } while (!begun.ok() && std::chrono::steady_clock::now() < deadline);
    ASSERT_TRUE(begun.ok()) << begun;
    StepsOf(*trainer, 1, 2);
    const v1::GetStatusReply status = daemon_->admin().Status();
    EXPECT_EQ(status.job().trainers_size(), 1);
    EXPECT_TRUE(trainer->Close().ok());
  }

  TempDir dir_;
  std::string socket_ = dir_ / "d.sock";
  HeldMemory& memory_ = *new HeldMemory();  // the device's
  const std::unique_ptr<NodeDevice> device_ =
      MakeCpuNodeDevice(/*threads=*/1, std::unique_ptr<kernels::MemoryHolder>(&memory_));
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<AttachServer> attach_;
  std::jthread ticker_;
  std::atomic<int64_t> looked_ = 0;
};

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
  EXPECT_EQ(daemon_->admin().Status().job().last_committed_step(), kSteps);
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
      const v1::GetStatusReply status = daemon_->admin().Status();
      ASSERT_EQ(status.lanes_size(), 2);
      const int32_t pid = status.lanes(static_cast<int>(step / 3) % 2).pid();
      if (pid > 0) ::kill(pid, SIGKILL);
    }
    absl::Status done;
    // An attempt that the death has aborted is taken again; the step is applied once.
    for (int tries = 0; tries < 10; ++tries) {
      done = trainer->Step(step);
      if (done.ok() || !absl::IsInternal(done)) break;
      trainer->set_attempt(daemon_->admin().Status().job().attempt());
    }
    ASSERT_TRUE(done.ok()) << done;
  }
  EXPECT_EQ(daemon_->admin().Status().job().last_committed_step(), 9);
}

TEST_F(SessionsTest, PushedStateIsHeldUpToALimitUntilItsCallsEnd) {
  const auto trainer = OfMatrix(16);  // tensors of 1024 bytes: two, and a step
  std::deque<PushedState> calls;
  const absl::Status refused = PushUntilRefused(*trainer, 16, calls);
  EXPECT_EQ(ReasonOf(refused), "MEMORY_EXHAUSTED") << refused;
  EXPECT_EQ(calls.size(), 9);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("MASTER of parameter 'matrix'"));
  EXPECT_THAT(MetadataOf(refused), Contains(Pair("wanted_bytes", "1024")));
  EXPECT_THAT(MetadataOf(refused), Contains(Pair("held_bytes", "8192")));
  EXPECT_THAT(MetadataOf(refused), Contains(Pair("limit_bytes", "8224")));
  calls.pop_front();
  calls.pop_back();
  EXPECT_EQ(ReasonOf(PushUntilRefused(*trainer, 16, calls)), "MEMORY_EXHAUSTED");
  EXPECT_EQ(calls.size(), 9) << "one more has room for one that has ended";
  EXPECT_TRUE(trainer->Close().ok());
  ExpectUsable();
}

TEST_F(SessionsTest, PushedStateCountsForTheMemoryOfTheJob) {
  const auto trainer = OfMatrix(512);  // tensors of 1 MiB, of which lanes and arenas have some
  std::deque<PushedState> calls;
  const absl::Status refused = PushUntilRefused(*trainer, 512, calls);
  EXPECT_EQ(ReasonOf(refused), "MEMORY_EXHAUSTED") << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--job_memory_bytes"));
  EXPECT_THAT(MetadataOf(refused), Contains(Pair("limit_bytes", absl::StrCat(kJobMemoryBytes))));
  EXPECT_GT(calls.size(), 1);
  calls.clear();
  EXPECT_TRUE(trainer->Close().ok());
  ExpectUsable();
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
    pulled = daemon_->tensors().PullParameters(
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
  EXPECT_EQ(daemon_->admin().Status().job().last_committed_step(), 1);
  EXPECT_TRUE(trainer->Close().ok());
  ExpectUsable();
  goes_on.count_down();
  pull.join();
  EXPECT_FALSE(pulled.ok()) << "the job of the rest has ended";
}

// Gigabytes take seconds to make, and the daemon answers meanwhile.
TEST_F(SessionsTest, MemoryThatIsBeingMadeKeepsNobodyWaiting) {
  memory_.Hold();
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open(0, 1).ok());
  std::jthread registers([&] {
    const absl::Status registered = trainer->Register();
    EXPECT_TRUE(registered.ok()) << registered;
  });
  memory_.WaitUntilHeld();
  EXPECT_EQ(daemon_->admin().Status().job().state(), "preparing");
  memory_.Release();
  registers.join();

  memory_.Hold();
  std::jthread attaches([&] {
    const absl::Status attached = trainer->Attach();
    EXPECT_TRUE(attached.ok()) << attached;
  });
  memory_.WaitUntilHeld();
  EXPECT_EQ(daemon_->admin().Status().job().trainers(0).state(), "registered");
  memory_.Release();
  attaches.join();
  EXPECT_TRUE(trainer->Push().ok());
  StepsOf(*trainer, 1, 2);
}

TEST_F(SessionsTest, AJobMayEndWhileItsMemoryIsBeingMade) {
  memory_.Hold();
  auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open(0, 1).ok());
  std::jthread registers([&] { EXPECT_FALSE(trainer->Register().ok()); });
  memory_.WaitUntilHeld();
  EXPECT_TRUE(trainer->Close().ok());
  registers.join();
  memory_.Release();
  ExpectUsable();
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
  EXPECT_TRUE(daemon_->admin().PrepareToLeave(kPatience).ok());
  EXPECT_TRUE(daemon_->admin().Leave());
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
    daemon_->core().OnAttachGone(id);
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
    const absl::Status told = daemon_->buffers()
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
  // Both ranks after step 1, to which the job has gone back since.
  void StepAndGoBack() {
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
    const auto saved = daemon_->snapshots().SaveSnapshot(save, kNever);
    ASSERT_TRUE(saved.ok()) << saved.status();
    const auto back = daemon_->snapshots().LoadJob({}, kNever);
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
  StepAndGoBack();
  const v1::AckRollbackRequest mine = Hear(*ranks_[0]);
  EXPECT_TRUE(absl::IsCancelled(daemon_->buffers().AckRollback(mine, kAtOnce).status()))
      << "the other has not acknowledged";
  const auto others = daemon_->buffers().AckRollback(Hear(*ranks_[1]), kNever);
  ASSERT_TRUE(others.ok()) << others.status();
  ranks_[1].reset();
  while (daemon_->admin().Status().job().attempt() == others->next_attempt())
    std::this_thread::yield();

  const auto answer = daemon_->buffers().AckRollback(mine, kNever);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_GT(answer->next_attempt(), others->next_attempt());
  const uint64_t before = answer->next_attempt() - 1;
  EXPECT_EQ(wire::WaitAtLeast(ranks_[0]->page().published(0, 1), before,
                              std::chrono::steady_clock::now() + kPatience),
            before);
  const auto late = daemon_->buffers().AckRollback(mine, kNever);
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->next_attempt(), answer->next_attempt());
}

// Node 1 of two. What the coordinator says the test says; jobs have one rank.
class MemberTest : public SessionsTest {
 protected:
  void Join(DaemonOptions& options) override {
    options.node = 1;
    options.nodes = 2;
    options.rail_address = "127.0.0.1";
  }
  PeerLinks* Links() override { return &links_; }

  // Of a job whose rank is of node 0.
  v1::PlanInputs PlanOf(const std::string& job) {
    v1::PlanInputs plan;
    plan.set_job(job);
    plan.set_job_incarnation(++job_incarnations_);
    plan.set_nodes(2);
    plan.set_lanes_per_node(2);
    *plan.add_registrations() = scheduler::OfOneMatrix(0, 1);
    return plan;
  }
  void HearPlan(const std::string& job, int times = 1) {
    v1::CoordinatorMessage message;
    *message.mutable_plan() = PlanOf(job);
    for (int i = 0; i < times; ++i) daemon_->core().OnCoordinatorMessage(message);
  }
  void HearRollBack(const std::string& job) {
    v1::CoordinatorMessage message;
    message.mutable_roll_back()->set_epoch(daemon_->newest_epoch());
    *message.mutable_roll_back()->mutable_plan() = PlanOf(job);
    daemon_->core().OnCoordinatorMessage(message);
  }
  void HearJobEnded(const std::string& job) {
    v1::CoordinatorMessage message;
    message.mutable_job_ended()->set_job(job);
    message.mutable_job_ended()->set_why("every rank has left");
    daemon_->core().OnCoordinatorMessage(message);
  }
  // Returns when the coordinator has it. Its answer comes before the thread ends.
  std::jthread Register(InProcessTrainer& trainer, absl::Status& answer) {
    std::jthread thread([&] { answer = trainer.Register(); });
    EXPECT_TRUE(links_.Next(&v1::MemberMessage::has_registration).has_value());
    return thread;
  }
  void ExpectPrepared(const std::string& job) {
    const v1::JobStatus status = daemon_->admin().Status().job();
    EXPECT_EQ(status.name(), job);
    EXPECT_EQ(status.state(), "preparing");
  }

  LinksOfAMember links_;
  uint64_t job_incarnations_ = 0;
};

TEST_F(MemberTest, TheEndOfASessionThatThePlanDoesNotKnowIsToldAsADeath) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  absl::Status registered;
  {
    const std::jthread waits = Register(*trainer, registered);
    HearPlan("raw");
  }
  EXPECT_EQ(ReasonOf(registered), "RANK_MOVED") << registered;
  EXPECT_TRUE(trainer->Close().ok());
  const auto told = links_.Next(&v1::MemberMessage::has_rank_gone);
  ASSERT_TRUE(told.has_value()) << "to the coordinator its rank is taken";
  EXPECT_EQ(told->rank_gone().incarnation(), trainer->key().incarnation());
  EXPECT_FALSE(told->rank_gone().closed()) << "the job would end";
}

TEST_F(MemberTest, TheEndOfASessionThatBeganAsItsJobEndedIsTold) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  HearPlan("raw");
  HearJobEnded("raw");
  const auto told = links_.Next(&v1::MemberMessage::has_rank_gone);
  ASSERT_TRUE(told.has_value()) << "to the coordinator it has begun another job";
  EXPECT_EQ(told->rank_gone().incarnation(), trainer->key().incarnation());
  EXPECT_FALSE(told->rank_gone().closed());
  EXPECT_EQ(ReasonOf(trainer->Register()), "JOB_ENDED");
}

TEST_F(MemberTest, AJobThatRegistersGivesWayToOneThatGoesBack) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  absl::Status registered;
  {
    const std::jthread waits = Register(*trainer, registered);
    HearRollBack("running");
  }
  EXPECT_EQ(ReasonOf(registered), "OTHER_JOB") << registered;
  EXPECT_THAT(std::string(registered.message()), HasSubstr("runs job 'running'"));
  ExpectPrepared("running");
  EXPECT_TRUE(links_.Next(&v1::MemberMessage::has_rank_gone).has_value());
  EXPECT_FALSE(trainer->HasFrame()) << "it would take the daemon for gone";
  EXPECT_EQ(ReasonOf(trainer->Close()), "OTHER_JOB") << "and whoever calls next";
  EXPECT_EQ(ReasonOf(trainer->Open()), "OTHER_JOB") << "and who has lost the first answer";
}

TEST_F(MemberTest, AJobThatRegistersGivesWayToThePlanOfAnother) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  HearPlan("running");
  ExpectPrepared("running");
  EXPECT_EQ(ReasonOf(trainer->Register()), "OTHER_JOB");
}

TEST_F(MemberTest, AnotherWorldGivesWayToTheJobOfItsName) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open(0, 2).ok());
  HearRollBack("raw");
  ExpectPrepared("raw");
  const absl::Status registered = trainer->Register();
  EXPECT_EQ(ReasonOf(registered), "WORLD_DIFFERS") << registered;
  EXPECT_THAT(MetadataOf(registered), Contains(Pair("world_size", "1")));
  EXPECT_THAT(MetadataOf(registered), Contains(Pair("given_world_size", "2")));
}

TEST_F(MemberTest, AJobThatWasLostAsItRegisteredGivesWayToTheNextOfItsName) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  daemon_->core().OnCoordinatorGone("the link is cut");
  daemon_->core().OnFormed(2);
  HearPlan("raw");
  ExpectPrepared("raw");
  EXPECT_EQ(ReasonOf(trainer->Register()), "JOB_ENDED") << "it may begin anew";
}

TEST_F(MemberTest, APlanThatMeetsAnotherPlannedJobIsAnswered) {
  HearPlan("lingering", /*times=*/2);
  HearPlan("running");
  const auto told = links_.Next(&v1::MemberMessage::has_plan_ready);
  ASSERT_TRUE(told.has_value()) << "the coordinator waits";
  EXPECT_EQ(told->plan_ready().reason(), "NODE_NOT_READY");
  EXPECT_THAT(told->plan_ready().error(),
              HasSubstr("job 'running' cannot begin before job 'lingering'"));
  ExpectPrepared("lingering");
}

// ---- the job's record ----

// REQUIRES: the daemon's lock.
absl::StatusOr<scheduler::JobRecord> RecordOf(Core& core) DMUOND_REQUIRES(core.mutex) {
  absl::StatusOr<std::string> bytes = ReadRecord(core.record.fd());
  if (!bytes.ok()) return bytes.status();
  return scheduler::ParseJobRecord(*bytes);
}

TEST_F(SessionsTest, TheRecordHasWhatATrainerHasHeard) {
  Core& core = daemon_->core();
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Begin(0, 1).ok());
  for (int64_t step = 1; step <= 20; ++step) {
    v1::SubmitStepRequest request = trainer->SubmitRequest(step);
    request.set_trainer_state(absl::StrCat("after step ", step));
    wire::Advance(trainer->page().ready(0), trainer->attempt());
    wire::Advance(trainer->page().submitted(), trainer->attempt());
    v1::SubmitStepReply reply;
    const absl::Status submitted = trainer->Submit(request, &reply);
    ASSERT_TRUE(submitted.ok()) << submitted;
    ASSERT_EQ(reply.outcome().kind(), v1::Outcome::KIND_COMMITTED);
    trainer->set_attempt(reply.outcome().next_attempt());
    const StateLock lock(core.mutex);
    const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_EQ(record->progress().steps().last_committed(), step);
    EXPECT_EQ(record->progress().applied_attempt(), reply.outcome().attempt());
    ASSERT_EQ(record->trainer_states_size(), 1);
    EXPECT_EQ(record->trainer_states(0).state(), request.trainer_state());
  }
  // A fresh NodeJob has the job from it.
  const StateLock lock(core.mutex);
  const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
  ASSERT_TRUE(record.ok()) << record.status();
  auto planned = scheduler::MakePlannedJob(record->plan().inputs());
  ASSERT_TRUE(planned.ok()) << planned.status();
  auto successor =
      scheduler::NodeJob::FromRecord({.lanes = 2}, *record, *std::move(planned), core.started);
  ASSERT_TRUE(successor.ok()) << successor.status();
  EXPECT_EQ(successor->LastCommitted(), 20);
  EXPECT_EQ(successor->plan()->digest, core.job.plan()->digest);
  EXPECT_EQ(successor->ranks().StateOf(0), scheduler::RankTable::State::kAttached);
}

TEST_F(MemberTest, TheRecordHasWhatTheCoordinatorIsTold) {
  Core& core = daemon_->core();
  int opened = 0;
  int gone = 0;
  links_.Watch(
      [&](const v1::MemberMessage& told) DMUOND_REQUIRES(core.mutex) {
        const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
        ASSERT_TRUE(record.ok()) << record.status();
        if (told.has_rank_session()) {
          ++opened;
          ASSERT_EQ(record->sessions_size(), 1);
          EXPECT_EQ(record->sessions(0).incarnation(), told.rank_session().incarnation());
        }
        if (told.has_rank_gone()) {
          ++gone;
          EXPECT_EQ(record->sessions_size(), 0);
          ASSERT_EQ(record->ranks().gone_size(), 1);
          EXPECT_EQ(record->ranks().gone(0).incarnation(), told.rank_gone().incarnation());
        }
      },
      nullptr);
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  EXPECT_TRUE(trainer->Close().ok());
  const StateLock lock(core.mutex);
  EXPECT_EQ(opened, 1);
  EXPECT_EQ(gone, 1);
}

// Node 0 of two: its own job hears what the coordinator, which is of the same process, has decided.
class CoordinatorTest : public MemberTest {
 protected:
  void Join(DaemonOptions& options) override {
    MemberTest::Join(options);
    options.node = 0;
    options.coordinator.nodes = 2;
  }
};

TEST_F(CoordinatorTest, TheRecordHasWhatIsDecidedBeforeOtherNodesHearOfIt) {
  Core& core = daemon_->core();
  std::vector<std::string> said;
  links_.Watch(nullptr, [&](const v1::CoordinatorMessage& message) DMUOND_REQUIRES(core.mutex) {
    const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
    ASSERT_TRUE(record.ok()) << record.status();
    if (message.has_plan()) {
      EXPECT_EQ(record->plan().inputs().job_incarnation(), message.plan().job_incarnation());
      said.push_back(message.plan().job());
    }
    if (message.has_job_ended()) {
      EXPECT_FALSE(record->has_plan());
      said.push_back("the end");
    }
  });
  const StateLock lock(core.mutex);
  scheduler::GroupActions plans;
  *plans.messages.emplace_back().message.mutable_plan() = PlanOf("raw");
  core.Do(std::move(plans));
  scheduler::GroupActions ends;
  ends.messages.emplace_back().message.mutable_job_ended()->set_job("raw");
  core.Do(std::move(ends));
  EXPECT_THAT(said, ElementsAre("raw", "the end"));
}

}  // namespace
}  // namespace dmuond::server
