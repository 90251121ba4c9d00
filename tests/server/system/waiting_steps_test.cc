// SubmitStep and WaitStep while they wait: they hold no thread, and end when their caller goes, at
// their deadline, with the daemon, and by the step.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/daemon_test.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int kCallsMax = 32;  // of a session, CallsInFlight::kMax

// A WaitStep that is under way.
class Waiting {
 public:
  Waiting(RawTrainer& trainer, const v1::WaitStepRequest& request) {
    context_.set_deadline(std::chrono::system_clock::now() + seconds(60));
    call_ = trainer.stub().AsyncWaitStep(&context_, request, &queue_);
    call_->Finish(&reply_, &status_, nullptr);
  }
  ~Waiting() {
    context_.TryCancel();
    if (!ended_) Wait().IgnoreError();  // cancelled, or answered before
    queue_.Shutdown();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  void Cancel() { context_.TryCancel(); }
  absl::Status Wait() {
    void* tag = nullptr;
    bool ok = false;
    queue_.Next(&tag, &ok);
    ended_ = true;
    return server::FromGrpc(status_);
  }
  [[nodiscard]] const v1::WaitStepReply& reply() const { return reply_; }

 private:
  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::WaitStepReply>> call_;
  v1::WaitStepReply reply_;
  grpc::Status status_;
  bool ended_ = false;
};

class WaitingStepsTest : public DaemonTest {
 protected:
  // Two trainers, of which the first has handed in step 1.
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(StartDaemon({.flags = {"--drain_timeout=1s"}}));
    for (auto* trainer : {&first_, &second_}) {
      *trainer = std::make_unique<RawTrainer>(daemon_->address());
    }
    std::thread other([&] { Begin(*second_, 1); });
    Begin(*first_, 0);
    other.join();
    v1::SubmitStepRequest request = first_->SubmitRequest(1);
    request.set_wait_ms(0);
    v1::SubmitStepReply reply;
    const absl::Status submitted = first_->Submit(request, &reply);
    ASSERT_TRUE(submitted.ok()) << submitted;
    wait_.set_step(1);
    wait_.set_attempt(request.attempt());
    *wait_.mutable_key() = request.key();
    wait_.set_wait_ms(60'000);
  }
  static void Begin(RawTrainer& trainer, int32_t rank) {
    absl::Status status = trainer.Open(rank, 2);
    if (status.ok()) status = trainer.Register();
    if (status.ok()) status = trainer.Attach();
    if (status.ok()) status = trainer.Push();
    EXPECT_TRUE(status.ok()) << status;
  }
  void BothStep() {
    std::thread other([&] { EXPECT_TRUE(second_->Step(1).ok()); });
    EXPECT_TRUE(first_->Step(1).ok());
    other.join();
  }
  // Until the daemon has got all that this trainer has said so far: its calls come in order.
  void Asked(RawTrainer& trainer) {
    v1::WaitStepRequest request = wait_;
    request.set_wait_ms(0);
    v1::WaitStepReply reply;
    const absl::Status status = trainer.Call(&RawTrainer::Stub::WaitStep, request, &reply);
    EXPECT_TRUE(status.ok()) << status;
  }
  [[nodiscard]] int64_t Threads() const {
    const std::string tasks = absl::StrCat("/proc/", daemon_->pid(), "/task");
    return std::distance(std::filesystem::directory_iterator(tasks), {});
  }

  std::unique_ptr<RawTrainer> first_;
  std::unique_ptr<RawTrainer> second_;
  v1::WaitStepRequest wait_;
};

// One connection carries eight calls at a time.
TEST_F(WaitingStepsTest, CallsThatWaitHoldNoThread) {
  Asked(*first_);
  const int64_t before = Threads();
  std::vector<std::unique_ptr<Waiting>> waiting;
  for (int i = 0; i < 7; ++i) waiting.push_back(std::make_unique<Waiting>(*first_, wait_));
  Asked(*first_);
  EXPECT_LT(Threads(), before + 7);
  BothStep();
  for (const auto& call : waiting) {
    const absl::Status status = call->Wait();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(call->reply().outcome().kind(), v1::Outcome::KIND_COMMITTED);
  }
}

TEST_F(WaitingStepsTest, CallersThatHangUpMakeRoom) {
  for (int i = 0; i < 3 * kCallsMax; ++i) {
    Waiting call(*first_, wait_);
    call.Cancel();
    EXPECT_TRUE(absl::IsCancelled(call.Wait()));
    Asked(*first_);
  }
  BothStep();
}

TEST_F(WaitingStepsTest, AnAnswerIsPendingAtItsDeadlineAndNotBefore) {
  wait_.set_wait_ms(50);
  const auto begin = steady_clock::now();
  Waiting call(*first_, wait_);
  const absl::Status status = call.Wait();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(steady_clock::now() - begin, milliseconds(50));
  EXPECT_EQ(call.reply().outcome().kind(), v1::Outcome::KIND_UNSPECIFIED);
  BothStep();
}

// Its connections break, so that an answer is lost where it is not out yet.
TEST_F(WaitingStepsTest, ADaemonLeavesThoughCallsWait) {
  std::vector<std::unique_ptr<Waiting>> waiting;
  for (int i = 0; i < 7; ++i) waiting.push_back(std::make_unique<Waiting>(*first_, wait_));
  Asked(*first_);
  EXPECT_EQ(daemon_->Stop(), 0) << daemon_->Log();
  for (const auto& call : waiting) {
    const absl::Status status = call->Wait();
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsCancelled(status)) << status;
  }
}

TEST_F(WaitingStepsTest, ASessionThatEndsEndsItsWaits) {
  Waiting call(*first_, wait_);
  Asked(*first_);
  EXPECT_TRUE(first_->Close().ok());
  const absl::Status status = call.Wait();
  EXPECT_FALSE(status.ok()) << call.reply().ShortDebugString();
}

}  // namespace
}  // namespace dmuond::testing
