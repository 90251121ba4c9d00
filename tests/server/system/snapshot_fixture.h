// What the tests of snapshots with whole daemons share: a group, a scratch directory, and what the
// undisturbed run has after each step.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_FIXTURE_H_
#define DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_FIXTURE_H_

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {

// `steps`: of the undisturbed run.
template <int64_t steps>
class SnapshotFixture : public ::testing::Test {
 protected:
  static constexpr int64_t kSteps = steps;

  static void SetUpTestSuite() {
    auto daemon = DaemonProcess::Start({.flags = {"--threads=1"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    undisturbed_ = SnapshotWorld::Undisturbed((*daemon)->address(), kSteps);
    ASSERT_EQ(undisturbed_.size(), kSteps + 1);
  }
  void TearDown() override {
    if (!HasFailure()) return;
    for (const auto& daemon : group_) std::cerr << daemon->Log() << "----\n";
  }

  // Trainers on every node of the group.
  std::unique_ptr<SnapshotWorld> MakeWorld(const SnapshotWorld::Options& options = {}) {
    std::vector<std::string> addresses;
    addresses.reserve(group_.size());
    for (const auto& daemon : group_) addresses.push_back(daemon->address());
    return std::make_unique<SnapshotWorld>(addresses, options);
  }
  static bool WaitDurable(const DaemonProcess& daemon, int64_t step) {
    return DaemonStatus(daemon.address()).WaitFor([step](const v1::GetStatusReply& reply) {
      return reply.job().has_durable_step() && reply.job().durable_step() >= step;
    });
  }
  bool WaitDurable(int64_t step) { return WaitDurable(*group_[0], step); }
  // A file of the snapshot of a step, under the daemons' --snapshot_dir.
  static std::string FileOf(const std::string& snapshots, int64_t step, const std::string& name) {
    const std::string prefix = absl::StrFormat("step-%012d.", step);
    for (const auto& entry : std::filesystem::directory_iterator(snapshots + "/run7")) {
      if (entry.path().filename().string().starts_with(prefix)) return entry.path() / name;
    }
    ADD_FAILURE() << "no snapshot of step " << step;
    return "";
  }

  static inline std::vector<Values> undisturbed_;
  ScratchDirectory scratch_;
  DaemonGroup group_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_FIXTURE_H_
