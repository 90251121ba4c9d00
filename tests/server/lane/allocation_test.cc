// The engine does not allocate while it collects, updates and publishes. On one node: the CPU
// device's rail between nodes is Gloo's, which allocates for each message.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "tests/scheduler/layouts.h"
#include "tests/server/lane/one_lane.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace dmuond::server::lane::testing {
namespace {

using scheduler::testing::AdamW;
using scheduler::testing::Muon;

TEST(AllocationTest, NothingIsAllocatedFromReadyToPublished) {
  scheduler::testing::World world(2, 1, 1);
  for (int i = 0; i < 4; ++i) world.Replicate(Muon("w" + std::to_string(i), {32, 16}));
  world.ShardRows(AdamW("e", {64, 8}));
  OneLane lane(world);
  const auto run = [&](uint64_t attempt, scheduler::AttemptKind kind) {
    lane.Arm(attempt, kind);
    const int64_t before = allocations.load();
    bool ok = lane.Collect();
    lane.StartUpdate();
    ok = ok && lane.Publish();
    EXPECT_TRUE(ok);
    return allocations.load() - before;
  };
  run(1, scheduler::AttemptKind::kPush);
  run(2, scheduler::AttemptKind::kStep);
  EXPECT_GT(allocations.load(), 0) << "nothing is counted";
  EXPECT_EQ(run(3, scheduler::AttemptKind::kStep), 0);
}

}  // namespace
}  // namespace dmuond::server::lane::testing
