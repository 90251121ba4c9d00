// The peer group over Gloo, several members in one process.
#include "server/lane/gloo_group.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace dmuond::server::lane {
namespace {

class GlooGroupTest : public ::testing::Test {
 protected:
  void Connect(int size) {
    for (int rank = 0; rank < size; ++rank) {
      auto made = MakeGlooGroup({.rank = rank, .size = size, .notify = [this] {
                                   MutexLock lock(mutex_);
                                   ++news_;
                                   changed_.NotifyAll();
                                 }});
      ASSERT_TRUE(made.ok()) << made.status();
      members_.push_back(*std::move(made));
    }
    std::vector<std::string> blobs;
    for (const auto& member : members_) blobs.push_back(member->blob());
    for (const auto& member : members_) ASSERT_TRUE(member->Connect(blobs).ok());
    for (const auto& member : members_) {
      EXPECT_TRUE(WaitFor([&] { return member->Ready(); }).ok());
    }
  }

  // Until true or an error; looks again whenever a member has news.
  template <typename Ask>
  absl::Status WaitFor(Ask ask) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      int64_t seen = 0;
      {
        MutexLock lock(mutex_);
        seen = news_;
      }
      const absl::StatusOr<bool> answer = ask();
      if (!answer.ok()) return answer.status();
      if (*answer) return absl::OkStatus();
      MutexLock lock(mutex_);
      while (news_ == seen) {
        if (!changed_.WaitUntil(mutex_, deadline)) return absl::DeadlineExceededError("no news");
      }
    }
  }
  absl::Status Finish(int member, const absl::StatusOr<int64_t>& ticket) {
    if (!ticket.ok()) return ticket.status();
    return WaitFor([&] { return members_[member]->Done(*ticket); });
  }

  Mutex mutex_;
  CondVar changed_;
  int64_t news_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<PeerGroup>> members_;
};

TEST_F(GlooGroupTest, ReduceAddsUpAllMembersAtItsRoot) {
  Connect(3);
  constexpr int kRoot = 1;
  std::vector<std::vector<float>> in(3, std::vector<float>(1000));
  for (int m = 0; m < 3; ++m) std::iota(in[m].begin(), in[m].end(), static_cast<float>(1000 * m));
  std::vector<absl::StatusOr<int64_t>> tickets;
  for (int m = 0; m < 3; ++m) {
    const std::span<float> out = m == kRoot ? std::span<float>(in[m]) : std::span<float>();
    tickets.push_back(members_[m]->Reduce(7, in[m], out, kRoot));
  }
  for (int m = 0; m < 3; ++m) EXPECT_TRUE(Finish(m, tickets[m]).ok());
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(in[kRoot][i], static_cast<float>(3000 + 3 * i));
  EXPECT_EQ(in[0][5], 5.0F);  // inputs of others stay
}

TEST_F(GlooGroupTest, BroadcastBringsTheRootsBytesToAll) {
  Connect(3);
  std::vector<std::vector<std::byte>> data(3, std::vector<std::byte>(4096));
  std::fill(data[2].begin(), data[2].end(), std::byte{42});
  std::vector<absl::StatusOr<int64_t>> tickets;
  for (int m = 0; m < 3; ++m) tickets.push_back(members_[m]->Broadcast(9, data[m], 2));
  for (int m = 0; m < 3; ++m) {
    EXPECT_TRUE(Finish(m, tickets[m]).ok());
    EXPECT_EQ(data[m], data[2]);
  }
}

TEST_F(GlooGroupTest, AbortEndsWhatIsUnderWayHereAndAtThePeers) {
  Connect(2);
  std::vector<std::byte> here(64);
  std::vector<std::byte> there(64);
  const PeerGroup::Message receive_here{false, 1, here.data(), here.size()};
  const PeerGroup::Message receive_there{false, 0, there.data(), there.size()};
  const auto waits_here = members_[0]->Start(1, {&receive_here, 1});
  const auto waits_there = members_[1]->Start(2, {&receive_there, 1});
  members_[0]->Abort();
  EXPECT_TRUE(absl::IsAborted(Finish(0, waits_here)));
  EXPECT_TRUE(absl::IsAborted(Finish(1, waits_there)));
  EXPECT_TRUE(absl::IsAborted(members_[0]->Start(3, {&receive_here, 1}).status()));
  EXPECT_TRUE(absl::IsAborted(members_[0]->Broadcast(4, here, 0).status()));
}

TEST_F(GlooGroupTest, WhatCannotBeIsRefusedByName) {
  Connect(2);
  std::vector<float> values(4);
  EXPECT_TRUE(absl::IsInvalidArgument(members_[0]->Reduce(1, values, values, 2).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(members_[0]->Reduce(1, values, {}, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(members_[0]->Broadcast(1, {}, -1).status()));
}

}  // namespace
}  // namespace dmuond::server::lane
