// Memory of sessions: while it is being made, and of what trainers push.
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dmuond/v1/trainer.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"
#include "tests/server/daemon/sessions_fixture.h"

namespace dmuond::server {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Pair;

class SessionsMemoryTest : public SessionsTest {
 protected:
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
      kept = daemon_->place(0).tensors.KeepStateChunk(trainer.key(), chunk, calls.emplace_back());
    }
    return kept;
  }

  HeldMemory& memory_ = device_.held();
};

// Gigabytes take seconds to make, and the daemon answers meanwhile.
TEST_F(SessionsMemoryTest, MemoryThatIsBeingMadeKeepsNobodyWaiting) {
  memory_.Hold();
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open(0, 1).ok());
  std::jthread registers([&] {
    const absl::Status registered = trainer->Register();
    EXPECT_TRUE(registered.ok()) << registered;
  });
  memory_.WaitUntilHeld();
  EXPECT_EQ(daemon_->place(0).admin.Status().job().state(), "preparing");
  memory_.Release();
  registers.join();

  memory_.Hold();
  std::jthread attaches([&] {
    const absl::Status attached = trainer->Attach();
    EXPECT_TRUE(attached.ok()) << attached;
  });
  memory_.WaitUntilHeld();
  EXPECT_EQ(daemon_->place(0).admin.Status().job().trainers(0).state(), "registered");
  memory_.Release();
  attaches.join();
  EXPECT_TRUE(trainer->Push().ok());
  StepsOf(*trainer, 1, 2);
}

TEST_F(SessionsMemoryTest, AJobMayEndWhileItsMemoryIsBeingMade) {
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

TEST_F(SessionsMemoryTest, PushedStateIsHeldUpToALimitUntilItsCallsEnd) {
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

TEST_F(SessionsMemoryTest, PushedStateCountsForTheMemoryOfTheJob) {
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

}  // namespace
}  // namespace dmuond::server
