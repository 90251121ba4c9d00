// The daemon's lock: who waits under it is woken for what it waits for, and for nothing else.
#include "server/daemon/state_mutex.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{60};

// Waits as the daemon's calls do; counts how often it was woken.
class Waiters {
 public:
  ~Waiters() {
    for (std::thread& thread : threads_) thread.join();
  }
  // Waits until `count` is at least `wanted`.
  void Start(int wanted) {
    threads_.emplace_back([this, wanted] {
      StateLock lock(mutex);
      const std::function<bool()> enough = [this, wanted] { return count >= wanted; };
      ++waiting;
      mutex.Changed();
      while (!enough()) {
        mutex.WaitUntil(enough, steady_clock::now() + kPatience);
        ++woken;
      }
      ++done;
      mutex.Changed();
    });
  }
  void Until(const std::function<bool()>& condition) DMUOND_REQUIRES(mutex) {
    const auto deadline = steady_clock::now() + kPatience;
    while (!condition()) {
      ASSERT_LT(steady_clock::now(), deadline);
      mutex.WaitUntil(condition, deadline);
    }
  }
  void Set(int value) {
    StateLock lock(mutex);
    count = value;
    mutex.Changed();
  }

  StateMutex mutex;
  int count = 0;
  int waiting = 0;
  int woken = 0;
  int done = 0;

 private:
  std::vector<std::thread> threads_;
};

TEST(StateMutexTest, OnlyThoseAreWokenForWhomItHolds) {
  Waiters waiters;
  for (int wanted = 1; wanted <= 16; ++wanted) waiters.Start(wanted);
  {
    StateLock lock(waiters.mutex);
    waiters.Until([&] { return waiters.waiting == 16; });
  }
  for (int count = 1; count <= 16; ++count) {
    waiters.Set(count);
    StateLock lock(waiters.mutex);
    waiters.Until([&] { return waiters.done == count; });
    EXPECT_EQ(waiters.woken, count);
  }
}

TEST(StateMutexTest, AllAreWokenForWhomItHoldsOneAfterTheOther) {
  Waiters waiters;
  for (int i = 0; i < 64; ++i) waiters.Start(1);
  {
    StateLock lock(waiters.mutex);
    waiters.Until([&] { return waiters.waiting == 64; });
  }
  waiters.Set(1);
  StateLock lock(waiters.mutex);
  waiters.Until([&] { return waiters.done == 64; });
  EXPECT_EQ(waiters.woken, 64);
}

TEST(StateMutexTest, AWaitEndsAtItsDeadline) {
  StateMutex mutex;
  StateLock lock(mutex);
  const std::function<bool()> never = [] { return false; };
  const auto deadline = steady_clock::now() + std::chrono::milliseconds(20);
  mutex.WaitUntil(never, deadline);
  EXPECT_GE(steady_clock::now(), deadline);
}

// Deadlines that pass while others are woken, conditions that hold and do no more: nobody is lost.
TEST(StateMutexTest, NobodyIsForgottenWhereDeadlinesAndChangesCross) {
  StateMutex mutex;
  int turn = 0;
  std::atomic<int> rounds{0};
  constexpr int kThreads = 8;
  constexpr int kRounds = 500;
  std::vector<std::thread> threads;
  for (int mine = 0; mine < kThreads; ++mine) {
    threads.emplace_back([&, mine] {
      for (int round = 0; round < kRounds; ++round) {
        StateLock lock(mutex);
        const std::function<bool()> my_turn = [&] { return turn == mine; };
        while (!my_turn()) {
          const bool briefly = (round + mine) % 3 == 0;
          mutex.WaitUntil(my_turn, steady_clock::now() + (briefly ? std::chrono::microseconds(50)
                                                                  : std::chrono::seconds(60)));
        }
        turn = (turn + 1) % kThreads;
        mutex.Changed();
        ++rounds;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rounds, kThreads * kRounds);
}

// ---- waits without a thread ----

class LateWaitsTest : public ::testing::Test {
 protected:
  // Until `count` is at least `wanted`. Takes the lock when it has ended, which nobody holds then.
  StateMutex::LateId Start(int wanted, steady_clock::time_point deadline) DMUOND_REQUIRES(mutex_) {
    return mutex_.WaitLate({[this, wanted] { return count_ >= wanted; }, deadline,
                            [this, wanted] {
                              StateLock lock(mutex_);
                              ended_.push_back(wanted);
                            }});
  }
  void Set(int value) {
    StateLock lock(mutex_);
    count_ = value;
    mutex_.Changed();
  }
  std::vector<int> Ended() {
    StateLock lock(mutex_);
    return ended_;
  }

  const steady_clock::time_point far_ = steady_clock::now() + kPatience;
  StateMutex mutex_;
  // Under the lock, of which the compiler's check knows nothing in conditions.
  int count_ = 0;
  std::vector<int> ended_;
};

TEST_F(LateWaitsTest, EachEndsOnceWhenItsConditionHolds) {
  {
    StateLock lock(mutex_);
    for (const int wanted : {1, 3, 2}) Start(wanted, far_);
  }
  Set(0);
  EXPECT_EQ(Ended(), std::vector<int>());
  Set(2);
  EXPECT_EQ(Ended(), std::vector<int>({1, 2}));
  Set(3);
  EXPECT_EQ(Ended(), std::vector<int>({1, 2, 3}));
}

TEST_F(LateWaitsTest, WhoWaitsWithAThreadLetsThemEnd) {
  StateLock lock(mutex_);
  Start(1, far_);
  count_ = 1;
  mutex_.Changed();
  const std::function<bool()> one_has_ended = [this] { return ended_.size() == 1; };
  mutex_.WaitUntil(one_has_ended, steady_clock::now());
  EXPECT_EQ(ended_, std::vector<int>({1}));
}

TEST_F(LateWaitsTest, OneThatIsEndedEndsOnce) {
  StateMutex::LateId first = 0;
  StateMutex::LateId second = 0;
  {
    StateLock lock(mutex_);
    first = Start(1, far_);
    second = Start(2, far_);
    mutex_.EndLate(second);
  }
  EXPECT_EQ(Ended(), std::vector<int>({2}));
  Set(2);
  {
    StateLock lock(mutex_);
    for (const StateMutex::LateId id : {first, second, StateMutex::LateId{0}}) mutex_.EndLate(id);
  }
  EXPECT_EQ(Ended(), std::vector<int>({2, 1}));
}

TEST_F(LateWaitsTest, ThoseWhoseDeadlineHasPassedEndAndTheNextDeadlineIsSaid) {
  const auto now = steady_clock::now();
  const auto soon = now + std::chrono::seconds(1);
  {
    StateLock lock(mutex_);
    Start(1, far_);
    Start(2, now);
    Start(3, soon);
    EXPECT_EQ(mutex_.EndOverdue(now), soon);
  }
  EXPECT_EQ(Ended(), std::vector<int>({2}));
  {
    StateLock lock(mutex_);
    EXPECT_EQ(mutex_.EndOverdue(far_), std::nullopt);
  }
  EXPECT_EQ(Ended(), std::vector<int>({2, 1, 3}));
}

}  // namespace
}  // namespace dmuond::server
