// dmuonctl run -- COMMAND: a daemon for the length of a command, and nothing left of it.
#include <signal.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/client/example_runs.h"
#include "tests/server/ctl/ctl_process.h"
#include "tests/server/system/disk_driver.h"

namespace dmuond::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
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
                    HasSubstr("ended with 0 while the command runs: it was told to leave, and is "
                              "not started again. The command's next step waits"),
                    HasSubstr("end the command and run it again")));
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

// `socket`: with the end of its line.
bool FolderIsThere(std::string socket) {
  socket.pop_back();
  return fs::exists(fs::path(socket).parent_path());
}

TEST(CtlRunTest, TheFolderOfAKilledRunnerIsRemovedByTheNextOneAndThatOfAnotherIsNot) {
  std::string directory = fs::temp_directory_path() / "dmuonctl-run-test-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  ::setenv("XDG_RUNTIME_DIR", directory.c_str(), 1);
  const std::string address = directory + "/address";
  const std::string lives_on =
      absl::StrCat("echo $DMUOND_ADDRESS; while [ -e ", address, " ]; do sleep 0.05; done");
  auto other = ChildProcess::Start("dmuonctl", {"run", "--", "sh", "-c", lives_on}, address);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_TRUE(Until([&] { return !ReadFile(address).empty(); }));
  const CtlResult killed = RunCtl({"run", "--", "sh", "-c", "echo $DMUOND_ADDRESS; kill -9 $PPID"});
  EXPECT_EQ(killed.code, 128 + SIGKILL);
  EXPECT_TRUE(Until([&] {
    return RunCtl({"run", "--", "true"}).code == 0 && !FolderIsThere(killed.output);
  })) << "its daemon has left";
  EXPECT_TRUE(FolderIsThere(ReadFile(address)));
  fs::remove(address);
  EXPECT_EQ((*other)->Wait(kPatience), 0);
  ::unsetenv("XDG_RUNTIME_DIR");
  fs::remove_all(directory);
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

// A command that trains until it is told to stop, and then takes longer than two signals may be
// apart to be one wish. Its daemon's disk holds the snapshot up until Release().
class CtlRunStopsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "dmuonctl-run-test-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    disk_ =
        std::make_unique<DiskDriver>(directory_ + "/disk", [this](pid_t, const std::string& point) {
          return holds_.load() && point == "storage.write" ? "hold" : "go";
        });
    std::ofstream(directory_ + "/config") << "snapshot_dir: '" << directory_ << "/snapshots'\n";
    const std::string trainer =
        fs::read_symlink("/proc/self/exe").parent_path() / "dmuond-example-trainer";
    const std::string script =
        absl::StrCat("echo $DMUOND_ADDRESS > ", directory_, "/address; ",
                     "read -r daemon _ < /proc/$PPID/task/$PPID/children; echo $daemon > ",
                     directory_, "/daemon; trap 'kill $trainer; sleep 0.6; exit 9' TERM; ", trainer,
                     " --steps=1000000 & trainer=$!; while :; do wait; done");
    auto run = ChildProcess::Start("dmuonctl",
                                   {"run", "--config=" + directory_ + "/config",
                                    "--daemon_log=" + log_path(), "--", "sh", "-c", script},
                                   directory_ + "/output");
    ASSERT_TRUE(run.ok()) << run.status();
    run_ = *std::move(run);
    ASSERT_TRUE(Until([&] { return !Steps(directory_ + "/output").empty(); })) << Output();
  }
  void TearDown() override {
    Release();
    run_.reset();
    EXPECT_TRUE(UntilLogged("msg=left", "ending at once"));
    disk_.reset();
    fs::remove_all(directory_);
  }
  // As systemd and Slurm do it.
  void SignalEveryProcess() {
    ::kill(static_cast<pid_t>(std::stol(ReadFile(directory_ + "/daemon"))), SIGTERM);
    run_->Signal(SIGTERM);
    ASSERT_TRUE(disk_->WaitHeld());
  }
  void Release() {
    holds_ = false;
    disk_->Release();
  }
  // Whether one of these comes to be in the log, the first so many times.
  bool UntilLogged(const std::string& text, const std::string& otherwise, size_t times = 1) {
    return Until([&] {
      const std::string log = ReadFile(log_path());
      const std::vector<std::string> parts = absl::StrSplit(log, text);
      return parts.size() > times || absl::StrContains(log, otherwise);
    });
  }
  std::string log_path() const { return directory_ + "/log"; }
  std::string Output() { return ReadFile(directory_ + "/output") + ReadFile(log_path()); }

  std::string directory_;
  std::atomic<bool> holds_ = true;
  std::unique_ptr<DiskDriver> disk_;
  std::unique_ptr<ChildProcess> run_;
};

TEST_F(CtlRunStopsTest, AWishThatReachesDaemonAndRunnerIsOneAndTheSnapshotIsWritten) {
  SignalEveryProcess();
  EXPECT_TRUE(UntilLogged("leaving already", "ending at once"));
  Release();
  EXPECT_EQ(run_->Wait(kPatience), 9);
  EXPECT_THAT(Output(), AllOf(HasSubstr("snapshot written"), HasSubstr("msg=left"),
                              Not(HasSubstr("the daemon ended with"))));
}

TEST_F(CtlRunStopsTest, TheRunnersDeathDoesNotEndADaemonThatLeaves) {
  SignalEveryProcess();
  EXPECT_TRUE(UntilLogged("leaving already", "ending at once"));
  run_->Signal(SIGKILL);
  EXPECT_EQ(run_->Wait(kPatience), 128 + SIGKILL);
  EXPECT_TRUE(UntilLogged("leaving already", "ending at once", 2));
  EXPECT_EQ(RunCtl({"run", "--", "true"}).code, 0);
  EXPECT_TRUE(FolderIsThere(ReadFile(directory_ + "/address"))) << "the next runner took it away";
  Release();
  EXPECT_TRUE(UntilLogged("msg=left", "ending at once"));
  EXPECT_THAT(Output(), HasSubstr("snapshot written"));
}

TEST_F(CtlRunStopsTest, WhoSignalsTheRunnerTwiceEndsTheDaemonAtOnce) {
  run_->Signal(SIGTERM);
  ASSERT_TRUE(disk_->WaitHeld());
  while (run_->Wait(std::chrono::milliseconds(100)) == -1) run_->Signal(SIGTERM);
  EXPECT_THAT(Output(), AllOf(HasSubstr("a second signal: ending at once"),
                              HasSubstr("the daemon ended with 1")));
}

}  // namespace
}  // namespace dmuond::testing
