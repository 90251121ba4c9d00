// A daemon whose socket's directory is removed, as a logout and cleaners of /tmp do, and its
// successor at the same path.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "dmuond/client/session.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"

namespace dmuond::testing {
namespace {

namespace fs = std::filesystem;

constexpr char kLost[] = "cannot reach this daemon any more";

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class LostSocketTest : public DaemonTest {
 protected:
  void SetUp() override { StartDaemon({}); }

  void Remove(const std::string& suffix) { ASSERT_TRUE(fs::remove(daemon_->address() + suffix)); }
  // Another daemon at the path of the first, ready when this returns.
  void StartSuccessor() {
    const std::string log = daemon_->address() + ".successor-log";
    auto successor =
        ChildProcess::Start("dmuond", {"--devices=cpu:1", "--socket=" + daemon_->address()}, log);
    ASSERT_TRUE(successor.ok()) << successor.status();
    successor_ = *std::move(successor);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!absl::StrContains(TextOf(log), "serving")) {
      ASSERT_EQ(successor_->Wait(std::chrono::milliseconds(5)), -1) << TextOf(log);
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << TextOf(log);
    }
  }
  void ExpectSuccessorServes() {
    for (const char* suffix : {"", ".admin", ".attach", ".lock"}) {
      EXPECT_TRUE(fs::exists(daemon_->address() + suffix)) << suffix;
    }
    const auto session = client::Session::Open({.address = daemon_->address()});
    EXPECT_TRUE(session.ok()) << session.status();
  }

  std::unique_ptr<ChildProcess> successor_;
};

TEST_F(LostSocketTest, ADaemonSaysOnceThatItsDirectoryIsLostAndLeavesItsSuccessorsSocketsAlone) {
  for (const char* suffix : {"", ".admin", ".attach", ".lock"}) Remove(suffix);
  EXPECT_TRUE(daemon_->WaitLogged(kLost));
  StartSuccessor();
  EXPECT_EQ(daemon_->Stop(), 0);
  const std::string log = daemon_->Log();
  EXPECT_EQ(log.find(kLost), log.rfind(kLost)) << "it is said once";
  ExpectSuccessorServes();
}

TEST_F(LostSocketTest, ADaemonWhoseLockAloneIsLostLeavesItsSuccessorsSocketsAlone) {
  Remove(".lock");
  EXPECT_TRUE(daemon_->WaitLogged(kLost));
  StartSuccessor();
  EXPECT_EQ(daemon_->Stop(), 0);
  ExpectSuccessorServes();
}

}  // namespace
}  // namespace dmuond::testing
