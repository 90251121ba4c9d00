#include "dmuond/wire/frame.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::wire {
namespace {

using ::testing::HasSubstr;

struct Pair {
  explicit Pair(int type) {
    std::array<int, 2> ends{-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends.data()), 0);
    a.Reset(ends[0]);
    b.Reset(ends[1]);
  }
  UniqueFd a;
  UniqueFd b;
};

// A pipe whose ends can be told apart after they have travelled.
struct Pipe {
  Pipe() {
    std::array<int, 2> ends{-1, -1};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    read.Reset(ends[0]);
    write.Reset(ends[1]);
  }
  UniqueFd read;
  UniqueFd write;
};

ino_t Inode(int fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd, &status), 0);
  return status.st_ino;
}

void SendRaw(int socket, uint32_t body, uint32_t fds) {
  const std::array<uint32_t, 2> header{body, fds};
  ASSERT_EQ(::send(socket, header.data(), sizeof(header), 0), sizeof(header));
}

TEST(StreamFrame, KeepsItsBoundariesAndBytes) {
  Pair pair(SOCK_STREAM);
  const std::string zeros("\0x\0", 3);
  ASSERT_TRUE(SendFrame(pair.a.get(), zeros).ok());
  ASSERT_TRUE(SendFrame(pair.a.get(), "").ok());
  ASSERT_TRUE(SendFrame(pair.a.get(), "second").ok());
  for (const std::string& want : {zeros, std::string(), std::string("second")}) {
    absl::StatusOr<Frame> frame = ReceiveFrame(pair.b.get());
    ASSERT_TRUE(frame.ok()) << frame.status();
    EXPECT_EQ(frame->body, want);
    EXPECT_TRUE(frame->fds.empty());
  }
}

TEST(StreamFrame, ABodyLargerThanTheSocketsBufferArrivesWhole) {
  Pair pair(SOCK_STREAM);
  std::string body(8 << 20, '\0');
  for (size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>(i * 31 + (i >> 8));
  Pipe pipe;
  std::thread sender([&] { EXPECT_TRUE(SendFrame(pair.a.get(), body, {pipe.write.get()}).ok()); });
  absl::StatusOr<Frame> frame = ReceiveFrame(pair.b.get());
  sender.join();
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_TRUE(frame->body == body);
  ASSERT_EQ(frame->fds.size(), 1);
  EXPECT_EQ(Inode(frame->fds[0].get()), Inode(pipe.write.get()));
}

TEST(StreamFrame, DescriptorsStayWithTheirFrameInOrder) {
  Pair pair(SOCK_STREAM);
  Pipe one;
  Pipe two;
  ASSERT_TRUE(SendFrame(pair.a.get(), "none").ok());
  ASSERT_TRUE(SendFrame(pair.a.get(), "both", {two.read.get(), one.read.get()}).ok());
  ASSERT_TRUE(SendFrame(pair.a.get(), "one", {one.write.get()}).ok());
  EXPECT_TRUE(ReceiveFrame(pair.b.get())->fds.empty());
  absl::StatusOr<Frame> both = ReceiveFrame(pair.b.get());
  ASSERT_TRUE(both.ok()) << both.status();
  ASSERT_EQ(both->fds.size(), 2);
  EXPECT_EQ(Inode(both->fds[0].get()), Inode(two.read.get()));
  EXPECT_EQ(Inode(both->fds[1].get()), Inode(one.read.get()));
  absl::StatusOr<Frame> last = ReceiveFrame(pair.b.get());
  ASSERT_TRUE(last.ok()) << last.status();
  ASSERT_EQ(last->fds.size(), 1);
  // Closed when a program is executed, and good for use.
  EXPECT_EQ(::fcntl(last->fds[0].get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  ASSERT_EQ(::write(last->fds[0].get(), "x", 1), 1);
  char byte = 0;
  ASSERT_EQ(::read(one.read.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

TEST(StreamFrame, AFrameTooLongIsRefusedBeforeItIsSentOrAllocated) {
  Pair pair(SOCK_STREAM);
  EXPECT_TRUE(absl::IsInvalidArgument(
      SendFrame(pair.a.get(), "", std::vector<int>(kFrameFdsMax + 1, pair.a.get()))));
  SendRaw(pair.a.get(), 0xffffffff, 0);
  absl::StatusOr<Frame> frame = ReceiveFrame(pair.b.get());
  EXPECT_TRUE(absl::IsInvalidArgument(frame.status())) << frame.status();
  EXPECT_THAT(std::string(frame.status().message()), HasSubstr("4294967295 bytes"));
}

TEST(StreamFrame, AnnouncedDescriptorsMustCome) {
  Pair pair(SOCK_STREAM);
  SendRaw(pair.a.get(), 2, 1);
  ASSERT_EQ(::send(pair.a.get(), "ab", 2, 0), 2);
  absl::StatusOr<Frame> frame = ReceiveFrame(pair.b.get());
  EXPECT_TRUE(absl::IsInvalidArgument(frame.status())) << frame.status();
  EXPECT_THAT(std::string(frame.status().message()),
              HasSubstr("announced 1 descriptors and carried 0"));
}

TEST(StreamFrame, AnEndThatClosesIsUnavailableToTheOther) {
  Pair pair(SOCK_STREAM);
  SendRaw(pair.a.get(), 10, 0);
  ASSERT_EQ(::send(pair.a.get(), "half", 4, 0), 4);
  pair.a.Reset();
  EXPECT_TRUE(absl::IsUnavailable(ReceiveFrame(pair.b.get()).status()));
  EXPECT_TRUE(absl::IsUnavailable(SendFrame(pair.b.get(), "nobody")));  // and no SIGPIPE
}

TEST(PacketFrame, IsOneDatagramWithItsDescriptors) {
  Pair pair(SOCK_SEQPACKET);
  Pipe pipe;
  ASSERT_TRUE(SendPacket(pair.a.get(), "first", {pipe.read.get()}).ok());
  ASSERT_TRUE(SendPacket(pair.a.get(), std::string(kPacketBytesMax, 'z')).ok());
  absl::StatusOr<Frame> first = ReceivePacket(pair.b.get());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->body, "first");
  ASSERT_EQ(first->fds.size(), 1);
  EXPECT_EQ(Inode(first->fds[0].get()), Inode(pipe.read.get()));
  absl::StatusOr<Frame> second = ReceivePacket(pair.b.get());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->body, std::string(kPacketBytesMax, 'z'));
  EXPECT_TRUE(second->fds.empty());
}

TEST(PacketFrame, EmptyOrTooLongIsRefused) {
  Pair pair(SOCK_SEQPACKET);
  EXPECT_TRUE(absl::IsInvalidArgument(SendPacket(pair.a.get(), "")));
  const std::string long_body(kPacketBytesMax + 1, 'z');
  EXPECT_TRUE(absl::IsInvalidArgument(SendPacket(pair.a.get(), long_body)));
  // A peer that sends it anyway is told apart from one that sent a whole packet.
  ASSERT_EQ(::send(pair.a.get(), long_body.data(), long_body.size(), 0), long_body.size());
  EXPECT_TRUE(absl::IsInvalidArgument(ReceivePacket(pair.b.get()).status()));
}

TEST(PacketFrame, AnEndThatClosesIsUnavailableToTheOther) {
  Pair pair(SOCK_SEQPACKET);
  pair.a.Reset();
  EXPECT_TRUE(absl::IsUnavailable(ReceivePacket(pair.b.get()).status()));
  EXPECT_TRUE(absl::IsUnavailable(SendPacket(pair.b.get(), "nobody")));
}

TEST(UniqueFdTest, ClosesOnceAndMoves) {
  Pipe pipe;
  const int number = pipe.read.get();
  UniqueFd moved(std::move(pipe.read));
  EXPECT_FALSE(pipe.read.valid());  // NOLINT(bugprone-use-after-move): empty by contract
  EXPECT_EQ(moved.get(), number);
  moved = std::move(pipe.write);
  EXPECT_EQ(::fcntl(number, F_GETFD), -1);
  const int released = moved.Release();
  EXPECT_FALSE(moved.valid());
  EXPECT_GE(::fcntl(released, F_GETFD), 0);
  moved.Reset(released);
  moved.Reset();
  EXPECT_EQ(::fcntl(released, F_GETFD), -1);
}

}  // namespace
}  // namespace dmuond::wire
