#include "server/daemon/process/socket_dir.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <system_error>
#include <thread>

#include "dmuond/wire/socket_path.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::HasSubstr;

std::string MessageOf(const std::string& socket) {
  return std::string(SocketDir::Prepare(socket).status().message());
}

void LeaveSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const wire::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

mode_t ModeOf(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 0777;
}

TEST(SocketDirTest, MakesMissingDirectoryForItsOwnerAlone) {
  const TempDir dir;
  auto place = SocketDir::Prepare(dir / "a/b/d.sock");
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_EQ(ModeOf(dir / "a/b"), 0700);
}

TEST(SocketDirTest, GroupMayConnect) {
  const TempDir dir;
  auto place = SocketDir::Prepare(dir / "g/d.sock", 0660, ::getegid());
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_EQ(ModeOf(dir / "g"), 0750);
}

TEST(SocketDirTest, TooLongPathNamesLengthAndLimit) {
  const std::string socket = "/tmp/" + std::string(96, 'x');  // 101, with .attach 108
  EXPECT_THAT(MessageOf(socket), HasSubstr("108 bytes, at most 107"));
  EXPECT_THAT(MessageOf("/tmp/" + std::string(96, 'x') + "/" + "y"), HasSubstr("110 bytes"));
}

TEST(SocketDirTest, PathOfExactlyTheLimitWorks) {
  const TempDir dir;
  const std::string socket =
      dir / std::string(wire::kSocketPathBytesMax - 7 - dir.path().size() - 1, 'x');
  auto place = SocketDir::Prepare(socket);
  ASSERT_TRUE(place.ok()) << place.status();
  LeaveSocket(socket + wire::kAttachSuffix);
}

TEST(SocketDirTest, RelativePathIsRefused) {
  EXPECT_THAT(MessageOf("d.sock"), HasSubstr("absolute"));
  EXPECT_THAT(MessageOf(""), HasSubstr("absolute"));
  EXPECT_THAT(MessageOf("/tmp/"), HasSubstr("absolute"));
}

TEST(SocketDirTest, DirectoryThatOthersMayWriteIsRefused) {
  const TempDir dir;
  for (const mode_t mode : {0770, 0755, 0777, 0701}) {
    ASSERT_EQ(::chmod(dir.path().c_str(), mode), 0);
    EXPECT_THAT(MessageOf(dir / "d.sock"), HasSubstr("chmod 0750 " + dir.path()));
  }
  // Of everybody's, as /tmp is: chmod would take it from all others.
  ASSERT_EQ(::chmod(dir.path().c_str(), 01777), 0);
  EXPECT_THAT(MessageOf(dir / "d.sock"),
              ::testing::AllOf(HasSubstr("shared by all users"), HasSubstr("/dmuond.sock"),
                               ::testing::Not(HasSubstr("chmod"))));
  ASSERT_EQ(::chmod(dir.path().c_str(), 0750), 0);
  EXPECT_TRUE(SocketDir::Prepare(dir / "d.sock").ok());
}

TEST(SocketDirTest, SymbolicLinkIsRefused) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "real");
  ASSERT_EQ(::chmod((dir / "real").c_str(), 0700), 0);
  std::filesystem::create_directory_symlink(dir / "real", dir / "link");
  EXPECT_THAT(MessageOf(dir / "link/d.sock"), HasSubstr("symbolic link"));
}

TEST(SocketDirTest, WhatBelongsToSomebodyElseIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const TempDir dir;
  std::filesystem::create_directory(dir / "theirs");
  ASSERT_EQ(::chmod((dir / "theirs").c_str(), 0700), 0);
  ASSERT_EQ(::chown((dir / "theirs").c_str(), 4242, 4242), 0);
  EXPECT_THAT(MessageOf(dir / "theirs/d.sock"), HasSubstr("owned by uid 4242"));
  LeaveSocket(dir / "d.sock.attach");
  ASSERT_EQ(::chown((dir / "d.sock.attach").c_str(), 4242, 4242), 0);
  EXPECT_THAT(MessageOf(dir / "d.sock"), HasSubstr("owned by uid 4242"));
  EXPECT_TRUE(std::filesystem::exists(dir / "d.sock.attach"));
}

TEST(SocketDirTest, StaleSocketsAreRemovedButNothingElse) {
  const TempDir dir;
  LeaveSocket(dir / "d.sock");
  LeaveSocket(dir / "d.sock.attach");
  ASSERT_TRUE(SocketDir::Prepare(dir / "d.sock").ok());
  EXPECT_FALSE(std::filesystem::exists(dir / "d.sock"));
  EXPECT_FALSE(std::filesystem::exists(dir / "d.sock.attach"));
  WriteFile(dir / "d.sock", "a file");
  EXPECT_THAT(MessageOf(dir / "d.sock"), HasSubstr("is no socket"));
  EXPECT_TRUE(std::filesystem::exists(dir / "d.sock"));
}

TEST(SocketDirTest, SecondDaemonIsToldThePidOfTheFirst) {
  const TempDir dir;
  auto first = SocketDir::Prepare(dir / "d.sock");
  ASSERT_TRUE(first.ok()) << first.status();
  LeaveSocket(dir / "d.sock");
  const absl::Status second = SocketDir::Prepare(dir / "d.sock").status();
  EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
  EXPECT_THAT(std::string(second.message()),
              HasSubstr("another dmuond (pid " + std::to_string(::getpid()) + ")"));
  EXPECT_TRUE(std::filesystem::exists(dir / "d.sock")) << "the first one's socket stays";
}

TEST(SocketDirTest, ALockFileThatIsRemovedOrReplacedIsLost) {
  const TempDir dir;
  auto first = SocketDir::Prepare(dir / "run/d.sock");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->LockFileIsLost());
  std::filesystem::remove_all(dir / "run");
  EXPECT_TRUE(first->LockFileIsLost());
  auto second = SocketDir::Prepare(dir / "run/d.sock");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(first->LockFileIsLost());
  EXPECT_FALSE(second->LockFileIsLost());
}

TEST(SocketDirTest, LockEndsWithTheProcess) {
  const TempDir dir;
  int held[2];
  ASSERT_EQ(::pipe2(held, O_CLOEXEC), 0);
  const pid_t daemon = ::fork();
  ASSERT_GE(daemon, 0);
  if (daemon == 0) {
    const auto place = SocketDir::Prepare(dir / "d.sock");
    [[maybe_unused]] const ssize_t written = ::write(held[1], place.ok() ? "y" : "n", 1);
    for (;;) ::pause();
  }
  char answer = 0;
  ASSERT_EQ(::read(held[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  EXPECT_THAT(MessageOf(dir / "d.sock"), HasSubstr("pid " + std::to_string(daemon)));
  ::kill(daemon, SIGKILL);
  ASSERT_EQ(::waitpid(daemon, nullptr, 0), daemon);
  EXPECT_TRUE(SocketDir::Prepare(dir / "d.sock").ok());
  ::close(held[0]);
  ::close(held[1]);
}

// Whether this process has the file open.
bool IsOpen(const std::string& path) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_since;
    if (std::filesystem::read_symlink(entry.path(), closed_since) == path) return true;
  }
  return false;
}

// Whether a thread of this process sleeps, by the third field of its stat.
bool Sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(") ");
  return name_end != std::string::npos && text.substr(name_end + 2, 1) == "S";
}

TEST(SocketDirTest, ASuccessorWaitsForItsPredecessorsLanes) {
  const TempDir dir;
  int said[2];
  ASSERT_EQ(::pipe2(said, O_CLOEXEC), 0);
  const pid_t daemon = ::fork();
  ASSERT_GE(daemon, 0);
  if (daemon == 0) {
    const auto place = SocketDir::Prepare(dir / "d.sock");
    const pid_t lane = ::fork();  // has the lock as well
    if (lane != 0) {
      [[maybe_unused]] const ssize_t written = ::write(said[1], &lane, sizeof(lane));
    }
    for (;;) ::pause();
  }
  pid_t lane = 0;
  ASSERT_EQ(::read(said[0], &lane, sizeof(lane)), sizeof(lane));
  ASSERT_GT(lane, 0);
  ::kill(daemon, SIGKILL);
  ASSERT_EQ(::waitpid(daemon, nullptr, 0), daemon);
  std::promise<pid_t> thread;
  auto successor = std::async(std::launch::async, [&] {
    thread.set_value(::gettid());
    return SocketDir::Prepare(dir / "d.sock").status();
  });
  // It has found the lock taken when it sleeps with the lock's file open: it sleeps nowhere else.
  const pid_t waiting = thread.get_future().get();
  const auto over = [&] {
    return successor.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  while (!over() && !(IsOpen(dir / "d.sock.lock") && Sleeps(waiting))) std::this_thread::yield();
  EXPECT_FALSE(over()) << "the lane has the lock";
  ::kill(lane, SIGKILL);
  const absl::Status status = successor.get();
  EXPECT_TRUE(status.ok()) << status;
  ::close(said[0]);
  ::close(said[1]);
}

TEST(SocketDirTest, UnwritablePlaceIsNamed) {
  EXPECT_THAT(MessageOf("/proc/nowhere/d.sock"), HasSubstr("/proc/nowhere"));
}

}  // namespace
}  // namespace dmuond::server
