#include "server/daemon/calls/attach_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dmuond/wire/frame.h"
#include "server/common/errors.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::HasSubstr;

class AttachServerTest : public ::testing::Test {
 protected:
  void Start(AttachServer::Options options = {}) {
    options.path = path_;
    auto server = AttachServer::Start(std::move(options),
                                      {.on_gone = [this](AttachId id) { gone_.Put(id); }});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  [[nodiscard]] wire::UniqueFd Connect() const { return ConnectUnix(path_, SOCK_SEQPACKET); }

  static v1::AttachFrame ReadFrame(int socket, std::vector<wire::UniqueFd>* fds = nullptr) {
    v1::AttachFrame frame;
    absl::StatusOr<wire::Frame> packet = wire::ReceivePacket(socket);
    EXPECT_TRUE(packet.ok()) << packet.status();
    if (!packet.ok()) return frame;
    EXPECT_TRUE(frame.ParseFromString(packet->body));
    if (fds != nullptr) *fds = std::move(packet->fds);
    return frame;
  }
  static std::string ReadNonce(int socket) { return ReadFrame(socket).welcome().nonce(); }

  struct Trainer {
    wire::UniqueFd socket;
    AttachPeer peer;
  };
  Trainer ClaimedTrainer() {
    Trainer trainer;
    trainer.socket = Connect();
    auto peer = server_->Claim(ReadNonce(trainer.socket.get()));
    EXPECT_TRUE(peer.ok()) << peer.status();
    if (peer.ok()) trainer.peer = *peer;
    return trainer;
  }

  TempDir dir_;
  std::string path_ = dir_ / "d.sock.attach";
  Inbox<AttachId> gone_;
  std::unique_ptr<AttachServer> server_;
};

TEST_F(AttachServerTest, WelcomeCarriesNonceOfSixteenBytesThatNobodyElseGets) {
  Start();
  std::set<std::string> nonces;
  for (int i = 0; i < 20; ++i) {
    const wire::UniqueFd socket = Connect();
    const std::string nonce = ReadNonce(socket.get());
    EXPECT_EQ(nonce.size(), 16);
    EXPECT_TRUE(nonces.insert(nonce).second);
  }
}

TEST_F(AttachServerTest, ClaimTellsWhoConnected) {
  Start();
  const Trainer trainer = ClaimedTrainer();
  EXPECT_EQ(trainer.peer.process->peer.pid(), ::getpid());
  EXPECT_EQ(trainer.peer.process->peer.uid(), ::geteuid());
}

TEST_F(AttachServerTest, NonceOpensOneSession) {
  Start();
  const wire::UniqueFd socket = Connect();
  const std::string nonce = ReadNonce(socket.get());
  ASSERT_TRUE(server_->Claim(nonce).ok());
  const absl::Status again = server_->Claim(nonce).status();
  EXPECT_TRUE(absl::IsUnauthenticated(again));
  EXPECT_EQ(ReasonOf(again), "NONCE_UNKNOWN");
  EXPECT_EQ(ReasonOf(server_->Claim("").status()), "NONCE_UNKNOWN");
  EXPECT_EQ(ReasonOf(server_->Claim(std::string(16, 'x')).status()), "NONCE_UNKNOWN");
}

TEST_F(AttachServerTest, NonceDiesWithItsConnection) {
  Start({.claim_timeout = std::chrono::milliseconds(1)});
  const wire::UniqueFd socket = Connect();
  const std::string nonce = ReadNonce(socket.get());
  ASSERT_TRUE(EndComes(socket.get()));
  const absl::Status late = server_->Claim(nonce).status();
  EXPECT_EQ(ReasonOf(late), "CLAIM_EXPIRED") << late;
  EXPECT_THAT(late.message(), testing::HasSubstr("--claim_timeout"));
  EXPECT_EQ(gone_.size(), 0) << "nobody knew of it";
}

TEST_F(AttachServerTest, ClaimedConnectionOutlivesTheClaimTimeout) {
  Start({.claim_timeout = std::chrono::milliseconds(50)});
  const Trainer claimed = ClaimedTrainer();
  const wire::UniqueFd other = Connect();
  ASSERT_TRUE(EndComes(other.get()));  // its time is up, so the claimed one's would be too
  v1::AttachFrame frame;
  frame.mutable_timeline()->set_buckets(1);
  EXPECT_TRUE(server_->Send(claimed.peer.id, frame).ok());
  EXPECT_EQ(gone_.size(), 0);
}

TEST_F(AttachServerTest, DescriptorsArriveWithTheirFrames) {
  Start();
  const Trainer trainer = ClaimedTrainer();
  const wire::UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::write(memory.get(), "weights", 7), 7);
  v1::AttachFrame frame;
  frame.mutable_arena()->set_arena(7);
  ASSERT_TRUE(server_->Send(trainer.peer.id, frame, memory.get()).ok());
  std::vector<wire::UniqueFd> fds;
  EXPECT_EQ(ReadFrame(trainer.socket.get(), &fds).arena().arena(), 7);
  ASSERT_EQ(fds.size(), 1);
  char text[8] = {};
  EXPECT_EQ(::pread(fds[0].get(), text, 7, 0), 7);
  EXPECT_STREQ(text, "weights");
}

TEST_F(AttachServerTest, EndOfConnectionIsEndOfTrainer) {
  Start();
  Trainer trainer = ClaimedTrainer();
  trainer.socket.Reset();
  EXPECT_EQ(gone_.Take(), trainer.peer.id);
  const absl::Status sent = server_->Send(trainer.peer.id, v1::AttachFrame());
  EXPECT_TRUE(absl::IsNotFound(sent)) << sent;
  EXPECT_EQ(ReasonOf(sent), "TRAINER_LOST");
  server_.reset();
  EXPECT_EQ(gone_.size(), 0) << "reported once";
}

// A data loader forked by the trainer keeps the connection open: the process's end must be seen.
TEST_F(AttachServerTest, DeathOfProcessIsSeenWhileItsChildHoldsTheConnection) {
  Start();
  int nonce_pipe[2];
  int life_pipe[2];
  ASSERT_EQ(::pipe2(nonce_pipe, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(life_pipe, O_CLOEXEC), 0);
  const std::string path = path_;
  const pid_t trainer = ::fork();
  ASSERT_GE(trainer, 0);
  if (trainer == 0) {
    const wire::UniqueFd socket = ConnectUnix(path, SOCK_SEQPACKET);
    char frame[256];
    const ssize_t size = ::recv(socket.get(), frame, sizeof(frame), 0);
    ::close(life_pipe[1]);
    if (::fork() == 0) {
      char byte = 0;
      [[maybe_unused]] const ssize_t got = ::read(life_pipe[0], &byte, 1);  // until the test ends
      ::_exit(0);
    }
    [[maybe_unused]] const ssize_t sent = ::write(nonce_pipe[1], frame, size);
    for (;;) ::pause();
  }
  char bytes[256];
  const ssize_t size = ::read(nonce_pipe[0], bytes, sizeof(bytes));
  ASSERT_GT(size, 0);
  v1::AttachFrame frame;
  ASSERT_TRUE(frame.ParseFromArray(bytes, static_cast<int>(size)));
  auto peer = server_->Claim(frame.welcome().nonce());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->process->peer.pid(), trainer);
  ::kill(trainer, SIGKILL);
  EXPECT_EQ(gone_.Take(), peer->id);
  ::waitpid(trainer, nullptr, 0);
  for (const int fd : {nonce_pipe[0], nonce_pipe[1], life_pipe[0], life_pipe[1]}) ::close(fd);
}

TEST_F(AttachServerTest, ClosedByTheDaemonIsNotReported) {
  Start();
  const Trainer trainer = ClaimedTrainer();
  server_->Close(trainer.peer.id);
  EXPECT_TRUE(EndComes(trainer.socket.get()));
  // A later end is seen by the same thread: had the first been reported, it would be there too.
  Trainer other = ClaimedTrainer();
  other.socket.Reset();
  EXPECT_EQ(gone_.Take(), other.peer.id);
  EXPECT_EQ(gone_.size(), 0);
  server_->Close(trainer.peer.id);
}

TEST_F(AttachServerTest, TrainerThatSpeaksIsClosed) {
  Start();
  const Trainer trainer = ClaimedTrainer();
  ASSERT_EQ(::send(trainer.socket.get(), "hello", 5, 0), 5);
  EXPECT_EQ(gone_.Take(), trainer.peer.id);
  EXPECT_TRUE(EndComes(trainer.socket.get()));
}

TEST_F(AttachServerTest, TrainerThatDoesNotReadIsClosedAndNobodyBlocks) {
  Start();
  const Trainer trainer = ClaimedTrainer();
  v1::AttachFrame frame;
  frame.mutable_welcome()->set_nonce(std::string(60'000, 'n'));
  absl::Status sent;
  for (int i = 0; i < 10'000 && sent.ok(); ++i) sent = server_->Send(trainer.peer.id, frame);
  EXPECT_EQ(ReasonOf(sent), "TRAINER_LOST") << sent;
  EXPECT_THAT(std::string(sent.message()), HasSubstr(std::to_string(::getpid())));
  EXPECT_EQ(gone_.Take(), trainer.peer.id);
}

TEST_F(AttachServerTest, UserWhoIsNotAllowedGetsNothing) {
  Start({.allowed_uids = {::geteuid() + 1}});
  const wire::UniqueFd socket = Connect();
  ASSERT_TRUE(socket.valid());
  EXPECT_FALSE(wire::ReceivePacket(socket.get()).ok());
}

TEST_F(AttachServerTest, MoreConnectionsThanAllowedAreClosed) {
  Start({.limits = {.all = 2}});
  const Trainer first = ClaimedTrainer();
  Trainer second = ClaimedTrainer();
  {
    const wire::UniqueFd third = Connect();
    EXPECT_FALSE(wire::ReceivePacket(third.get()).ok());
  }
  second.socket.Reset();
  ASSERT_EQ(gone_.Take(), second.peer.id);
  const Trainer fourth = ClaimedTrainer();
  EXPECT_GT(fourth.peer.id, second.peer.id) << "ids are not used again";
}

// However many connect and say nothing: who claims at once gets in.
TEST_F(AttachServerTest, TheOldestThatIsNotClaimedMakesRoom) {
  Start({.limits = {.all = 8, .per_holder = 4, .strangers_per_holder = 2}});
  const Trainer first = ClaimedTrainer();
  const wire::UniqueFd oldest = Connect();
  ReadNonce(oldest.get());
  const wire::UniqueFd silent = Connect();
  const std::string nonce = ReadNonce(silent.get());
  const Trainer second = ClaimedTrainer();
  EXPECT_FALSE(wire::ReceivePacket(oldest.get()).ok()) << "it still holds its place";
  EXPECT_TRUE(server_->Claim(nonce).ok());
  const Trainer fourth = ClaimedTrainer();
  const wire::UniqueFd fifth = Connect();
  EXPECT_FALSE(wire::ReceivePacket(fifth.get()).ok()) << "its user has four that are claimed";
}

TEST_F(AttachServerTest, SocketHasTheModeAskedFor) {
  for (const mode_t mode : {0600U, 0660U}) {
    Start({.mode = mode});
    struct stat status {};
    ASSERT_EQ(::stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, mode);
    server_.reset();
    EXPECT_NE(::stat(path_.c_str(), &status), 0) << "removed at the end";
  }
}

TEST_F(AttachServerTest, PathInUseIsNamed) {
  WriteFile(path_, "");
  const absl::Status status = AttachServer::Start({.path = path_}, {}).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
}

TEST_F(AttachServerTest, TwoHundredSessionsLeaveNoDescriptorBehind) {
  Start();
  { const Trainer warm_up = ClaimedTrainer(); }
  ASSERT_TRUE(gone_.Take().has_value());
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 200; ++i) {
    Trainer trainer = ClaimedTrainer();
    if (i % 2 == 0) {
      trainer.socket.Reset();
      ASSERT_EQ(gone_.Take(), trainer.peer.id);
    } else {
      server_->Close(trainer.peer.id);
    }
  }
  // The thread lets go of what it polled when it looks again: make it look.
  Trainer last = ClaimedTrainer();
  last.socket.Reset();
  ASSERT_EQ(gone_.Take(), last.peer.id);
  Trainer look_again = ClaimedTrainer();
  look_again.socket.Reset();
  ASSERT_EQ(gone_.Take(), look_again.peer.id);
  // The two trainers here hold their pidfds; the thread may hold as many.
  EXPECT_LE(OpenDescriptors(), before + 4);
}

}  // namespace
}  // namespace dmuond::server
