// dmuonctl run -- COMMAND: a daemon for the length of a command, and nothing left of it.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"
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
