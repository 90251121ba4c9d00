// Connections between daemons: who is proven and who is not, with TLS and without; what the thread
// behind a TLS connection carries, and how it ends.
#include "server/daemon/group/peer_connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/group/tcp.h"
#include "tests/server/certificates.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using wire::UniqueFd;

constexpr char kSecret[] = "the secret of the group's daemons";

Patience Soon() { return {.until = std::chrono::steady_clock::now() + std::chrono::seconds(10)}; }

// One daemon's.
class End {
 public:
  explicit End(int32_t node, PeerProofs proofs, const TlsFiles& files = {})
      : proofs_(std::move(proofs)),
        credentials_(*PeerCredentials::Make(files, /*allow_plaintext=*/true, "", "")),
        connections_(node, proofs_, *credentials_) {}
  PeerConnections* operator->() { return &connections_; }
  PeerCredentials& credentials() { return *credentials_; }

 private:
  const PeerProofs proofs_;
  const std::unique_ptr<PeerCredentials> credentials_;
  PeerConnections connections_;
};

PeerProofs Secret(const char* secret = kSecret) { return {PeerSecret(secret), {}}; }
PeerProofs Names() { return {std::nullopt, {"node0.cluster", "node1.cluster"}}; }

// A port on which the next connection is proven by `end`.
class Door {
 public:
  explicit Door(End& end) : listener_(*ListenTcp("127.0.0.1:0")) {
    proven_ = std::async(std::launch::async, [this, &end] {
      EXPECT_TRUE(Soon().WaitFor(listener_.socket.get(), POLLIN).ok());
      return end->Prove(UniqueFd(
          ::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
    });
  }
  [[nodiscard]] std::string address() const { return absl::StrCat("127.0.0.1:", listener_.port); }
  absl::StatusOr<PeerConnections::Proven> Proven() { return proven_.get(); }

 private:
  TcpListener listener_;
  std::future<absl::StatusOr<PeerConnections::Proven>> proven_;
};

struct Pair {
  absl::StatusOr<UniqueFd> caller;
  absl::StatusOr<PeerConnections::Proven> callee;
};
Pair Join(End& callee, End& caller, int32_t node = 0) {
  Door door(callee);
  absl::StatusOr<UniqueFd> connected = caller->Connect(door.address(), node);
  return {std::move(connected), door.Proven()};
}

// Until the end of the stream, or all of it.
std::string ReadAll(int fd, size_t bytes) {
  std::string text;
  std::vector<char> some(1 << 16);
  while (text.size() < bytes && Soon().WaitFor(fd, POLLIN).ok()) {
    const ssize_t got = ::recv(fd, some.data(), some.size(), 0);
    if (got <= 0) break;
    text.append(some.data(), static_cast<size_t>(got));
  }
  return text;
}
bool WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    if (!Soon().WaitFor(fd, POLLOUT).ok()) return false;
    const ssize_t put = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (put < 0 && errno != EAGAIN) return false;
    if (put > 0) text.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}
// Whether the other end has ended, and nothing else is to be read.
bool SeesTheEnd(int fd) {
  char one = 0;
  return Soon().WaitFor(fd, POLLIN).ok() && ::recv(fd, &one, 1, 0) <= 0;
}
std::string Text(size_t bytes, unsigned seed) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return text;
}

void ExpectNotProven(const absl::Status& status, const std::string& why) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  EXPECT_EQ(scheduler::ReasonOf(status), "PEER_NOT_PROVEN") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(why));
}

TEST(PeerConnectionsTest, BothEndsKnowTheSecretAndWhichNodesTheyAre) {
  End callee(0, Secret());
  End caller(7, Secret());
  const Pair pair = Join(callee, caller);
  ASSERT_TRUE(pair.caller.ok()) << pair.caller.status();
  ASSERT_TRUE(pair.callee.ok()) << pair.callee.status();
  EXPECT_EQ(pair.callee->node, 7);
  ASSERT_TRUE(WriteAll(pair.caller->get(), "hello"));
  EXPECT_EQ(ReadAll(pair.callee->socket.get(), 5), "hello");
}

TEST(PeerConnectionsTest, WhoeverIsNotOfTheGroupIsToldWhyAndSoAreWe) {
  End callee(0, Secret());
  End another(1, Secret("another secret, as long as the first"));
  const Pair pair = Join(callee, another);
  ExpectNotProven(pair.caller.status(), "does not know the group's secret");
  ExpectNotProven(pair.callee.status(), "who connects as node 1 does not prove itself");
  End caller(1, Secret());
  const Pair misled = Join(callee, caller, /*node=*/2);
  ExpectNotProven(misled.caller.status(), "says that it is node 0");
  ExpectNotProven(misled.callee.status(), "looks for node 2, and this is node 0");
}

TEST(PeerConnectionsTest, WhoSpeaksSomethingElseIsNotHeardOut) {
  End callee(0, Secret());
  const auto says = [&](const std::string& text) {
    Door door(callee);
    const auto stranger = ConnectTcp(door.address(), Soon());
    EXPECT_TRUE(WriteAll(stranger->get(), text));
    ::shutdown(stranger->get(), SHUT_WR);
    return door.Proven().status();
  };
  ExpectNotProven(says("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "does not speak as this daemon");
  ExpectNotProven(says("\x16\x03\x01"), "it speaks TLS, and this daemon does not");
  ExpectNotProven(says("dmuond 1\xff\xff" + std::string(70'000, 'x')), "no message of daemons");
  ExpectNotProven(says(std::string("dmuond 1\0\0", 10)), "no nonce");
  EXPECT_EQ(says("dmuond 1").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(says("").code(), absl::StatusCode::kUnavailable);
}

TEST(PeerConnectionsTest, WhoLeavesWaitsForNobody) {
  End caller(1, Secret());
  const auto silent = ListenTcp("127.0.0.1:0");
  ASSERT_TRUE(silent.ok());
  auto connecting = std::async(std::launch::async, [&] {
    return caller->Connect(absl::StrCat("127.0.0.1:", silent->port), 0).status();
  });
  EXPECT_TRUE(Soon().WaitFor(silent->socket.get(), POLLIN).ok());
  caller->Stop();
  EXPECT_EQ(connecting.get().code(), absl::StatusCode::kCancelled);
  End nobody(1, Secret());
  const absl::Status refused = nobody->Connect("127.0.0.1:1", 0).status();
  EXPECT_THAT(refused.ToString(), AllOf(HasSubstr("127.0.0.1:1"), HasSubstr("refused")));
}

class TlsConnectionsTest : public ::testing::Test {
 protected:
  TlsConnectionsTest() {
    std::signal(SIGPIPE, SIG_IGN);  // as the daemon has it: OpenSSL writes without MSG_NOSIGNAL
  }
  [[nodiscard]] TlsFiles Files(const std::string& certificate,
                               const std::string& trusted = "ours") const {
    return {certificates_.Path(trusted + "-ca.pem"), certificates_.Path(certificate + ".pem"),
            certificates_.Path(certificate + ".key")};
  }
  const testing::Certificates certificates_;
};

TEST_F(TlsConnectionsTest, CertificatesSecretAndNamesAreAllLookedAt) {
  for (const char* name : {"node0", "node1", "other"}) {
    certificates_.IssueNamed(name, absl::StrCat(name, ".cluster"));
  }
  End callee(0, Names(), Files("node0"));
  End caller(1, Names(), Files("node1"));
  const Pair pair = Join(callee, caller);
  ASSERT_TRUE(pair.caller.ok()) << pair.caller.status();
  ASSERT_TRUE(pair.callee.ok()) << pair.callee.status();
  EXPECT_EQ(pair.callee->node, 1);

  End other(1, Names(), Files("other"));
  Pair wrong = Join(callee, other);
  ExpectNotProven(wrong.caller.status(), "'other.cluster', not 'node1.cluster'");
  ExpectNotProven(wrong.callee.status(), "'other.cluster', not 'node1.cluster'");
  End false_callee(0, Names(), Files("other"));
  ExpectNotProven(Join(false_callee, caller).caller.status(),
                  "'other.cluster', not 'node0.cluster'");

  End with_secret(0, Secret(), Files("ours"));
  End of_another_authority(1, Secret(), Files("theirs"));
  wrong = Join(with_secret, of_another_authority);
  EXPECT_FALSE(wrong.caller.ok());
  EXPECT_THAT(wrong.callee.status().ToString(), HasSubstr("unable to get local issuer"));
  certificates_.IssueNamed("text", "127.0.0.1");  // a DNS name, whatever it looks like
  End by_text(0, {std::nullopt, {"127.0.0.1", "node1.cluster"}}, Files("text"));
  End of_names(1, {std::nullopt, {"127.0.0.1", "node1.cluster"}}, Files("node1"));
  ExpectNotProven(Join(by_text, of_names).caller.status(), "has the names '', not '127.0.0.1'");
  End by_address(0, {std::nullopt, {"127.0.0.1", "node1.cluster"}}, Files("ours"));
  EXPECT_TRUE(Join(by_address, of_names).caller.ok());
  End of_another_host(0, Secret(), Files("node0"));  // its certificate is not for 127.0.0.1
  End right(1, Secret(), Files("ours"));
  EXPECT_THAT(Join(of_another_host, right).caller.status().ToString(),
              HasSubstr("IP address mismatch"));
  End with_another_secret(1, Secret("another secret, as long as the first"), Files("ours"));
  ExpectNotProven(Join(with_secret, with_another_secret).caller.status(), "the group's secret");
  End plain(1, Secret());
  wrong = Join(with_secret, plain);
  EXPECT_FALSE(wrong.caller.ok());
  ExpectNotProven(wrong.callee.status(), "it does not speak TLS, and this daemon does");
  EXPECT_FALSE(Join(plain, right).caller.ok());
  EXPECT_TRUE(Join(with_secret, right).caller.ok());
}

TEST_F(TlsConnectionsTest, LargeMessagesCrossBothWaysAndEachHalfClosesByItself) {
  End callee(0, Secret(), Files("ours"));
  End caller(1, Secret(), Files("ours"));
  const Pair pair = Join(callee, caller);
  ASSERT_TRUE(pair.caller.ok() && pair.callee.ok()) << pair.caller.status();
  const std::string there = Text(5'000'003, 1);
  const std::string back = Text(7'000'001, 2);
  const auto writes = [](int fd, const std::string& text) {
    return std::async(std::launch::async, [fd, &text] {
      const bool written = WriteAll(fd, text);
      ::shutdown(fd, SHUT_WR);
      return written;
    });
  };
  auto sends = writes(pair.caller->get(), there);
  auto answers = writes(pair.callee->socket.get(), back);
  auto reads = std::async(std::launch::async, [&] { return ReadAll(pair.caller->get(), 1 << 30); });
  EXPECT_TRUE(ReadAll(pair.callee->socket.get(), 1 << 30) == there);
  EXPECT_TRUE(reads.get() == back);
  EXPECT_TRUE(sends.get() && answers.get());

  // One half has ended, and the other one goes on.
  const Pair again = Join(callee, caller);
  ASSERT_TRUE(again.caller.ok() && again.callee.ok());
  ::shutdown(again.caller->get(), SHUT_WR);
  EXPECT_TRUE(SeesTheEnd(again.callee->socket.get()));
  auto late = writes(again.callee->socket.get(), there);
  EXPECT_TRUE(ReadAll(again.caller->get(), 1 << 30) == there);
  EXPECT_TRUE(late.get());
}

TEST_F(TlsConnectionsTest, TheDeathOfEitherEndIsSeenAtTheOther) {
  End caller(1, Secret(), Files("ours"));
  std::optional<End> callee(std::in_place, 0, Secret(), Files("ours"));
  Pair pair = Join(*callee, caller);
  ASSERT_TRUE(pair.caller.ok() && pair.callee.ok());
  pair.caller->Reset();
  EXPECT_TRUE(SeesTheEnd(pair.callee->socket.get()));
  pair = Join(*callee, caller);
  ASSERT_TRUE(pair.caller.ok() && pair.callee.ok());
  callee.reset();  // without a word, as a process that is killed
  EXPECT_TRUE(SeesTheEnd(pair.caller->get()));
}

TEST_F(TlsConnectionsTest, NewFilesAreForNewConnections) {
  const auto now = [&](const std::string& name) {
    for (const char* end : {"-ca.pem", ".pem", ".key"}) {
      std::filesystem::copy_file(certificates_.Path(name + end),
                                 certificates_.Path(absl::StrCat("now", end)),
                                 std::filesystem::copy_options::overwrite_existing);
    }
  };
  now("ours");
  End callee(0, Secret(), Files("now", "now"));
  End caller(1, Secret(), Files("ours"));
  End renewed(2, Secret(), Files("theirs", "theirs"));
  const Pair old = Join(callee, caller);
  ASSERT_TRUE(old.caller.ok() && old.callee.ok());
  EXPECT_FALSE(Join(callee, renewed).caller.ok());
  now("theirs");
  ASSERT_TRUE(callee.credentials().Reload().ok());
  EXPECT_FALSE(Join(callee, caller).caller.ok());
  EXPECT_TRUE(Join(callee, renewed).caller.ok());
  ASSERT_TRUE(WriteAll(old.caller->get(), "still here"));
  EXPECT_EQ(ReadAll(old.callee->socket.get(), 10), "still here");
}

}  // namespace
}  // namespace dmuond::server
