#include "server/daemon/group/delivery_queue.h"

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace dmuond::server {
namespace {

// What waits behind it waits until it is opened.
class Gate {
 public:
  void Open() {
    MutexLock lock(mutex_);
    open_ = true;
    changed_.NotifyAll();
  }
  void WaitUntilOpen() {
    MutexLock lock(mutex_);
    while (!open_) changed_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool open_ DMUOND_GUARDED_BY(mutex_) = false;
};

TEST(DeliveryQueueTest, EverythingIsDeliveredInTheOrderOfAppending) {
  std::vector<int> delivered;
  {
    DeliveryQueue queue(1);
    for (int i = 0; i < 1000; ++i) queue.Append([&delivered, i] { delivered.push_back(i); }, 10);
  }
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(delivered, expected);
}

TEST(DeliveryQueueTest, WhoeverWaitsUntilItIsDeliveredWaitsForAllThatWasAppendedBefore) {
  DeliveryQueue queue(1);
  int delivered = 0;
  for (int round = 1; round <= 100; ++round) {
    queue.Append([&delivered] { ++delivered; });
    queue.WaitUntilDelivered();
    ASSERT_EQ(delivered, round);
  }
}

TEST(DeliveryQueueTest, AReaderWaitsForRoomWhileMoreThanTheBoundIsNotDelivered) {
  DeliveryQueue queue(10);
  Gate gate;
  std::atomic<int> delivered{0};
  const auto deliver = [&] {
    gate.WaitUntilOpen();
    ++delivered;
  };
  queue.Append(deliver, 10);
  EXPECT_FALSE(queue.full());
  queue.WaitForRoom();
  queue.Append(deliver, 100);  // taken, however large
  EXPECT_TRUE(queue.full());
  Gate begun;
  int seen = -1;
  std::thread reader([&] {
    begun.Open();
    queue.WaitForRoom();
    seen = delivered.load();
  });
  begun.WaitUntilOpen();
  gate.Open();
  reader.join();
  EXPECT_EQ(seen, 2);
  EXPECT_FALSE(queue.full());
}

}  // namespace
}  // namespace dmuond::server
