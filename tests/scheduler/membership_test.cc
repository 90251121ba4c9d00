#include "scheduler/membership.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

MemberInfo Info(int32_t node, int32_t nodes) {
  MemberInfo info;
  info.node = NodeRank(node);
  info.nodes = nodes;
  info.lanes = 2;
  info.version = "1.0";
  info.protocol_min = 2;
  info.protocol_max = 3;
  info.bits = {
      .code = "abc", .library = "OpenBLAS 0.3.21", .core_type = "Zen", .functions = "pow, log2 0"};
  info.device_type = "cpu";
  info.peer_address = "host" + std::to_string(node) + ":7400";
  info.boot_id = 100 + node;
  info.lane_memory_bytes = 1 << 20;
  return info;
}

// A group of three whose nodes 1 and 2 may join.
class MembershipTest : public ::testing::Test {
 protected:
  std::vector<MembershipAction> Join(const MemberInfo& info) {
    auto actions = group_.OnJoin(now_, info);
    EXPECT_TRUE(actions.ok()) << actions.status();
    return actions.ok() ? *actions : std::vector<MembershipAction>{};
  }
  void Form() {
    (void)Join(Info(1, 3));
    (void)Join(Info(2, 3));
    ASSERT_TRUE(group_.formed());
  }
  template <typename Action>
  static std::optional<Action> Find(const std::vector<MembershipAction>& actions) {
    for (const MembershipAction& action : actions) {
      if (const auto* found = std::get_if<Action>(&action)) return *found;
    }
    return std::nullopt;
  }
  void ExpectRefused(const MemberInfo& info, absl::StatusCode code, const std::string& reason,
                     const ::testing::Matcher<const std::string&>& message) {
    const auto actions = group_.OnJoin(now_, info);
    ASSERT_FALSE(actions.ok());
    EXPECT_EQ(actions.status().code(), code);
    EXPECT_EQ(ReasonOf(actions.status()), reason);
    EXPECT_THAT(std::string(actions.status().message()), message);
    EXPECT_THAT(group_.missing(), ElementsAre(NodeRank(1), NodeRank(2)));  // nothing changed
  }

  TimePoint now_;
  MembershipMachine group_{3, Info(0, 3)};
};

TEST_F(MembershipTest, AGroupOfOneIsFormedFromTheStart) {
  MemberInfo self = Info(0, 1);
  self.epoch = GroupEpoch(4);
  const MembershipMachine alone(1, self);
  EXPECT_TRUE(alone.formed());
  EXPECT_EQ(alone.epoch(), GroupEpoch(5));
  EXPECT_THAT(alone.group().peer_addresses, ElementsAre("host0:7400"));
}

TEST_F(MembershipTest, FormsOnlyWhenAllHaveJoinedWithAnEpochAboveAllReported) {
  MemberInfo first = Info(2, 3);
  first.epoch = GroupEpoch(7);
  EXPECT_THAT(Join(first), IsEmpty());
  EXPECT_FALSE(group_.formed());
  EXPECT_THAT(group_.missing(), ElementsAre(NodeRank(1)));
  const auto actions = Join(Info(1, 3));
  const auto formed = Find<GroupFormed>(actions);
  ASSERT_TRUE(formed.has_value());
  EXPECT_EQ(formed->epoch, GroupEpoch(8));
  EXPECT_THAT(formed->peer_addresses, ElementsAre("host0:7400", "host1:7400", "host2:7400"));
}

TEST_F(MembershipTest, MembersThatDoNotFitAreRefusedNamingBothAndChangeNothing) {
  using Code = absl::StatusCode;
  MemberInfo info = Info(1, 4);
  ExpectRefused(info, Code::kFailedPrecondition, "GROUP_SIZE_DIFFERS",
                AllOf(HasSubstr("node 1 (host1:7400) has group size 4"),
                      HasSubstr("node 0 (host0:7400) has 3")));
  info = Info(1, 3);
  info.version = "1.1";
  info.protocol_min = 4;
  info.protocol_max = 5;
  ExpectRefused(info, Code::kFailedPrecondition, "VERSION_MISMATCH",
                AllOf(HasSubstr("node 1 (host1:7400), dmuond 1.1, speaks protocols 4 to 5"),
                      HasSubstr("node 0 (host0:7400), dmuond 1.0, speaks 2 to 3")));
  info.protocol_min = info.protocol_max = 1;
  ExpectRefused(info, Code::kFailedPrecondition, "VERSION_MISMATCH", HasSubstr("1 to 1"));
  info = Info(1, 3);
  info.bits.code = "def";
  ExpectRefused(info, Code::kFailedPrecondition, "BITS_DIFFER",
                AllOf(HasSubstr("node 1 (host1:7400) has hash of lane and kernels def"),
                      HasSubstr("node 0 (host0:7400) has abc")));
  info = Info(1, 3);
  info.bits.library = "OpenBLAS 0.3.22";
  ExpectRefused(info, Code::kFailedPrecondition, "BITS_DIFFER",
                AllOf(HasSubstr("numeric library OpenBLAS 0.3.22"), HasSubstr("0.3.21")));
  info = Info(1, 3);
  info.bits.core_type = "Haswell";
  ExpectRefused(info, Code::kFailedPrecondition, "BITS_DIFFER",
                AllOf(HasSubstr("core type Haswell"), HasSubstr("has Zen")));
  info = Info(1, 3);
  info.bits.functions = "pow, log2 1";
  ExpectRefused(info, Code::kFailedPrecondition, "BITS_DIFFER",
                AllOf(HasSubstr("digest of the C library's functions pow, log2 1"),
                      HasSubstr("has pow, log2 0")));
  info = Info(1, 3);
  info.device_type = "cuda";
  ExpectRefused(info, Code::kFailedPrecondition, "DEVICE_TYPE_DIFFERS",
                AllOf(HasSubstr("device type cuda"), HasSubstr("has cpu")));
  info = Info(1, 3);
  info.lanes = 8;
  ExpectRefused(info, Code::kFailedPrecondition, "LANES_DIFFER",
                AllOf(HasSubstr("number of lanes 8"), HasSubstr("has 2")));
  info = Info(1, 3);
  info.lane_memory_bytes = 5;
  ExpectRefused(info, Code::kFailedPrecondition, "LANE_MEMORY_DIFFERS",
                AllOf(HasSubstr("in bytes 5"), HasSubstr("has 1048576")));
  info = Info(1, 3);
  info.jobs_max = 5;
  ExpectRefused(info, Code::kFailedPrecondition, "JOBS_MAX_DIFFERS",
                AllOf(HasSubstr("--jobs_max 5"), HasSubstr("has 1")));
  ExpectRefused(Info(3, 3), Code::kInvalidArgument, "RANK_OUT_OF_RANGE", HasSubstr("node 3"));
  ExpectRefused(Info(-1, 3), Code::kInvalidArgument, "RANK_OUT_OF_RANGE", HasSubstr("node -1"));
  info = Info(1, 3);
  info.epoch = GroupEpoch(std::numeric_limits<uint32_t>::max());
  ExpectRefused(info, Code::kFailedPrecondition, "EPOCH_EXHAUSTED",
                AllOf(HasSubstr("node 1 (host1:7400)"), HasSubstr("epoch 4294967295"),
                      HasSubstr("ends at 4294901759")));
  info = Info(0, 3);
  info.boot_id = 55;
  ExpectRefused(info, Code::kAlreadyExists, "RANK_TWICE",
                AllOf(HasSubstr("boot id 100"), HasSubstr("boot id 55")));
}

TEST_F(MembershipTest, ADeviceIsInOneMember) {
  MemberInfo first = Info(1, 3);
  first.devices = {"GPU-a", "GPU-b"};
  (void)Join(first);
  MemberInfo second = Info(2, 3);
  second.devices = {"GPU-c", "GPU-b"};
  const auto refused = group_.OnJoin(now_, second);
  EXPECT_EQ(ReasonOf(refused.status()), "DEVICE_TWICE");
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("node 2 (host2:7400)"), HasSubstr("node 1 (host1:7400)"),
                    HasSubstr("GPU-b")));
  second.devices = {"GPU-c"};
  (void)Join(second);
  EXPECT_TRUE(group_.formed());
}

TEST_F(MembershipTest, TheSuccessorOfAProcessHasItsDevices) {
  MemberInfo first = Info(1, 3);
  first.devices = {"GPU-a"};
  (void)Join(first);
  now_ += milliseconds(5'000);
  first.boot_id = 999;
  EXPECT_THAT(Join(first), IsEmpty());
  EXPECT_TRUE(Find<GroupFormed>(Join(Info(2, 3))).has_value());
}

TEST_F(MembershipTest, AnotherBuildThatComputesTheSameBitsAndSharesAProtocolMayJoin) {
  MemberInfo newer = Info(1, 3);
  newer.version = "2.0";
  newer.protocol_min = 3;
  newer.protocol_max = 7;
  MemberInfo older = Info(2, 3);
  older.version = "0.9";
  older.protocol_min = 1;
  older.protocol_max = 2;
  (void)Join(newer);
  const auto refused = group_.OnJoin(now_, older);
  EXPECT_EQ(ReasonOf(refused.status()), "VERSION_MISMATCH") << "it cannot speak with node 1";
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("(host1:7400), dmuond 2.0"));
  older.protocol_max = 3;
  (void)Join(older);
  EXPECT_TRUE(group_.formed());
}

TEST_F(MembershipTest, ASecondProcessCannotTakeTheNodeOfALivingOne) {
  (void)Join(Info(1, 3));
  MemberInfo second = Info(1, 3);
  second.boot_id = 999;
  now_ += milliseconds(4'999);
  const auto refused = group_.OnJoin(now_, second);
  EXPECT_EQ(ReasonOf(refused.status()), "RANK_TWICE");
  now_ += milliseconds(1);
  EXPECT_THAT(Join(second), IsEmpty());  // the first has been silent for 5 s
  EXPECT_TRUE(Find<GroupFormed>(Join(Info(2, 3))).has_value());
}

TEST_F(MembershipTest, ASecondProcessDoesNotDisturbAFormedGroup) {
  Form();
  MemberInfo second = Info(1, 3);
  second.boot_id = 999;
  EXPECT_EQ(ReasonOf(group_.OnJoin(now_, second).status()), "RANK_TWICE");
  EXPECT_TRUE(group_.formed());
}

TEST_F(MembershipTest, OneThatLeavesBeforeTheGroupIsCompleteIsOnlyDropped) {
  (void)Join(Info(1, 3));
  EXPECT_TRUE(Find<MemberDropped>(group_.OnGone(now_, NodeRank(1))).has_value());
  EXPECT_THAT(Join(Info(2, 3)), IsEmpty());
  EXPECT_TRUE(Find<GroupFormed>(Join(Info(1, 3))).has_value());
}

TEST_F(MembershipTest, TheEndOfAnOldProcessesStreamDoesNotDropItsSuccessor) {
  (void)Join(Info(1, 3));
  MemberInfo successor = Info(1, 3);
  successor.boot_id = 999;
  now_ += milliseconds(5'000);
  (void)Join(successor);
  EXPECT_THAT(group_.OnGone(now_, NodeRank(1), Info(1, 3).boot_id), IsEmpty());
  EXPECT_THAT(group_.missing(), ElementsAre(NodeRank(2)));
}

TEST_F(MembershipTest, BeatsEverySecond) {
  (void)Join(Info(1, 3));
  std::vector<uint64_t> counters;
  for (int tick = 0; tick < 35; ++tick) {
    group_.OnHeartbeat(now_, NodeRank(1));
    if (const auto beat = Find<SendHeartbeat>(group_.OnTick(now_))) {
      counters.push_back(beat->counter);
    }
    now_ += milliseconds(100);
  }
  EXPECT_THAT(counters, ElementsAre(1, 2, 3, 4));
}

TEST_F(MembershipTest, FiveSecondsOfSilenceBreakTheGroupOnce) {
  Form();
  for (int second = 0; second < 4; ++second) {
    now_ += milliseconds(1'000);
    group_.OnHeartbeat(now_, NodeRank(1));
    EXPECT_FALSE(Find<GroupBroken>(group_.OnTick(now_)).has_value());
  }
  now_ += milliseconds(1'000);
  const auto actions = group_.OnTick(now_);
  const auto broken = Find<GroupBroken>(actions);
  ASSERT_TRUE(broken.has_value());
  EXPECT_EQ(broken->lost, NodeRank(2));
  EXPECT_EQ(broken->epoch, GroupEpoch(1));
  EXPECT_THAT(broken->detail, HasSubstr("node 2 (host2:7400) for 5000 ms"));
  EXPECT_TRUE(group_.broken());
  EXPECT_THAT(group_.OnTick(now_ + milliseconds(9'000)), IsEmpty());
  EXPECT_THAT(group_.OnGone(now_, NodeRank(1)), IsEmpty());
}

TEST_F(MembershipTest, TheEndOfAStreamBreaksTheGroup) {
  Form();
  EXPECT_TRUE(Find<GroupBroken>(group_.OnGone(now_, NodeRank(1))).has_value());
  EXPECT_FALSE(group_.formed());
}

TEST_F(MembershipTest, AMemberThatJoinsAgainBreaksAFormedGroup) {
  Form();
  const auto actions = Join(Info(1, 3));
  const auto broken = Find<GroupBroken>(actions);
  ASSERT_TRUE(broken.has_value());
  EXPECT_THAT(broken->detail, HasSubstr("joined again"));
}

TEST_F(MembershipTest, ABrokenGroupRefusesUntilItStartsOverWithALargerEpoch) {
  Form();
  (void)group_.OnGone(now_, NodeRank(2));
  const auto refused = group_.OnJoin(now_, Info(2, 3));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(refused.status()), "PEER_LOST");
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("node 2"));
  group_.StartOver();
  EXPECT_THAT(group_.missing(), ElementsAre(NodeRank(1), NodeRank(2)));
  Form();
  EXPECT_EQ(group_.epoch(), GroupEpoch(2));
}

}  // namespace
}  // namespace dmuond::scheduler
