// When new weights reach their holders, and when they are told of them.
#include "server/lane/publisher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "tests/scheduler/layouts.h"
#include "tests/server/lane/one_lane.h"

namespace dmuond::server::lane::testing {
namespace {

using scheduler::testing::AdamW;
using scheduler::testing::Muon;

std::string Bytes(const OneLane& lane) {
  std::string all;
  for (const HostMemory& arena : lane.arenas) {
    all.append(static_cast<const char*>(arena.data()), OneLane::kArenaBytes);
  }
  return all;
}

TEST(PublisherTest, WeightsAreCopiedBatchByBatchAndToldOfBucketByBucket) {
  scheduler::testing::World world(1, 1, 1);
  world.Replicate(Muon("wide", {16, 32}));
  world.Replicate(Muon("tall", {32, 16}));
  world.Replicate(AdamW("bias", {32}));
  OneLane lane(world);
  ASSERT_EQ(lane.buckets, 1);
  ASSERT_EQ(lane.job->program.batches.size(), 3);
  for (const HostMemory& arena : lane.arenas) {  // as weights, then as gradients
    for (int64_t i = 0; i < OneLane::kArenaBytes / 4; ++i) {
      arena.floats()[i] = static_cast<float>(i % 7) - 2.5F;
    }
  }
  lane.Arm(1, scheduler::AttemptKind::kPush);
  ASSERT_TRUE(lane.Collect());
  lane.StartUpdate();
  ASSERT_TRUE(lane.Publish());

  lane.Arm(2, scheduler::AttemptKind::kStep);
  ASSERT_TRUE(lane.Collect());
  lane.StartUpdate();
  const std::atomic<uint64_t>& published =
      wire::TimelinePage(lane.pages[0].data()).published(0, lane.buckets).value;
  std::string seen = Bytes(lane);
  for (int batch = 0; batch < 3; ++batch) {
    EXPECT_EQ(published.load(), 1) << batch;
    ASSERT_TRUE(lane.UpdateBatch());
    ASSERT_TRUE(lane.publisher->Progress().ok());
    const std::string now = Bytes(lane);
    EXPECT_NE(now, seen) << "nothing of batch " << batch << " has come";
    seen = now;
  }
  ASSERT_TRUE(lane.Publish());
  EXPECT_EQ(published.load(), 2);
}

TEST(ExtractCheckTest, DigestsOneTensorOrCopyAtATime) {
  scheduler::testing::World world(3, 1, 1);
  world.Replicate(Muon("wide", {16, 32}));
  OneLane lane(world);
  lane.Arm(1, scheduler::AttemptKind::kPush);
  ASSERT_TRUE(lane.Collect());
  lane.StartUpdate();
  ASSERT_TRUE(lane.Publish());
  ExtractCheck check = lane.MakeCheck();
  v1::CheckExtracts order;
  v1::Extract& extract = *order.add_extracts();
  *extract.mutable_box() = *extract.add_held() = ToProto(lane.job->program.fragments[0].box);
  order.mutable_extracts()->Add(v1::Extract(extract));
  order.mutable_extracts(1)->set_rail(7);  // of another lane
  order.mutable_extracts()->Add(v1::Extract(extract));
  check.Start(order);
  // Of each extract momentum, master, what that is rounded to, and the weights of ranks 0 and 2.
  for (int part = 0; part < 2 * 5; ++part) {
    EXPECT_FALSE(check.Progress([](int32_t rank) { return rank != 1; }).has_value()) << part;
  }
  const auto checked = check.Progress([](int32_t rank) { return rank != 1; });
  ASSERT_TRUE(checked.has_value());
  EXPECT_EQ(checked->error(), "");
  ASSERT_EQ(checked->digests_size(), 2);
  for (const v1::ExtractDigests& digests : checked->digests()) {
    EXPECT_EQ(digests.state_size(), 2);
    ASSERT_EQ(digests.rounded_size(), 1);
    ASSERT_EQ(digests.copies_size(), 1);
    EXPECT_EQ(digests.copies(0).digest(), digests.rounded(0));
    ASSERT_EQ(digests.copies(0).ranks_size(), 2);
    EXPECT_EQ(digests.copies(0).ranks(1), 2);
  }
  EXPECT_EQ(checked->digests(1).extract(), 2);
}

}  // namespace
}  // namespace dmuond::server::lane::testing
