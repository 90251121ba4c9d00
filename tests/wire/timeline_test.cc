#include "dmuond/wire/timeline.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace dmuond::wire {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

steady_clock::time_point In(milliseconds time) { return steady_clock::now() + time; }
constexpr milliseconds kSoon{20};
constexpr milliseconds kLong{60'000};

// A page set that a forked child shares.
class SharedPage {
 public:
  explicit SharedPage(uint32_t buckets)
      : bytes_(TimelineBytes(buckets)),
        base_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~SharedPage() { ::munmap(base_, bytes_); }
  [[nodiscard]] TimelinePage page() const { return TimelinePage(base_); }
  [[nodiscard]] std::byte* base() const { return static_cast<std::byte*>(base_); }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* base_;
};

// The bytes are the contract: clients in other languages compute these offsets themselves.
TEST(Timeline, WordsLieWhereTheContractSays) {
  SharedPage shared(3);
  const TimelinePage page = shared.page();
  const auto offset = [&](const TimelineWord& word) {
    return reinterpret_cast<const std::byte*>(&word) - shared.base();
  };
  EXPECT_EQ(offset(page.submitted()), 64);
  EXPECT_EQ(offset(page.ready(0)), 128);
  EXPECT_EQ(offset(page.ready(2)), 160);
  EXPECT_EQ(offset(page.published(0, 3)), 176);
  EXPECT_EQ(offset(page.published(2, 3)), 208);
  EXPECT_EQ(TimelineBytes(3), 224);
  EXPECT_EQ(TimelineBytes(0), 128);
}

TEST(Timeline, AWordIsItsValueAndACountOfChanges) {
  SharedPage shared(1);
  TimelineWord& word = shared.page().ready(0);
  Advance(word, (uint64_t{7} << 32) | 5);
  Advance(word, (uint64_t{7} << 32) | 6);
  uint64_t value = 0;
  uint32_t changes = 0;
  std::memcpy(&value, shared.base() + 128, sizeof(value));
  std::memcpy(&changes, shared.base() + 136, sizeof(changes));
  EXPECT_EQ(value, (uint64_t{7} << 32) | 6);
  EXPECT_EQ(changes, 2);
}

TEST(Timeline, AdvancingOneWordLeavesTheOthers) {
  SharedPage shared(4);
  const TimelinePage page = shared.page();
  Advance(page.ready(1), 9);
  EXPECT_EQ(Read(page.submitted()), 0);
  EXPECT_EQ(Read(page.ready(0)), 0);
  EXPECT_EQ(Read(page.ready(1)), 9);
  EXPECT_EQ(Read(page.ready(2)), 0);
  EXPECT_EQ(Read(page.published(1, 4)), 0);
}

TEST(Timeline, AWaitThatIsSatisfiedReturnsAtOnceWhateverItsDeadline) {
  SharedPage shared(1);
  Advance(shared.page().ready(0), 5);
  EXPECT_EQ(WaitAtLeast(shared.page().ready(0), 5, In(milliseconds(-1))), 5);
  EXPECT_EQ(WaitAtLeast(shared.page().ready(0), 4, In(milliseconds(-1))), 5);
}

TEST(Timeline, AWaitEndsAtItsDeadlineWithTheValueAsItIs) {
  SharedPage shared(1);
  Advance(shared.page().ready(0), 3);
  const auto begin = steady_clock::now();
  EXPECT_EQ(WaitAtLeast(shared.page().ready(0), 4, In(kSoon)), 3);
  EXPECT_GE(steady_clock::now() - begin, kSoon);
}

TEST(Timeline, PoisonEndsEveryWait) {
  SharedPage shared(1);
  TimelineWord& word = shared.page().published(0, 1);
  std::thread waiter([&] { EXPECT_EQ(WaitAtLeast(word, kPoison - 1, In(kLong)), kPoison); });
  Advance(word, kPoison);
  waiter.join();
}

TEST(Timeline, ARollbackIsMarkedBetweenTheAttemptsBeforeItAndThoseThatFollow) {
  constexpr uint64_t kEpoch = uint64_t{1} << 32;
  EXPECT_GT(RollbackMark(3), (2 * kEpoch) + 4'000'000'000);
  EXPECT_LT(RollbackMark(3), 3 * kEpoch);
  EXPECT_TRUE(IsRollbackMark(RollbackMark(1)));
  for (const uint64_t value : {uint64_t{0}, 3 * kEpoch, (3 * kEpoch) + 1, kPoison}) {
    EXPECT_FALSE(IsRollbackMark(value)) << value;
  }
}

TEST(Timeline, AWordIsRaisedAndNeverLowered) {
  SharedPage shared(1);
  TimelineWord& word = shared.page().published(0, 1);
  std::thread waiter([&] { EXPECT_EQ(WaitAtLeast(word, 4, In(kLong)), 5); });
  AdvanceTo(word, 5);
  waiter.join();
  AdvanceTo(word, 3);
  EXPECT_EQ(Read(word), 5);
  AdvanceTo(word, kPoison);
  AdvanceTo(word, 6);
  EXPECT_EQ(Read(word), kPoison);
}

TEST(Timeline, EveryWaiterIsWokenAndSeesWhatWasWrittenBefore) {
  SharedPage shared(1);
  TimelineWord& word = shared.page().ready(0);
  int written_before = 0;
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      EXPECT_EQ(WaitAtLeast(word, 1, In(kLong)), 1);
      EXPECT_EQ(written_before, 42);
    });
  }
  written_before = 42;
  Advance(word, 1);
  for (std::thread& waiter : waiters) waiter.join();
}

// A lost wake-up between the look at the value and the sleep would stop this exchange.
TEST(Timeline, TwoThreadsHandAttemptsBackAndForth) {
  SharedPage shared(1);
  TimelineWord& ready = shared.page().ready(0);
  TimelineWord& published = shared.page().published(0, 1);
  constexpr uint64_t kAttempts = 20'000;
  std::thread lane([&] {
    for (uint64_t attempt = 1; attempt <= kAttempts; ++attempt) {
      if (WaitAtLeast(ready, attempt, In(kLong)) < attempt) return;
      Advance(published, attempt);
    }
  });
  uint64_t attempt = 1;
  for (; attempt <= kAttempts; ++attempt) {
    Advance(ready, attempt);
    if (WaitAtLeast(published, attempt, In(kLong)) < attempt) break;
  }
  lane.join();
  EXPECT_EQ(attempt, kAttempts + 1);
}

TEST(Timeline, AnotherProcessIsWoken) {
  SharedPage shared(2);
  const TimelinePage page = shared.page();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool seen = WaitAtLeast(page.ready(1), 8, In(kLong)) == 8;
    Advance(page.published(1, 2), seen ? 8 : kPoison);
    ::_exit(0);
  }
  Advance(page.ready(1), 8);
  EXPECT_EQ(WaitAtLeast(page.published(1, 2), 8, In(kLong)), 8);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace dmuond::wire
