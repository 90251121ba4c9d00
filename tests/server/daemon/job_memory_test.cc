#include "server/daemon/memory/job_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "kernels/cpu/cpu_memory.h"
#include "server/common/errors.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using scheduler::LaneIndex;
using scheduler::TrainerRank;
using ::testing::HasSubstr;

class JobMemoryTest : public ::testing::Test {
 protected:
  int ArenaFd(JobMemory& memory, int rank, uint32_t id, int64_t bytes, bool& kept) {
    absl::StatusOr<int> fd = memory.Arena(TrainerRank(rank), "", id, bytes, kept);
    EXPECT_TRUE(fd.ok()) << fd.status();
    return fd.value_or(-1);
  }

  kernels::cpu::CpuMemoryHolder holder_;
  const std::unique_ptr<NodeDevice> device_ = MakeCpuNodeDevice(/*threads=*/1);
  JobMemory memory_{*device_, {.job = "test"}};
};

TEST_F(JobMemoryTest, LaneHasStateStagingAndMappedTable) {
  ASSERT_TRUE(memory_.AllocateLane(LaneIndex(1), 8192, 4096, 64).ok());
  EXPECT_TRUE(holder_.Check(memory_.state_fd(LaneIndex(1)), 8192).ok());
  EXPECT_TRUE(holder_.Check(memory_.staging_fd(LaneIndex(1)), 4096).ok());
  EXPECT_TRUE(holder_.Check(memory_.table_fd(LaneIndex(1)), 64).ok());
  EXPECT_EQ(memory_.state_fd(LaneIndex(0)), -1);
  EXPECT_EQ(memory_.table(LaneIndex(0)), nullptr);
  // What a lane writes is what the daemon reads.
  auto lane_view = kernels::cpu::MapShared(memory_.table_fd(LaneIndex(1)), 64);
  ASSERT_TRUE(lane_view.ok());
  std::memcpy((*lane_view)->data(), "slot", 4);
  EXPECT_EQ(std::memcmp(memory_.table(LaneIndex(1))->data(), "slot", 4), 0);
  EXPECT_EQ(memory_.bytes(), 8192 + 4096 + 64);
}

TEST_F(JobMemoryTest, ReplacedLaneMemoryIsNotCountedTwice) {
  ASSERT_TRUE(memory_.AllocateLane(LaneIndex(0), 8192, 4096, 64).ok());
  const auto old_table = memory_.table(LaneIndex(0));
  ASSERT_TRUE(memory_.AllocateLane(LaneIndex(0), 100, 100, 64).ok());
  EXPECT_EQ(memory_.bytes(), 264);
  std::memset(old_table->data(), 1, 64);  // still mapped
  EXPECT_EQ(static_cast<int>(memory_.table(LaneIndex(0))->data()[0]), 0);
}

TEST_F(JobMemoryTest, BoardIsHeld) {
  EXPECT_EQ(memory_.board_fd(), -1);
  ASSERT_TRUE(memory_.AllocateBoard(512).ok());
  EXPECT_TRUE(holder_.Check(memory_.board_fd(), 512).ok());
}

TEST_F(JobMemoryTest, ArenaOfTheSameSizeIsKeptWithItsContents) {
  bool kept = true;
  const int first = ArenaFd(memory_, 2, 7, 4096, kept);
  EXPECT_FALSE(kept);
  ASSERT_EQ(::pwrite(first, "weights", 7, 0), 7);
  const int second = ArenaFd(memory_, 2, 7, 4096, kept);
  EXPECT_TRUE(kept);
  char text[8] = {};
  ASSERT_EQ(::pread(second, text, 7, 0), 7);
  EXPECT_STREQ(text, "weights");
  EXPECT_EQ(memory_.arena_fd(TrainerRank(2), 7), second);
  EXPECT_EQ(memory_.bytes(), 4096);
}

TEST_F(JobMemoryTest, AnArenaThatWasDroppedIsNewThoughItsSizeIsTheSame) {
  bool kept = true;
  ASSERT_EQ(::pwrite(ArenaFd(memory_, 2, 7, 4096, kept), "weights", 7, 0), 7);
  memory_.DropArenas(TrainerRank(2));
  memory_.DropArenas(TrainerRank(3));
  EXPECT_EQ(memory_.bytes(), 0);
  char text[8] = {'x'};
  ASSERT_EQ(::pread(ArenaFd(memory_, 2, 7, 4096, kept), text, 1, 0), 1);
  EXPECT_FALSE(kept);
  EXPECT_EQ(text[0], 0);
}

// Both ends of a socket are this process's; each Of() is another connection.
TrainerProcessPtr ThisProcess(wire::PeerProcess::Asked asked = {}) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const wire::UniqueFd one(ends[0]);
  const wire::UniqueFd other(ends[1]);
  return std::make_shared<const TrainerProcess>(wire::PeerProcess::Of(one.get(), asked));
}

// Of a PID namespace that is not seen, before Linux 6.5.
std::shared_ptr<TrainerProcess> Unseen() {
  return std::make_shared<TrainerProcess>(wire::PeerProcess());
}

TEST_F(JobMemoryTest, AProcessThatComesAgainGetsItsArenasAgain) {
  const TrainerRank rank(0);
  bool kept = true;
  for (const bool inode : {true, false}) {
    const bool again = memory_.KeepFromOthers(rank, *ThisProcess({.inode = inode}));
    EXPECT_FALSE(again) << "known by its " << (inode ? "pidfd" : "pid");
    ArenaFd(memory_, 0, 7, 4096, kept);
    memory_.GiveTo(rank, ThisProcess({.inode = inode}));
  }
  EXPECT_TRUE(kept);
}

TEST_F(JobMemoryTest, ArenasThatAnotherProcessMayWriteAreNotHandedOutAndCountUntilItLetsGo) {
  JobMemory memory(*device_, {.job = "test", .bytes_max = 10'000});
  const TrainerRank rank(0);
  const std::shared_ptr<TrainerProcess> before = Unseen();
  bool kept = true;
  ArenaFd(memory, 0, 7, 4096, kept);
  memory.GiveTo(rank, before);
  ASSERT_TRUE(memory.KeepFromOthers(rank, *Unseen()));
  EXPECT_EQ(memory.KeptBytes(rank), 4096);
  ArenaFd(memory, 0, 7, 4096, kept);
  EXPECT_FALSE(kept);
  EXPECT_EQ(memory.bytes(), 2 * 4096);
  EXPECT_EQ(ReasonOf(memory.Arena(rank, "", 8, 4096, kept).status()), "MEMORY_EXHAUSTED");
  before->disconnected = true;
  ArenaFd(memory, 0, 8, 4096, kept);
  EXPECT_EQ(memory.KeptBytes(rank), 0);
  EXPECT_EQ(memory.bytes(), 2 * 4096);
}

TEST_F(JobMemoryTest, ArenaOfAnotherSizeOrRankIsNewAndZero) {
  bool kept = true;
  ASSERT_EQ(::pwrite(ArenaFd(memory_, 0, 0, 4096, kept), "weights", 7, 0), 7);
  const int larger = ArenaFd(memory_, 0, 0, 8192, kept);
  EXPECT_FALSE(kept);
  char text[8] = {'x'};
  ASSERT_EQ(::pread(larger, text, 1, 0), 1);
  EXPECT_EQ(text[0], 0);
  ArenaFd(memory_, 1, 0, 4096, kept);
  EXPECT_FALSE(kept);
  EXPECT_EQ(memory_.bytes(), 8192 + 4096);
}

TEST_F(JobMemoryTest, TimelineHasHeaderAndZeroWords) {
  absl::StatusOr<int> fd = memory_.Timeline(TrainerRank(0), 3);
  ASSERT_TRUE(fd.ok()) << fd.status();
  auto mapping = kernels::cpu::MapShared(*fd, wire::TimelineBytes(3));
  ASSERT_TRUE(mapping.ok());
  const wire::TimelinePage page((*mapping)->data());
  EXPECT_EQ(page.header().magic, wire::kTimelineMagic);
  EXPECT_EQ(page.header().version, wire::kTimelineVersion);
  EXPECT_EQ(page.header().buckets, 3);
  EXPECT_EQ(wire::Read(page.submitted()), 0);
  for (uint32_t bucket = 0; bucket < 3; ++bucket) {
    EXPECT_EQ(wire::Read(page.ready(bucket)), 0);
    EXPECT_EQ(wire::Read(page.published(bucket, 3)), 0);
  }
}

TEST_F(JobMemoryTest, NewTimelinePoisonsTheOldOne) {
  absl::StatusOr<int> old_fd = memory_.Timeline(TrainerRank(0), 2);
  ASSERT_TRUE(old_fd.ok());
  auto old_mapping = kernels::cpu::MapShared(*old_fd, wire::TimelineBytes(2));
  ASSERT_TRUE(old_mapping.ok());
  const wire::TimelinePage old_page((*old_mapping)->data());
  ASSERT_TRUE(memory_.Timeline(TrainerRank(0), 2).ok());
  for (uint32_t bucket = 0; bucket < 2; ++bucket) {
    EXPECT_EQ(wire::Read(old_page.published(bucket, 2)), wire::kPoison);
    EXPECT_EQ(wire::Read(old_page.ready(bucket)), 0) << "a lane must not take it for a gradient";
  }
  auto mapping =
      kernels::cpu::MapShared(memory_.timeline_fd(TrainerRank(0)), wire::TimelineBytes(2));
  ASSERT_TRUE(mapping.ok());
  EXPECT_EQ(wire::Read(wire::TimelinePage((*mapping)->data()).published(0, 2)), 0);
}

TEST_F(JobMemoryTest, PoisonEndsTheWaitsOfAllTrainers) {
  std::vector<std::thread> trainers;
  std::vector<uint64_t> seen(3);
  for (int rank = 0; rank < 3; ++rank) {
    absl::StatusOr<int> fd = memory_.Timeline(TrainerRank(rank), 1);
    ASSERT_TRUE(fd.ok());
    auto mapping = kernels::cpu::MapShared(*fd, wire::TimelineBytes(1));
    ASSERT_TRUE(mapping.ok());
    trainers.emplace_back([mapping = *std::move(mapping), &result = seen[rank]] {
      result = wire::WaitAtLeast(wire::TimelinePage(mapping->data()).published(0, 1), 5,
                                 std::chrono::steady_clock::now() + kPatience);
    });
  }
  memory_.PoisonAll();
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_THAT(seen, ::testing::Each(wire::kPoison));
}

TEST_F(JobMemoryTest, ARollbackEndsWaitsForWeightsThatHaveNotCome) {
  std::vector<std::unique_ptr<kernels::Mapping>> mappings;
  for (int rank = 0; rank < 2; ++rank) {
    absl::StatusOr<int> fd = memory_.Timeline(TrainerRank(rank), 2);
    ASSERT_TRUE(fd.ok());
    auto mapping = kernels::cpu::MapShared(*fd, wire::TimelineBytes(2));
    ASSERT_TRUE(mapping.ok());
    mappings.push_back(*std::move(mapping));
  }
  const auto published = [&](int rank, uint32_t bucket) -> wire::TimelineWord& {
    return wire::TimelinePage(mappings[rank]->data()).published(bucket, 2);
  };
  constexpr uint64_t kNewest = (uint64_t{4} << 32) + 7;
  wire::Advance(published(0, 0), kNewest - 1);
  wire::Advance(published(0, 1), kNewest);
  wire::Advance(published(1, 1), wire::kPoison);  // its trainer has ended the page
  memory_.MarkRollback(5, kNewest);
  EXPECT_EQ(wire::Read(published(0, 0)), wire::RollbackMark(5));
  EXPECT_EQ(wire::Read(published(0, 1)), kNewest);
  EXPECT_EQ(wire::Read(published(1, 0)), wire::RollbackMark(5));
  EXPECT_EQ(wire::Read(published(1, 1)), wire::kPoison);
}

TEST_F(JobMemoryTest, TooManyBucketsAreRefused) {
  EXPECT_TRUE(
      absl::IsInvalidArgument(memory_.Timeline(TrainerRank(0), wire::kBucketsMax + 1).status()));
  EXPECT_TRUE(memory_.Timeline(TrainerRank(0), wire::kBucketsMax).ok());
}

TEST_F(JobMemoryTest, QuotaNamesBothValuesAndChangesNothing) {
  JobMemory memory(*device_, {.job = "small", .bytes_max = 10'000});
  bool kept = false;
  ArenaFd(memory, 0, 0, 6000, kept);
  const absl::Status status = memory.Arena(TrainerRank(1), "", 0, 6001, kept).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(ReasonOf(status), "MEMORY_EXHAUSTED");
  EXPECT_THAT(std::string(status.message()), HasSubstr("6001"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("10000"));
  EXPECT_EQ(memory.bytes(), 6000);
  // A lane that fits only in part leaves nothing behind.
  EXPECT_EQ(ReasonOf(memory.AllocateLane(LaneIndex(0), 2000, 2000, 1000)), "MEMORY_EXHAUSTED");
  EXPECT_EQ(memory.bytes(), 6000);
  EXPECT_TRUE(memory.AllocateLane(LaneIndex(0), 2000, 1000, 1000).ok());
  EXPECT_EQ(memory.bytes(), 10'000);
}

TEST_F(JobMemoryTest, SizesThatCannotBeAreRefused) {
  bool kept = false;
  EXPECT_TRUE(absl::IsInvalidArgument(memory_.Arena(TrainerRank(0), "", 0, 0, kept).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(memory_.Arena(TrainerRank(0), "", 0, -1, kept).status()));
  const absl::Status huge = memory_.Arena(TrainerRank(0), "", 0, int64_t{1} << 60, kept).status();
  EXPECT_EQ(ReasonOf(huge), "MEMORY_EXHAUSTED") << huge;
  EXPECT_EQ(memory_.bytes(), 0);
}

TEST_F(JobMemoryTest, EverythingIsClosedAtTheEnd) {
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 50; ++i) {
    JobMemory memory(*device_, {.job = "short"});
    bool kept = false;
    ASSERT_TRUE(memory.AllocateLane(LaneIndex(0), 4096, 4096, 4096).ok());
    ASSERT_TRUE(memory.AllocateBoard(4096).ok());
    ArenaFd(memory, 0, 0, 4096, kept);
    ASSERT_TRUE(memory.Timeline(TrainerRank(0), 4).ok());
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace dmuond::server
