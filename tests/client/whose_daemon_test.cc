// Whom a client speaks with before it hands anything over: a daemon of another release, or of
// another user.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_daemon.h"

namespace dmuond::client {
namespace {

using testing::FakeDaemon;
using ::testing::HasSubstr;

constexpr uid_t kNobody = 65534;

class WhoseDaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string directory = std::filesystem::temp_directory_path() / "dmuond-whose-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  [[nodiscard]] std::string path() const { return directory_ + "/d.sock"; }
  void ExpectNotTrusted(const FakeDaemon& daemon, const std::string& what) const {
    const absl::Status refused = Session::Open({.address = path(), .token = "secret"}).status();
    EXPECT_EQ(ReasonOf(refused), "SOCKET_OWNER") << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("DMUOND_SERVER_UID=65534"));
    EXPECT_EQ(MetadataOf(refused)["path"], what);
    EXPECT_EQ(daemon.opens(), 0) << "the token was handed over";
    const auto trusted = Session::Open({.address = path(), .server_uid = kNobody});
    EXPECT_TRUE(trusted.ok()) << trusted.status();
  }

  std::string directory_;
};

TEST_F(WhoseDaemonTest, AnotherProtocolVersionIsRefusedByNameBeforeAnythingElseIsSaid) {
  for (const uint32_t version : {1, 3}) {
    const FakeDaemon daemon(path(), {.version = version});
    const absl::Status refused = Session::Open({.address = path()}).status();
    EXPECT_EQ(ReasonOf(refused), "VERSION_MISMATCH") << refused;
    EXPECT_EQ(MetadataOf(refused)["server_version"], std::to_string(version));
    EXPECT_EQ(MetadataOf(refused)["client_version"], "2");
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(version == 1 ? "update the daemon" : "update the client"));
    EXPECT_EQ(daemon.opens(), 0);
  }
}

TEST_F(WhoseDaemonTest, OneThatWouldNotSkipForAGradientThatNoLaneReadsIsNotAskedTo) {
  const FakeDaemon daemon(path(), {});
  const auto session = Session::Open({.address = path()});
  ASSERT_TRUE(session.ok()) << session.status();
  LayoutBuilder builder(1);
  builder.Add({.name = "matrix", .shape = {4, 4}});
  ASSERT_TRUE((*session)->Register(*builder.Build()).ok());
  ASSERT_TRUE((*session)->Attach().ok());
  ASSERT_TRUE((*session)->Push().ok());
  const StepScalars scalars{.groups = {{.learning_rate = 0.1}}};
  const absl::Status refused = (*session)->Step(scalars, {.not_finite = 0}).status();
  EXPECT_EQ(ReasonOf(refused), "VERSION_MISMATCH") << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("update the daemon"));
  const auto outcome = (*session)->Step(scalars);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
}

TEST_F(WhoseDaemonTest, ASocketOfAStrangerGetsNoToken) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const FakeDaemon daemon(path(), {});
  ASSERT_EQ(::chown(path().c_str(), kNobody, kNobody), 0);
  ExpectNotTrusted(daemon, path());
}

TEST_F(WhoseDaemonTest, ADirectoryOfAStrangerGetsNoToken) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const FakeDaemon daemon(path(), {});
  ASSERT_EQ(::chown(directory_.c_str(), kNobody, kNobody), 0);
  ExpectNotTrusted(daemon, directory_);
}

// Whose paths look right: it was there first, or has replaced them meanwhile.
TEST_F(WhoseDaemonTest, AStrangerWhoListensThereGetsNoToken) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  ASSERT_EQ(::chmod(directory_.c_str(), 0777), 0);
  // Of this thread alone; the daemon's sockets are opened in it.
  ASSERT_EQ(::syscall(SYS_setresuid, -1, kNobody, -1), 0);
  const FakeDaemon daemon(path(), {});
  ASSERT_EQ(::syscall(SYS_setresuid, -1, 0, -1), 0);
  for (const char* suffix : {"", ".attach"}) {
    ASSERT_EQ(::chown((path() + suffix).c_str(), 0, 0), 0);
  }
  ExpectNotTrusted(daemon, path() + ".attach");
}

TEST_F(WhoseDaemonTest, AStartThatComesAfterTheClaimTimeoutConnectsAgain) {
  const FakeDaemon daemon(path(), {.late_claims = 2});
  const auto session = Session::Open({.address = path(), .connect_timeout = {}});
  EXPECT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(daemon.opens(), 3);
}

TEST_F(WhoseDaemonTest, OneThatIsAlwaysLateHearsOfTheTimeoutAndNotOfTheDaemonsEnd) {
  const FakeDaemon daemon(path(), {.late_claims = 100});
  const absl::Status late = Session::Open({.address = path(), .connect_timeout = {}}).status();
  EXPECT_EQ(ReasonOf(late), "CLAIM_EXPIRED") << late;
  EXPECT_EQ(daemon.opens(), 3);
}

}  // namespace
}  // namespace dmuond::client
