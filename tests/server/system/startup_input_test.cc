// Daemons that cannot start say why, on their last line, and end at once: rows of the table "what
// bad input gets" (layout_input_test.cc says where the others are). Who runs already goes on.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::chrono::seconds kEndsWithin{20};
constexpr int kExitConfig = 2;   // before anything is touched
constexpr int kExitRefused = 1;  // by the machine

class StartupInputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "dmuond-start-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  struct Ended {
    int code = 0;
    std::string output;
  };
  Ended Run(std::vector<std::string> flags, const std::string& socket = "") const {
    flags.push_back("--socket=" + (socket.empty() ? Socket() : socket));
    const std::string log = directory_ / "log";
    auto process = ChildProcess::Start("dmuond", std::move(flags), log);
    EXPECT_TRUE(process.ok()) << process.status();
    Ended ended;
    ended.code = (*process)->Wait(kEndsWithin);
    std::ifstream file(log);
    ended.output.assign(std::istreambuf_iterator<char>(file), {});
    return ended;
  }
  [[nodiscard]] std::string Socket() const { return directory_ / "run" / "dmuond.sock"; }

  fs::path directory_;
};

// A port of this machine that somebody listens on.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(socket_.get(), 1), 0);
    ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&at), &size);
    address_ = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
  }
  [[nodiscard]] const std::string& address() const { return address_; }

 private:
  wire::UniqueFd socket_;
  std::string address_;
};

TEST_F(StartupInputTest, ASocketPathThatIsTooLongNamesItsLengthAndTheLimit) {
  const std::string path = directory_ / std::string(120, 'x');
  const Ended ended = Run({}, path);
  EXPECT_EQ(ended.code, kExitConfig);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("--socket="), HasSubstr(absl::StrCat(path.size() + 7)),
                                  HasSubstr("107")));
}

TEST_F(StartupInputTest, ADirectoryOfSomebodyElseNamesBothUsers) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
  fs::create_directory(directory_ / "run");
  ASSERT_EQ(::chown((directory_ / "run").c_str(), 65534, 65534), 0);
  const Ended ended = Run({});
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("owned by uid 65534"), HasSubstr("runs as uid 0"),
                                  HasSubstr((directory_ / "run").string())));
}

TEST_F(StartupInputTest, ADirectoryOpenToEverybodyIsRefusedWithTheRemedy) {
  fs::create_directory(directory_ / "run");
  fs::permissions(directory_ / "run", fs::perms::all);
  const Ended ended = Run({});
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("0777"), HasSubstr("chmod 0750")));
}

TEST_F(StartupInputTest, AFileInTheSocketsPlaceIsLeftAlone) {
  fs::create_directory(directory_ / "run");
  fs::permissions(directory_ / "run", fs::perms::owner_all);
  std::ofstream(Socket()) << "precious";
  const Ended ended = Run({});
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, HasSubstr("is no socket and is left alone"));
  EXPECT_EQ(fs::file_size(Socket()), 8U);
}

TEST_F(StartupInputTest, ASecondDaemonOnOneSocketNamesTheFirstWhichGoesOn) {
  auto first = DaemonProcess::Start();
  ASSERT_TRUE(first.ok()) << first.status();
  const Ended ended = Run({}, (*first)->address());
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("another dmuond"), HasSubstr((*first)->address()),
                                  HasSubstr(absl::StrCat("pid ", (*first)->pid()))));
  EXPECT_TRUE(client::Session::Open({.address = (*first)->address()}).ok());
}

TEST_F(StartupInputTest, APortThatIsTakenIsNamed) {
  const TakenPort port;
  Ended ended = Run({"--metrics_address=" + port.address()});
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("metrics"), HasSubstr(port.address())));
  fs::remove(directory_ / "log");
  ended = Run(GroupFlags(0, 2, port.address()));
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, AllOf(HasSubstr("in use"), HasSubstr(port.address())));
}

TEST_F(StartupInputTest, ASnapshotDirectoryThatCannotBeWrittenIsNamed) {
  std::ofstream(directory_ / "file") << "no directory";
  const std::string path = directory_ / "file" / "snapshots";
  const Ended ended = Run({"--snapshot_dir=" + path});
  EXPECT_EQ(ended.code, kExitConfig);
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("--snapshot_dir=" + path), HasSubstr("cannot be made")));
}

// Whoever could write one such name into the directory would end every group that sees it.
TEST_F(StartupInputTest, ASnapshotsNameWithAnEpochNearTheEndOfThemIsRefusedByName) {
  const fs::path snapshots = directory_ / "snapshots";
  fs::create_directories(snapshots / "job" / "step-000000000003.4294967295.1");
  const std::string flag = "--snapshot_dir=" + snapshots.string();
  Ended ended = Run({flag});
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("epoch 4294967295"), HasSubstr("move that directory away"),
                    HasSubstr((snapshots / "job" / "step-000000000003.4294967295.1").string())));
  fs::remove_all(snapshots / "job");
  auto daemon = DaemonProcess::Start({.flags = {flag}});
  EXPECT_TRUE(daemon.ok()) << daemon.status();
}

TEST_F(StartupInputTest, ASocketsDirectoryThatCannotBeMadeOrWrittenIsNamed) {
  std::ofstream(directory_ / "file") << "no directory";
  const std::string path = directory_ / "file" / "run" / "dmuond.sock";
  Ended ended = Run({}, path);
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, HasSubstr((directory_ / "file").string()));
  fs::remove(directory_ / "log");
  ended = Run({}, "/proc/self/net/dmuond.sock");  // not even root writes there
  EXPECT_EQ(ended.code, kExitRefused);
  EXPECT_THAT(ended.output, HasSubstr("/proc/self/net"));
}

TEST_F(StartupInputTest, AMissingLaneProgramAndAnUnreadableTokenAreNamed) {
  Ended ended = Run({"--lane_binary=/nonexistent/lane"});
  EXPECT_EQ(ended.code, kExitConfig);
  EXPECT_THAT(ended.output, HasSubstr("/nonexistent/lane"));
  fs::remove(directory_ / "log");
  ended = Run({"--token_file=/nonexistent/token"});
  EXPECT_NE(ended.code, 0);
  EXPECT_THAT(ended.output, HasSubstr("/nonexistent/token"));
}

TEST_F(StartupInputTest, PlaintextBeyondLoopbackIsRefused) {
  const Ended ended = Run({"--nodes=2", "--node_rank=0", "--coordinator=192.0.2.1:7000"});
  EXPECT_NE(ended.code, 0);
  EXPECT_NE(ended.code, -1) << "it runs";
  EXPECT_THAT(ended.output, HasSubstr("192.0.2.1"));
}

// Loopback is open to every user of the machine.
TEST_F(StartupInputTest, AGroupWhoseDaemonsProveNothingIsRefusedWithTheRemedy) {
  const Ended ended = Run({"--nodes=2", "--node_rank=0", "--coordinator=127.0.0.1:7000"});
  EXPECT_EQ(ended.code, kExitConfig);
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("--peer_secret_file="), HasSubstr("dmuonctl secret new FILE")));
}

// As one does whose file server is gone. Here it reads a pipe that nobody writes to.
TEST_F(StartupInputTest, ADaemonThatDoesNotServeYetEndsAtTheFirstSignal) {
  const std::string pipe = directory_ / "config";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  auto process = ChildProcess::Start("dmuond", {"--config=" + pipe, "--socket=" + Socket()});
  ASSERT_TRUE(process.ok()) << process.status();
  const auto deadline = std::chrono::steady_clock::now() + kEndsWithin;
  wire::UniqueFd writer;
  while (!writer.valid()) {  // until it has begun to read
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    writer.Reset(::open(pipe.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // between two looks
  }
  (*process)->Signal(SIGTERM);
  EXPECT_EQ((*process)->Wait(kEndsWithin), 0) << "nothing is lost";
}

}  // namespace
}  // namespace dmuond::testing
