// A daemon that is slow at something for longer than silence counts as death: its group stays, and
// everything goes on afterwards.
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/version.h"
#include "tests/client/daemon_group.h"
#include "tests/client/trainers.h"
#include "tests/server/ctl/ctl_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/disk_driver.h"
#include "tests/server/system/one_matrix.h"
#include "tests/server/system/raw_trainer.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kPatience{60};
constexpr std::chrono::seconds kLooked{2};  // an answer about a core that is held: after one

// Holds a daemon at a point that it comes to.
class Holder {
 public:
  explicit Holder(const std::string& point)
      : driver_(
            scratch_.path() + "/points",
            [this](pid_t pid, const std::string& /*point*/) {
              return victim_.load() == pid ? "hold" : "go";
            },
            point) {}
  // From its next passing on.
  void Hold(const DaemonProcess& daemon) { victim_.store(daemon.pid()); }
  [[nodiscard]] bool WaitHeld() { return driver_.WaitHeld(); }
  void Release() {
    victim_.store(0);
    driver_.Release();
  }

 private:
  const ScratchDirectory scratch_;
  std::atomic<pid_t> victim_{0};
  DiskDriver driver_;
};

// Whether it stops calling itself live.
bool StopsBeingLive(const DaemonProcess& daemon) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (daemon.WaitServing("live", std::chrono::seconds(2)).ok()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // between two looks
  }
  return true;
}

void ExpectFirstEpoch(const DaemonGroup& group) {
  for (const auto& daemon : group) {
    EXPECT_EQ(DaemonStatus(daemon->address()).Get().epoch(), 1) << daemon->Log();
  }
}

class HeldCoreTest : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(NodeThatIsHeld, HeldCoreTest, ::testing::Values(0, 1));

// Silence counts as death after 5 s, and a core is live for 10 s after it has turned. An attempt is
// opened under the core's lock.
TEST_P(HeldCoreTest, TheGroupStaysAndOnlyLiveFailsThere) {
  Holder holder("daemon.open");
  auto group = StartGroup(2, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  const DaemonProcess& held = *(*group)[GetParam()];
  const DaemonProcess& other = *(*group)[1 - GetParam()];
  World world(
      other.address(), 1, [](int32_t /*rank*/) { return OneMatrix(1); }, FillOneMatrix);
  ASSERT_TRUE(world.complete());

  holder.Hold(held);
  const client::StepScalars scalars{.groups = {{.learning_rate = 0.1}}};
  std::vector<absl::StatusOr<client::Outcome>> first;
  std::thread trainer([&] { first = world.Step(scalars); });  // the next attempt is opened with it
  EXPECT_TRUE(holder.WaitHeld());
  EXPECT_TRUE(StopsBeingLive(held)) << held.Log();
  EXPECT_TRUE(other.WaitServing("live", std::chrono::seconds(2)).ok()) << other.Log();
  holder.Release();
  trainer.join();

  ASSERT_TRUE(first.at(0).ok()) << first[0].status();
  const auto second = world.Step(scalars);
  ASSERT_TRUE(second.at(0).ok()) << second[0].status();
  EXPECT_EQ(second[0]->step, 2);
  const absl::Status live = held.WaitServing("live", kPatience);
  EXPECT_TRUE(live.ok()) << live;
  ExpectFirstEpoch(*group);
  world.Close();
}

// Gigabytes of memory take seconds to make. Who is awaited is told after 5 s, as long as silence
// may be.
TEST_P(HeldCoreTest, TheGroupStaysWhileAJobsMemoryIsBeingMade) {
  Holder holder("memory.allocate");
  auto group = StartGroup(2, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  const std::string& address = (*group)[1 - GetParam()]->address();
  holder.Hold(*(*group)[GetParam()]);
  std::thread trainer([&] {
    World world(
        address, 1, [](int32_t /*rank*/) { return OneMatrix(1); }, FillOneMatrix);
    ASSERT_TRUE(world.complete());
    const auto step = world.Step({.groups = {{.learning_rate = 0.1}}});
    EXPECT_TRUE(step.at(0).ok()) << step[0].status();
    world.Close();
  });
  EXPECT_TRUE(holder.WaitHeld());
  EXPECT_TRUE(DaemonStatus(address).WaitFor([&](const v1::GetStatusReply& status) {
    return std::ranges::any_of(status.job().awaited(), [&](const v1::Awaited& awaited) {
      return absl::StrContains(awaited.what(), absl::StrCat("node ", GetParam()));
    });
  })) << DaemonStatus(address).Get().DebugString();
  holder.Release();
  trainer.join();
  ExpectFirstEpoch(*group);
}

// A step is decided and the next attempt is opened under the core's lock, in one turn.
TEST(HeldCoreAloneTest, WhatWasSeenLastIsShownAndHowOldItIs) {
  Holder holder("daemon.open");
  auto group = StartGroup(1, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  const DaemonProcess& held = *group->front();
  World world(
      held.address(), 1, [](int32_t /*rank*/) { return OneMatrix(1); }, FillOneMatrix);
  ASSERT_TRUE(world.complete());
  const client::StepScalars scalars{.groups = {{.learning_rate = 0.1}}};
  ASSERT_TRUE(world.Step(scalars).at(0).ok());
  DaemonStatus daemon(held.address());
  const v1::GetStatusReply before = daemon.Get();
  EXPECT_EQ(before.picture_age_ms(), 0);
  EXPECT_EQ(before.job().last_committed_step(), 1);
  EXPECT_EQ(daemon.Plan().picture_age_ms(), 0);

  holder.Hold(held);
  std::thread trainer([&] { EXPECT_TRUE(world.Step(scalars).at(0).ok()); });
  EXPECT_TRUE(holder.WaitHeld());
  const auto ctl = [&](std::vector<std::string> words) {
    words.push_back("--address=" + held.address());
    return std::async(std::launch::async, RunCtl, words);
  };
  // An order waits for the core, and holds up nobody who looks.
  std::future<CtlResult> order = ctl({"log-level", "debug", "--timeout=60s"});
  int64_t age_ms = 0;
  for (int looks = 0; looks < 2; ++looks) {
    const auto asked = std::chrono::steady_clock::now();
    const v1::GetStatusReply status = daemon.Get();
    EXPECT_LT(std::chrono::steady_clock::now() - asked, kLooked) << held.Log();
    EXPECT_GT(status.picture_age_ms(), age_ms);
    age_ms = status.picture_age_ms();
    EXPECT_EQ(status.job().last_committed_step(), 1);
    EXPECT_EQ(status.job().matrices(), before.job().matrices());
    EXPECT_EQ(status.lanes_size(), 1);
  }
  const v1::GetPlanReply plan = daemon.Plan();
  EXPECT_GT(plan.picture_age_ms(), age_ms);
  EXPECT_EQ(plan.lanes_size(), 1);
  const v1::GetRoutingReply routing = daemon.Routing();
  EXPECT_GT(routing.picture_age_ms(), plan.picture_age_ms());
  EXPECT_EQ(routing.rows_size(), 1);
  std::vector<std::future<CtlResult>> questions;
  for (const char* question : {"status", "jobs", "plan", "routing"}) {
    questions.push_back(ctl({question}));
  }
  for (std::future<CtlResult>& answer : questions) {
    EXPECT_THAT(answer.get().output,
                ContainsRegex("this picture is [0-9]+s old: the daemon's core"));
  }
  const CtlResult doctor = ctl({"doctor"}).get();
  EXPECT_EQ(doctor.code, 1);
  EXPECT_THAT(doctor.output, ContainsRegex("fail +daemon .*core has not turned for [0-9]+s"));
  EXPECT_EQ(order.wait_for(std::chrono::seconds(0)), std::future_status::timeout);

  holder.Release();
  trainer.join();
  const v1::GetStatusReply after = daemon.Get();
  EXPECT_EQ(after.picture_age_ms(), 0);
  EXPECT_EQ(after.job().last_committed_step(), 2);
  EXPECT_EQ(order.get().code, 0);
  EXPECT_THAT(ctl({"status"}).get().output, Not(HasSubstr("this picture")));
  world.Close();
}

// The thread that reads the trainers' connections begins their steps, under the lock. Here it waits
// for the lock.
TEST(HeldCoreAloneTest, ConnectionsAreReadAllTheSame) {
  Holder holder("daemon.open");
  auto group = StartGroup(1, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  const DaemonProcess& held = *group->front();
  World world(
      held.address(), 1, [](int32_t /*rank*/) { return OneMatrix(1); }, FillOneMatrix);
  ASSERT_TRUE(world.complete());

  holder.Hold(held);
  std::thread trainer([&] {
    const auto step = world.Step({.groups = {{.learning_rate = 0.1}}});
    EXPECT_TRUE(step.at(0).ok()) << step[0].status();
  });
  EXPECT_TRUE(holder.WaitHeld());
  RawTrainer other(held.address());
  std::thread waits_for_the_lock([&] {
    const v1::WaitStepRequest of_no_session;
    v1::WaitStepReply reply;
    EXPECT_EQ(other.Call(&RawTrainer::Stub::WaitStep, of_no_session, &reply).code(),
              absl::StatusCode::kFailedPrecondition);
  });
  v1::HelloRequest hello;
  hello.set_version_min(server::kProtocolVersion);
  hello.set_version_max(server::kProtocolVersion);
  for (int i = 0; i < 3; ++i) {
    v1::HelloReply reply;
    const absl::Status status = other.Call(&RawTrainer::Stub::Hello, hello, &reply);
    EXPECT_TRUE(status.ok()) << status;
  }
  holder.Release();
  waits_for_the_lock.join();
  trainer.join();
  world.Close();
}

}  // namespace
}  // namespace dmuond::testing
