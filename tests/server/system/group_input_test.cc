// Daemons that do not belong together, and trainers that the group refuses: rows of the table "what
// bad input gets" (layout_input_test.cc says where the others are).
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"
#include "server/version.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainers.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/fake_member.h"
#include "tests/server/system/one_matrix.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using client::Session;
using ::testing::HasSubstr;

client::StepScalars Scalars() { return {.groups = {{.learning_rate = 0.1}}}; }

class CoordinatorInputTest : public DaemonTest {
 protected:
  void SetUp() override {
    coordinator_ = FreeAddress();
    StartDaemon({.flags = GroupFlags(0, 2, coordinator_), .wait_for = "live"});
  }
  std::string coordinator_;
};

TEST_F(CoordinatorInputTest, DaemonsThatDifferMayNotJoinAndBothValuesAreNamed) {
  const auto expect = [&](const std::function<void(v1::JoinRequest&)>& change,
                          const Refusal& refusal) {
    FakeMember member(coordinator_);
    v1::JoinRequest join = FakeMember::RightJoin();
    change(join);
    member.Join(join);
    ExpectRefused(member.Finish(), refusal);
  };
  const auto code = StatusCode::kFailedPrecondition;
  expect(
      [](auto& join) {
        join.set_version("0.0.7");
        join.set_protocol_min(0);
        join.set_protocol_max(0);
      },
      {code,
       "VERSION_MISMATCH",
       {"0.0.7", server::kBuildVersion, "node 1", "protocols 0 to 0",
        absl::StrCat("speaks ", server::kPeerProtocolMin, " to ", server::kPeerProtocolMax)}});
  const v1::LaneBits right = FakeMember::RightBits();
  expect([](auto& join) { join.mutable_bits()->set_code("other code"); },
         {code, "BITS_DIFFER", {"other code", right.code(), "node 1"}});
  expect([](auto& join) { join.mutable_bits()->set_core_type("Prescott"); },
         {code, "BITS_DIFFER", {"Prescott", right.core_type(), "node 1"}});
  expect([](auto& join) { join.mutable_bits()->set_library("OpenBLAS 0.2"); },
         {code, "BITS_DIFFER", {"OpenBLAS 0.2", right.library(), "node 1"}});
  expect([](auto& join) { join.clear_bits(); }, {code, "BITS_DIFFER", {right.code(), "node 1"}});
  expect([](auto& join) { join.set_nodes(3); }, {code, "GROUP_SIZE_DIFFERS", {"3", "2", "node 1"}});
  expect([](auto& join) { join.set_lanes(8); }, {code, "LANES_DIFFER", {"8", "1", "node 1"}});
  expect([](auto& join) { join.set_device_type("cuda"); },
         {code, "DEVICE_TYPE_DIFFERS", {"cuda", "cpu", "node 1"}});
  expect([](auto& join) { join.set_lane_memory_bytes(77); },
         {code, "LANE_MEMORY_DIFFERS", {"77", "0", "node 1"}});
  expect([](auto& join) { join.set_node(0); },
         {StatusCode::kAlreadyExists, "RANK_TWICE", {"node 0"}});
  expect([](auto& join) { join.set_node(5); },
         {StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE", {"node 5", "0 to 1"}});
  FakeMember silent(coordinator_);
  silent.Send(v1::MemberMessage());
  ExpectRefused(silent.Finish(), {StatusCode::kInvalidArgument, "JOIN_INVALID", {}});
  // The right one may, of another build too.
  FakeMember member(coordinator_);
  v1::JoinRequest other_build = FakeMember::RightJoin();
  other_build.set_version("0.0.7");
  other_build.set_protocol_max(server::kPeerProtocolMax + 1);
  member.Join(other_build);
  const auto formed = member.Next();
  ASSERT_TRUE(formed.has_value());
  EXPECT_TRUE(formed->has_join());
}

TEST(JoinTest, AProcessThatJoinsAgainIsAMemberWhenItsOldStreamEnds) {
  const std::string address = FreeAddress();
  auto coordinator = DaemonProcess::Start({.flags = GroupFlags(0, 3, address), .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  v1::JoinRequest join = FakeMember::RightJoin();
  join.set_nodes(3);
  FakeMember old_stream(address);
  old_stream.Join(join);
  ASSERT_TRUE(old_stream.IsTaken());
  FakeMember new_stream(address);
  new_stream.Join(join);
  EXPECT_EQ(old_stream.Finish().code(), StatusCode::kCancelled);
  ASSERT_TRUE(new_stream.IsTaken());
  join.set_node(2);
  join.set_boot_id(43);
  FakeMember last(address);
  last.Join(join);
  const auto formed = new_stream.Next();
  ASSERT_TRUE(formed.has_value()) << (*coordinator)->Log();
  EXPECT_TRUE(formed->has_join());
}

// OpenBLAS computes the same product with other bits on another type of core.
TEST(CoreTypeTest, DaemonsWhoseLanesRunOtherKernelsFormNoGroupAndBothAreNamed) {
  const std::string address = FreeAddress();
  const char* set = std::getenv("OPENBLAS_CORETYPE");
  const std::string before = set == nullptr ? "" : set;
  std::vector<std::unique_ptr<DaemonProcess>> group;
  for (const char* core_type : {"Nehalem", "Sandybridge"}) {
    ::setenv("OPENBLAS_CORETYPE", core_type, 1);
    const auto node = static_cast<int>(group.size());
    auto daemon = DaemonProcess::Start({.flags = GroupFlags(node, 2, address), .wait_for = "live"});
    if (daemon.ok()) group.push_back(*std::move(daemon));
  }
  before.empty() ? ::unsetenv("OPENBLAS_CORETYPE")
                 : ::setenv("OPENBLAS_CORETYPE", before.c_str(), 1);
  ASSERT_EQ(group.size(), 2);
  ASSERT_TRUE(group[1]->WaitLogged("the coordinator refuses this daemon")) << group[1]->Log();
  EXPECT_THAT(group[1]->Log(),
              AllOf(HasSubstr("has core type Sandybridge, "), HasSubstr("has Nehalem")));
}

// A member that does not answer holds a thread of the coordinator's for a while, and no more than
// one, and it must be a node of the group.
TEST_F(CoordinatorInputTest, OneMemberOfEachNodeAtATimeShowsTheDirectory) {
  const ScratchDirectory scratch;
  const std::string coordinator = FreeAddress();
  std::vector<std::string> flags = GroupFlags(0, 2, coordinator);
  flags.push_back("--snapshot_dir=" + scratch.path());
  auto daemon = DaemonProcess::Start({.flags = flags, .wait_for = "live"});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  v1::JoinRequest join = FakeMember::RightJoin();
  join.set_snapshots(true);
  FakeMember first(coordinator);
  first.Join(join);
  const auto question = first.Next();
  ASSERT_TRUE(question.has_value() && question->has_directory_proof());

  FakeMember second(coordinator);
  join.set_boot_id(43);
  second.Join(join);
  const absl::Status busy = second.Finish();
  EXPECT_EQ(busy.code(), StatusCode::kUnavailable) << busy;
  EXPECT_THAT(std::string(busy.message()), HasSubstr("node 1"));
  FakeMember stranger(coordinator);
  join.set_node(std::numeric_limits<int32_t>::max());
  stranger.Join(join);
  ExpectRefused(stranger.Finish(), {StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE", {"0 to 1"}});

  EXPECT_EQ(first.Finish().code(), StatusCode::kCancelled) << "it has said nothing";
  join.set_node(1);
  std::optional<v1::CoordinatorMessage> again;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!again.has_value() && std::chrono::steady_clock::now() < deadline) {
    FakeMember successor(coordinator);  // refused while the first one's thread is on its way out
    successor.Join(join);
    again = successor.Next();
  }
  ASSERT_TRUE(again.has_value());
  EXPECT_TRUE(again->has_directory_proof());
}

TEST_F(CoordinatorInputTest, ANodeWithAnotherPlanIsNamedToTheTrainers) {
  FakeMember member(coordinator_);
  member.Join(FakeMember::RightJoin());
  ASSERT_TRUE(member.Next().has_value());
  v1::MemberMessage state;
  state.mutable_member_state()->set_epoch(1);
  member.Send(state);
  std::thread node([&] {
    while (const auto message = member.Next()) {
      if (!message->has_plan()) continue;
      v1::MemberMessage ready;
      ready.mutable_plan_ready()->set_node(1);
      ready.mutable_plan_ready()->set_digest(12345);
      // What is of another epoch changes nothing, and that is said.
      for (const uint32_t epoch : {2, 1}) {
        ready.mutable_plan_ready()->set_epoch(epoch);
        member.Send(ready);
      }
      return;
    }
  });
  {
    auto session = Session::Open({.address = daemon_->address()});
    ASSERT_TRUE(session.ok()) << session.status();
    absl::Status status = (*session)->Register(OneMatrix(1)).status();
    // The trainer may have its plan before the other node has spoken.
    if (status.ok()) status = (*session)->Attach();
    ExpectRefused(status, {StatusCode::kInternal, "PLAN_DIFFERS", {"node 1", "12345"}});
    EXPECT_TRUE(daemon_->WaitLogged("message=plan_ready from_node=1 reason=newer_epoch said=2"));
  }
  node.join();
}

TEST_F(CoordinatorInputTest, ARealDaemonWithOtherLanesIsRefusedAndSaysWhy) {
  auto other = DaemonProcess::Start(
      {.devices = "cpu:2", .flags = GroupFlags(1, 2, coordinator_), .wait_for = "live"});
  ASSERT_TRUE(other.ok()) << other.status();
  // It goes on trying; its log says what is wrong.
  ASSERT_TRUE((*other)->WaitLogged("number of lanes")) << (*other)->Log();
  EXPECT_THAT((*other)->Log(), HasSubstr("refuses this daemon"));
  EXPECT_FALSE((*other)->WaitServing("ready", std::chrono::milliseconds(10)).ok());
  EXPECT_EQ((*other)->Stop(), 0);
}

class GroupInputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto group = StartGroup(2, "cpu:1");
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }
  void TearDown() override {
    for (const auto& daemon : group_) {
      if (HasFailure()) std::cerr << daemon->Log() << "\n";
    }
  }
  absl::StatusOr<std::unique_ptr<Session>> Open(int node, int32_t rank, int32_t world,
                                                const std::string& job = "default") {
    return Session::Open({.address = group_[node]->address(),
                          .job = job,
                          .rank = rank,
                          .world_size = world,
                          .resume = client::Resume::kIfPresent});
  }
  DaemonGroup group_;
};

// What one node opens and the other has already: refused alone, and the job goes on.
TEST_F(GroupInputTest, SessionsThatTheOtherNodeKnowsBetterAreRefusedAndTheJobGoesOn) {
  constexpr int32_t kWorld = 2;
  std::unique_ptr<Session> sessions[kWorld];
  OnEveryRank(kWorld, [&](int32_t rank) {
    auto session = Open(rank, rank, kWorld);
    ASSERT_TRUE(session.ok()) << session.status();
    ASSERT_TRUE((*session)->Register(OneMatrix(kWorld)).ok());
    ASSERT_TRUE((*session)->Attach().ok());
    FillOneMatrix(**session);
    ASSERT_TRUE((*session)->Push().ok());
    sessions[rank] = *std::move(session);
  });
  ASSERT_TRUE(sessions[0] != nullptr && sessions[1] != nullptr);
  const auto step = [&] {
    OnEveryRank(kWorld, [&](int32_t rank) {
      const auto outcome = sessions[rank]->Step(Scalars());
      EXPECT_TRUE(outcome.ok()) << outcome.status();
    });
  };
  step();
  // Rank 0 lives on node 0, rank 1 on node 1.
  for (const auto& [node, rank] : {std::pair(1, 0), std::pair(0, 1)}) {
    auto twice = Open(node, rank, kWorld);
    absl::Status status = twice.status();
    if (status.ok()) status = (*twice)->Register(OneMatrix(kWorld)).status();
    EXPECT_FALSE(status.ok());
    twice = absl::UnknownError("");
    step();
  }
  OnEveryRank(kWorld, [&](int32_t rank) { EXPECT_TRUE(sessions[rank]->Close().ok()); });
}

TEST_F(GroupInputTest, ARankTwiceBeforeThePlanIsRefusedToTheLaterOne) {
  auto first = Open(0, 0, 2);
  ASSERT_TRUE(first.ok()) << first.status();
  {
    auto twice = Open(1, 0, 2);
    absl::Status status = twice.status();
    if (status.ok()) status = (*twice)->Register(OneMatrix(2)).status();
    ExpectRefused(status, {StatusCode::kFailedPrecondition, "RANK_TWICE", {"rank 0", "default"}});
  }
  {
    auto other = Open(1, 1, 2, "other");
    absl::Status status = other.status();
    if (status.ok()) status = (*other)->Register(OneMatrix(2)).status();
    ExpectRefused(status, {StatusCode::kFailedPrecondition, "OTHER_JOB", {"'default'", "'other'"}});
  }
  {
    auto larger = Open(1, 1, 3);
    absl::Status status = larger.status();
    if (status.ok()) status = (*larger)->Register(OneMatrix(3)).status();
    ExpectRefused(status, {StatusCode::kFailedPrecondition, "WORLD_DIFFERS", {"2", "rank 1", "3"}});
  }
  auto second = Open(1, 1, 2);
  ASSERT_TRUE(second.ok()) << second.status();
  std::thread other([&] { EXPECT_TRUE((*first)->Register(OneMatrix(2)).ok()); });
  const auto registered = (*second)->Register(OneMatrix(2));
  EXPECT_TRUE(registered.ok()) << registered.status();
  other.join();
}

TEST_F(GroupInputTest, ANodeWithoutTrainersTakesPart) {
  auto session = Open(1, 0, 1);  // with node 1; node 0 owns the matrix
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->Register(OneMatrix(1)).ok());
  ASSERT_TRUE((*session)->Attach().ok());
  ASSERT_TRUE((*session)->Push().ok());
  const auto outcome = (*session)->Step({.groups = {{.learning_rate = 0.1}}});
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->kind, client::Outcome::Kind::kCommitted);
}

// Names of the greatest length: over 4 MiB of inputs to the plan, which is what gRPC takes from
// anybody, with little to plan.
client::Layout LongNames(int32_t world, int parameters, const std::string& prefix = "p") {
  client::LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  for (int i = 0; i < parameters; ++i) {
    std::string name = absl::StrCat(prefix, i, ".");
    name.resize(1000, 'x');
    builder.Add({.name = name,
                 .shape = {4},
                 .route = client::Route::kAdamW,
                 .contribution = client::Contribution::kSame,
                 .reduce_factor = 1});
  }
  return *builder.Build();
}

TEST_F(GroupInputTest, APlanOfManyMebibytesOfInputsIsMadeAndTrains) {
  constexpr int32_t kWorld = 2;
  OnEveryRank(kWorld, [&](int32_t rank) {
    auto session = Open(rank, rank, kWorld);
    ASSERT_TRUE(session.ok()) << session.status();
    const auto registered = (*session)->Register(LongNames(kWorld, 2300));
    ASSERT_TRUE(registered.ok()) << registered.status();
    ASSERT_TRUE((*session)->Attach().ok());
    ASSERT_TRUE((*session)->Push().ok());
    const auto outcome =
        (*session)->Step({.groups = {{.learning_rate = 0.1, .momentum = 0.95, .beta2 = 0.999}}});
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, client::Outcome::Kind::kCommitted);
    EXPECT_TRUE((*session)->Close().ok());
  });
}

TEST(PlanBytesTest, ALayoutBeyondWhatDaemonsTakeFromEachOtherIsRefusedWithBothValues) {
  auto group = StartGroup(2, "cpu:1", {"--threads=1", "--peer_message_bytes_max=1048576"});
  ASSERT_TRUE(group.ok()) << group.status();
  OnEveryRank(2, [&](int32_t rank) {
    auto session =
        Session::Open({.address = (*group)[rank]->address(), .rank = rank, .world_size = 2});
    ASSERT_TRUE(session.ok()) << session.status();
    // One rank's fits, both together do not: stages of a model, which have no parameter in common.
    const std::string stage = absl::StrCat("stage", rank, ".");
    ExpectRefused((*session)->Register(LongNames(2, 700, stage)).status(),
                  {StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE", {"at most 1048576"}});
    ExpectRefused((*session)->Register(LongNames(2, 1100, stage)).status(),
                  {StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE", {"rank", "1048576"}});
  });
}

}  // namespace
}  // namespace dmuond::testing
