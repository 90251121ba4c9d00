// dmuonctl run -- COMMAND: a daemon for the length of a command, and nothing left of it.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/client/example_runs.h"
#include "tests/server/ctl/ctl_process.h"

namespace dmuond::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(CtlRunTest, TheCommandFindsItsDaemonAndItsExitCodeCounts) {
  const CtlResult result =
      RunCtl({"run", "--devices=cpu:2", "--", "sh", "-c", CtlProgram() + " status --json; exit 7"});
  EXPECT_EQ(result.code, 7) << result.errors;
  const nlohmann::json status = result.json();
  EXPECT_EQ(status["group_state"], "alone");
  const std::string socket = status["socket"];
  EXPECT_THAT(socket, HasSubstr("dmuond-run-"));
  EXPECT_FALSE(fs::exists(fs::path(socket).parent_path())) << "its directory is left";
}

TEST(CtlRunTest, ATrainerTrainsInIt) {
  const std::string trainer =
      fs::read_symlink("/proc/self/exe").parent_path() / "dmuond-example-trainer";
  const CtlResult result = RunCtl({"run", "--", trainer, "--steps=3"});
  EXPECT_EQ(result.code, 0) << result.output << result.errors;
}

TEST(CtlRunTest, ItsDaemonTakesAConfigFile) {
  std::string directory = fs::temp_directory_path() / "dmuonctl-run-test-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  const std::string file = directory + "/dmuond.conf";
  std::ofstream(file) << "devices: 'cpu:3'\nsnapshot_dir: '" << directory << "/snapshots'\n";
  const CtlResult result = RunCtl({"run", "--config=" + file, "--", "true"});
  EXPECT_EQ(result.code, 0) << result.errors;
  EXPECT_TRUE(fs::exists(directory + "/snapshots"));
  const CtlResult wrong = RunCtl({"run", "--config=" + directory + "/none", "--", "true"});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.errors, HasSubstr(directory + "/none"));
  fs::remove_all(directory);
}

// Where both see one directory, as on one machine or in a home that nodes share.
TEST(CtlRunTest, DaemonsOfAGroupMakeTheirSecretOnceAndProveThemselvesByIt) {
  std::string directory = fs::temp_directory_path() / "dmuonctl-run-test-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  const std::string secret = directory + "/secret";
  const std::string coordinator = FreeAddress();
  std::unique_ptr<ChildProcess> runs[2];
  for (const int node : {0, 1}) {
    const std::string config = absl::StrCat(directory, "/", node);
    std::ofstream(config) << "nodes: 2 node_rank: " << node << " threads: 1 coordinator: '"
                          << coordinator << "'\n";
    auto run = ChildProcess::Start(
        "dmuonctl", {"run", "--config=" + config, "--peer_secret_file=" + secret, "--", "true"},
        directory + "/output");
    ASSERT_TRUE(run.ok()) << run.status();
    runs[node] = *std::move(run);
  }
  for (const auto& run : runs) {
    EXPECT_EQ(run->Wait(std::chrono::seconds(30)), 0) << ReadFile(directory + "/output");
  }
  const std::string first = ReadFile(secret);
  EXPECT_EQ(first.size(), 65);
  const CtlResult again = RunCtl({"secret", "new", secret});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.errors, AllOf(HasSubstr(secret), HasSubstr("is there already")));
  EXPECT_EQ(ReadFile(secret), first);
  const CtlResult other = RunCtl({"secret", "new", secret + ".2", "--json"});
  EXPECT_EQ(other.code, 0) << other.errors;
  EXPECT_EQ(other.json()["file"], secret + ".2");
  EXPECT_NE(ReadFile(secret + ".2"), first);
  for (const std::string& path : {secret, secret + ".2"}) {
    EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  }
  EXPECT_EQ(RunCtl({"secret"}).code, 2);
  fs::remove_all(directory);
}

// The command kills its daemon, and waits until the next one serves; that one leaves.
TEST(CtlRunTest, ADaemonThatDiesHasASuccessorAndOneThatLeavesHasNone) {
  const std::string ctl = CtlProgram();
  const std::string script =
      "children() { cat /proc/$PPID/task/$PPID/children; }\n"
      "read -r dead _ < /proc/$PPID/task/$PPID/children; kill -9 $dead\n"
      "while [ -e /proc/$dead ]; do sleep 0.05; done\n"
      "until " +
      ctl + " status > /dev/null 2>&1; do sleep 0.05; done\n" + ctl +
      " drain; while [ \"$(children)\" != \"$$ \" ]; do sleep 0.05; done";
  const CtlResult result = RunCtl({"run", "--devices=cpu:1", "--", "sh", "-c", script});
  EXPECT_EQ(result.code, 0) << result.output << result.errors;
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("ended with 137 while the command runs, and is started again\n"),
                    HasSubstr("ended with 0 while the command runs\n")));
}

TEST(CtlRunTest, TheDaemonLeavesWhenTheRunnerIsKilled) {
  const std::string output = fs::temp_directory_path() / absl::StrCat("ctl-run-", ::getpid());
  const std::string script =
      "read -r daemon _ < /proc/$PPID/task/$PPID/children; kill -9 $PPID\n"
      "while grep -qs '^State:.[^Z]' /proc/$daemon/status; do sleep 0.05; done; echo it left";
  auto run =
      ChildProcess::Start("dmuonctl", {"run", "--devices=cpu:1", "--", "sh", "-c", script}, output);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ((*run)->Wait(std::chrono::seconds(30)), 128 + SIGKILL);
  EXPECT_TRUE(Until([&] { return absl::StrContains(ReadFile(output), "it left"); }))
      << ReadFile(output);
  fs::remove(output);
}

TEST(CtlRunTest, ACommandThatIsNotThereIs127AndNoCommandIsAnswersUsage) {
  const CtlResult missing = RunCtl({"run", "--", "/nonexistent/program"});
  EXPECT_EQ(missing.code, 127);
  EXPECT_THAT(missing.errors, HasSubstr("/nonexistent/program"));
  EXPECT_EQ(RunCtl({"run"}).code, 2);
}

TEST(CtlRunTest, ADaemonThatDoesNotStartIsReportedAndNothingRuns) {
  const CtlResult missing = RunCtl({"run", "--dmuond=/nonexistent/dmuond", "--", "echo", "it ran"});
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.errors, HasSubstr("/nonexistent/dmuond"));
  EXPECT_EQ(missing.output, "");
  const CtlResult wrong = RunCtl({"run", "--devices=toaster:1", "--", "echo", "it ran"});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.errors, AllOf(HasSubstr("toaster"), HasSubstr("before it was ready")));
  EXPECT_EQ(wrong.output, "");
}

TEST(CtlRunTest, SignalsReachTheCommandAndTheDaemonLeavesAfterIt) {
  std::string pattern = fs::temp_directory_path() / "dmuonctl-run-test-XXXXXX";
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const fs::path directory = pattern;
  const std::string log = directory / "daemon.log";
  auto run =
      ChildProcess::Start("dmuonctl",
                          {"run", "--daemon_log=" + log, "--", "sh", "-c",
                           "trap 'exit 9' TERM; echo $DMUOND_ADDRESS > " +
                               (directory / "ready").string() + "; while :; do sleep 0.02; done"},
                          directory / "output");
  ASSERT_TRUE(run.ok()) << run.status();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (ReadFile(directory / "ready").empty()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << ReadFile(directory / "output");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // between two looks
  }
  (*run)->Signal(SIGTERM);
  EXPECT_EQ((*run)->Wait(std::chrono::seconds(20)), 9);
  EXPECT_THAT(ReadFile(log), HasSubstr("msg=left"));
  std::string socket = ReadFile(directory / "ready");
  socket.pop_back();
  EXPECT_FALSE(fs::exists(fs::path(socket).parent_path()));
  fs::remove_all(directory);
}

}  // namespace
}  // namespace dmuond::testing
