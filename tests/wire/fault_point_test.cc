#include "base/fault_point.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace dmuond::fault {
namespace {

using wire::UniqueFd;

// Hears reports and gives the same answer to each.
class Driver {
 public:
  explicit Driver(std::string answer)
      : answer_(std::move(answer)), listener_(::socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_ = ::testing::TempDir() + "fault-" + std::to_string(::getpid());
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ::unlink(path_.c_str());
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    ::setenv("DMUOND_FAULT_SOCKET", path_.c_str(), 1);
  }
  ~Driver() { ::unlink(path_.c_str()); }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // One report, answered.
  std::string Hear() {
    const UniqueFd connection(::accept(listener_.get(), nullptr, nullptr));
    std::string text(256, '\0');
    text.resize(::recv(connection.get(), text.data(), text.size(), 0));
    EXPECT_GT(::send(connection.get(), answer_.data(), answer_.size(), 0), 0);
    return text;
  }

 private:
  const std::string answer_;
  const UniqueFd listener_;
  std::string path_;
};

TEST(FaultPointTest, OnlyWhatTheDriverNamedIsReportedAndMayFail) {
  EXPECT_EQ(FaultPoint("a"), 0);  // nobody listens
  Driver driver("fail 28");
  ::setenv("DMUOND_FAULT_POINTS", "one,two.three", 1);
  ASSERT_TRUE(ConnectFaultDriver());
  EXPECT_EQ(FaultPoint("two"), 0);
  EXPECT_EQ(FaultPoint("three"), 0);
  EXPECT_EQ(FaultPoint("on"), 0);
  std::string heard;
  std::thread listens([&] { heard = driver.Hear(); });
  errno = EINTR;
  EXPECT_EQ(FaultPoint("two.three"), ENOSPC);
  EXPECT_EQ(errno, EINTR);  // a point changes nothing around it
  listens.join();
  EXPECT_EQ(heard, std::to_string(::getpid()) + " two.three");
}

TEST(FaultPointTest, CutEndsConnectionsOfTheNamedKindAlone) {
  int stream[2];
  int packets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, stream), 0);
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, packets), 0);
  char byte = 0;
  constexpr int kNone = -1;
  internal::Cut(/*tcp=*/true, SOCK_STREAM, kNone);
  EXPECT_EQ(::recv(stream[1], &byte, 1, MSG_DONTWAIT), -1);
  internal::Cut(/*tcp=*/false, SOCK_STREAM, kNone);
  EXPECT_EQ(::recv(stream[1], &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_EQ(::recv(packets[1], &byte, 1, MSG_DONTWAIT), -1);
  internal::Cut(/*tcp=*/false, SOCK_SEQPACKET, kNone);
  EXPECT_EQ(::recv(packets[1], &byte, 1, MSG_DONTWAIT), 0);
  for (const int fd : {stream[0], stream[1], packets[0], packets[1]}) ::close(fd);
}

}  // namespace
}  // namespace dmuond::fault
