// Who reaches the ports of a group's daemons and is none of them: any user of the machine, on
// loopback too. It reads and writes no state, takes no seat, is told nothing, and keeps nobody out.
#include <fcntl.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/server_posix.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/group/direct_calls.h"
#include "server/daemon/group/openssl_objects.h"
#include "server/daemon/group/peer_stream.h"
#include "server/daemon/group/tcp.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainers.h"
#include "tests/sanitized.h"
#include "tests/server/certificates.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/fake_member.h"
#include "tests/server/system/one_matrix.h"
#include "tests/server/system/peer_client.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using client::Session;

// Whatever strangers do, the daemon grows by less. The address sanitizer keeps 256 MiB of what is
// freed.
constexpr int64_t kGrowthKibMax = (kSanitized ? 320 : 64) << 10;

class PeerStrangersTest : public DaemonTest {
 protected:
  // `flags`: of all daemons.
  explicit PeerStrangersTest(std::vector<std::string> flags = {}, server::TlsFiles files = {})
      : flags_(std::move(flags)), files_(std::move(files)) {}
  void SetUp() override { StartDaemon({.flags = Flags(0), .wait_for = "live"}); }
  std::vector<std::string> Flags(int node) {
    std::vector<std::string> all = GroupFlags(node, 2, coordinator_);
    all.insert(all.end(), flags_.begin(), flags_.end());
    return all;
  }
  std::unique_ptr<DaemonProcess> StartMember(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> all = Flags(1);
    all.insert(all.end(), flags.begin(), flags.end());
    auto member = DaemonProcess::Start({.flags = all, .wait_for = "live"});
    EXPECT_TRUE(member.ok()) << member.status();
    return *std::move(member);
  }
  int64_t PeakKib() {
    std::ifstream status(absl::StrCat("/proc/", daemon_->pid(), "/status"));
    std::string word;
    while (status >> word && word != "VmHWM:") {
    }
    int64_t kib = 0;
    status >> kib;
    return kib;
  }
  int64_t Threads() {
    const std::filesystem::directory_iterator tasks(
        absl::StrCat("/proc/", daemon_->pid(), "/task"));
    return std::distance(begin(tasks), end(tasks));
  }
  // A member joins within this time, if not at once: an address begins only so many connections in
  // a second.
  void ExpectJoinsWithin(std::chrono::milliseconds time) {
    const auto deadline = std::chrono::steady_clock::now() + time;
    bool formed = false;
    while (!formed && std::chrono::steady_clock::now() < deadline) {
      FakeMember member(coordinator_, std::chrono::seconds(30), files_);
      member.Join(FakeMember::RightJoin());
      const auto next = member.Next();
      formed = next.has_value() && next->has_join();
    }
    EXPECT_TRUE(formed);
  }
  void ExpectAFloodHoldsFewThreads();
  void ExpectThousandsAreSurvived();

  const std::string coordinator_ = FreeAddress();
  const std::vector<std::string> flags_;
  const server::TlsFiles files_;
};

// Who speaks to the port as he likes.
class Stranger {
 public:
  explicit Stranger(const std::string& address)
      : socket_(server::ConnectTcp(address, Soon()).value_or(wire::UniqueFd())) {}
  // False: the daemon hears no more.
  bool Say(absl::string_view text) {
    while (!text.empty()) {
      if (!Soon().WaitFor(socket_.get(), POLLOUT).ok()) return false;
      const ssize_t put = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
      if (put < 0) return false;
      text.remove_prefix(static_cast<size_t>(put));
    }
    return true;
  }
  // What the daemon says until it closes the connection, or has said so much.
  std::string Hear(size_t bytes = 1 << 20) {
    std::string heard;
    char one = 0;
    while (heard.size() < bytes && Soon().WaitFor(socket_.get(), POLLIN).ok() &&
           ::recv(socket_.get(), &one, 1, 0) == 1) {
      heard.push_back(one);
    }
    return heard;
  }
  // What comes next; empty: nothing more does.
  std::string HearSome() {
    std::string some(1 << 14, '\0');
    const bool comes = Soon().WaitFor(socket_.get(), POLLIN).ok();
    const ssize_t got = comes ? ::recv(socket_.get(), some.data(), some.size(), 0) : 0;
    some.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return some;
  }
  static std::string Message(const google::protobuf::MessageLite& message) {
    const std::string body = message.SerializeAsString();
    return std::string({static_cast<char>(body.size() >> 8), static_cast<char>(body.size())}) +
           body;
  }
  static server::Patience Soon() {
    return {.until = std::chrono::steady_clock::now() + std::chrono::seconds(10)};
  }

 private:
  const wire::UniqueFd socket_;
};
v1::PeerHello RightHello() {
  v1::PeerHello hello;
  hello.set_node(1);
  hello.set_nonce(server::NewNonce());
  return hello;
}

TEST_F(PeerStrangersTest, NobodyTakesANodesSeatWithoutTheSecret) {
  PeerClient another(1, {server::PeerSecret("another secret, which is as long"), {}});
  ExpectRefused(another.Connect(coordinator_).status(),
                {StatusCode::kUnauthenticated, "PEER_NOT_PROVEN", {"the group's secret"}});

  // What it was sent is not what it must send.
  Stranger reflects(coordinator_);
  ASSERT_TRUE(reflects.Say("dmuond 1" + Stranger::Message(RightHello())));
  const std::string greeting = reflects.Hear(10);
  v1::PeerChallenge challenge;
  ASSERT_TRUE(challenge.ParseFromString(reflects.Hear(static_cast<uint8_t>(greeting.back()))));
  v1::PeerAnswer answer;
  answer.set_proof(challenge.proof());
  ASSERT_TRUE(reflects.Say(Stranger::Message(answer)));
  EXPECT_THAT(reflects.Hear(), ::testing::HasSubstr("who connects as node 1 has another secret"));

  Stranger skips(coordinator_);
  const std::string http2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  ASSERT_TRUE(skips.Say("dmuond 1" + Stranger::Message(RightHello()) + http2));
  const std::string all = skips.Hear();
  EXPECT_THAT(all, ::testing::StartsWith("dmuond 1"));
  EXPECT_LT(all.size(), 100) << "one challenge, and nothing of HTTP/2";
  Stranger speaks_http2(coordinator_);
  ASSERT_TRUE(speaks_http2.Say(http2));
  EXPECT_EQ(speaks_http2.Hear(), "");

  // A node of the group is that one, whatever it says later.
  FakeMember other_node(coordinator_);
  other_node.Connect(5);
  v1::JoinRequest far = FakeMember::RightJoin();
  far.set_epoch(std::numeric_limits<uint32_t>::max());
  other_node.Join(far);
  ExpectRefused(other_node.Finish(),
                {StatusCode::kUnauthenticated, "PEER_NOT_PROVEN", {"node 1", "as node 5"}});

  // Nothing of all that has counted: the right one gets the seat, and the first epoch.
  FakeMember member(coordinator_);
  member.Join(FakeMember::RightJoin());
  const auto formed = member.Next();
  ASSERT_TRUE(formed.has_value() && formed->has_join());
  EXPECT_EQ(formed->join().epoch(), 1);
}

TEST_F(PeerStrangersTest, ADaemonWithAnotherSecretJoinsNoGroupAndSaysWhy) {
  const std::string file = ::testing::TempDir() + "/another-secret";
  {
    const wire::UniqueFd made(::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::string text = "another secret, which is as long as the group's own";
    ASSERT_EQ(::write(made.get(), text.data(), text.size()), std::ssize(text));
  }
  const auto member = StartMember({"--peer_secret_file=" + file});
  EXPECT_TRUE(member->WaitLogged("does not know the group's secret")) << member->Log();
  EXPECT_TRUE(daemon_->WaitLogged("who connects as node 1 does not prove itself"))
      << daemon_->Log();
  EXPECT_FALSE(member->WaitServing("ready", std::chrono::milliseconds(10)).ok());
  std::filesystem::remove(file);
}

// In the place of a coordinator that is gone, who does not know the secret.
TEST_F(PeerStrangersTest, AMemberTellsNothingToACoordinatorThatIsNotProven) {
  daemon_->Kill();
  const auto listener = server::ListenTcp(coordinator_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const auto member = StartMember();
  const server::Patience soon = Stranger::Soon();
  ASSERT_TRUE(soon.WaitFor(listener->socket.get(), POLLIN).ok());
  server::PlainStream stream(wire::UniqueFd(::accept4(listener->socket.get(), nullptr, nullptr,
                                                      SOCK_CLOEXEC | SOCK_NONBLOCK)),
                             soon);
  std::string hello(10, '\0');
  ASSERT_TRUE(stream.Read(hello.data(), hello.size()).ok());
  hello.resize(static_cast<uint8_t>(hello.back()));
  ASSERT_TRUE(stream.Read(hello.data(), hello.size()).ok());
  v1::PeerHello said;
  ASSERT_TRUE(said.ParseFromString(hello));
  EXPECT_EQ(said.node(), 1);
  v1::PeerChallenge challenge;
  challenge.set_nonce(server::NewNonce());
  challenge.set_proof(said.nonce());
  ASSERT_TRUE(stream.Write("dmuond 1" + Stranger::Message(challenge)).ok());
  char more = 0;
  EXPECT_EQ(stream.Read(&more, 1).code(), StatusCode::kUnavailable) << "it has said more";
  EXPECT_TRUE(member->WaitLogged("does not know the group's secret")) << member->Log();
}

void PeerStrangersTest::ExpectAFloodHoldsFewThreads() {
  const int64_t before = Threads();
  std::deque<Stranger> flood;
  for (int i = 0; i < 200; ++i) flood.emplace_back(coordinator_);
  EXPECT_EQ(flood[0].Hear(), "") << "the oldest has made room";
  EXPECT_LT(Threads(), before + 110);  // 68 strangers, 32 that end, one that waits
  ExpectJoinsWithin(std::chrono::seconds(3));
}

TEST_F(PeerStrangersTest, AFloodOfThemHoldsFewThreadsAndKeepsNobodyOut) {
  ExpectAFloodHoldsFewThreads();
}

// More than it has descriptors for, in a moment: an address begins only so many in a second.
void PeerStrangersTest::ExpectThousandsAreSurvived() {
  const rlimit few{512, 512};
  ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  std::deque<Stranger> flood;
  for (int i = 0; i < 900; ++i) flood.emplace_back(coordinator_);
  ExpectJoinsWithin(std::chrono::seconds(3));
  const std::string log = daemon_->Log();
  EXPECT_THAT(log, ::testing::HasSubstr("others_since_the_last_line="));
  size_t lines = 0;
  for (size_t at = log.find("connection refused"); at != log.npos;
       at = log.find("connection refused", at + 1)) {
    ++lines;
  }
  EXPECT_LE(lines, 5) << log;
}

TEST_F(PeerStrangersTest, ThousandsOfConnectionsAreSurvived) { ExpectThousandsAreSurvived(); }

// What a frame of HTTP/2 looks like.
std::string Frame(char type, char flags, uint32_t stream, absl::string_view body) {
  std::string frame;
  for (const uint32_t shift : {16U, 8U, 0U})
    frame.push_back(static_cast<char>(body.size() >> shift));
  frame += {type, flags};
  for (const uint32_t shift : {24U, 16U, 8U, 0U})
    frame.push_back(static_cast<char>(stream >> shift));
  return frame.append(body.data(), body.size());
}

// Each of these takes gigabytes, or all of the time, of a gRPC of 2022 that hears them out.
TEST_F(PeerStrangersTest, WhatBringsHttp2DownReachesNoHttp2) {
  const std::string begin = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(4, 0, 0, "");
  constexpr size_t kFrameBytes = 16'384;
  // A header of 4,000 bytes goes into the table, and a byte each brings it 16,000 times.
  const std::string bomb =
      Frame(1, 4, 1, std::string("\x40\x01x\x7f\xa1\x1e", 6) + std::string(4'000, 'a')) +
      Frame(1, 0, 3, std::string(kFrameBytes, '\xbe'));
  const std::string more_bomb = Frame(9, 0, 3, std::string(kFrameBytes, '\xbe'));
  const std::string continued = Frame(9, 0, 1, std::string(kFrameBytes, '\0'));
  std::string reset;
  for (uint32_t stream = 1; stream < 2'000; stream += 2) {
    reset += Frame(1, 4, stream, "\x82") + Frame(3, 0, stream, std::string(4, '\0'));
  }
  const int64_t before = PeakKib();
  for (const auto& [first, then] :
       {std::pair{bomb, more_bomb}, {Frame(1, 0, 1, ""), continued}, {reset, reset}}) {
    std::deque<Stranger> four;
    for (int i = 0; i < 4; ++i) four.emplace_back(coordinator_);
    for (Stranger& one : four) {
      bool hears = one.Say(begin) && one.Say(first);
      for (int i = 0; hears && i < 1'000; ++i) hears = one.Say(then);
      EXPECT_FALSE(hears);
    }
  }
  EXPECT_GT(before, 0);
  EXPECT_LT(PeakKib() - before, kGrowthKibMax);
  const auto member = StartMember();
  const absl::Status ready = member->WaitServing("ready", std::chrono::seconds(5));
  EXPECT_TRUE(ready.ok()) << ready;
}

// ---- with TLS ----

class TlsStrangersTest : public PeerStrangersTest {
 protected:
  TlsStrangersTest() : PeerStrangersTest(Authority().Flags("ours", "ours"), Files("ours")) {
    std::signal(SIGPIPE, SIG_IGN);  // as the daemon has it: OpenSSL writes without MSG_NOSIGNAL
  }
  static const Certificates& Authority() {
    static const Certificates certificates;
    return certificates;
  }
  static server::TlsFiles Files(const std::string& certificate) {
    return {Authority().Path("ours-ca.pem"), Authority().Path(certificate + ".pem"),
            Authority().Path(certificate + ".key")};
  }
};

// Who speaks TLS to the port, with this certificate or, where it is empty, none.
class TlsStranger {
 public:
  TlsStranger(const std::string& address, const server::TlsFiles& files) : wire_(address) {
    SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
    if (!files.certificate.empty()) {
      SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str());
      SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM);
    }
    ssl_.reset(SSL_new(context));
    SSL_CTX_free(context);
    SSL_set_bio(ssl_.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_connect_state(ssl_.get());
  }
  Stranger& wire() { return wire_; }
  // The beginning of a handshake, which is not sent.
  std::string Hello() {
    SSL_do_handshake(ssl_.get());
    return Written();
  }
  // As far as this end knows: it does not hear yet whether its certificate is taken.
  bool ShakesHands() {
    while (SSL_do_handshake(ssl_.get()) != 1) {
      if (!wire_.Say(Written())) return false;
      const std::string heard = wire_.HearSome();
      if (heard.empty()) return false;
      BIO_write(SSL_get_rbio(ssl_.get()), heard.data(), static_cast<int>(heard.size()));
    }
    return wire_.Say(Written());
  }
  bool Say(const std::string& text) {
    return SSL_write(ssl_.get(), text.data(), static_cast<int>(text.size())) > 0 &&
           wire_.Say(Written());
  }
  // Asks for other keys, and for an answer, which it does not read.
  bool AsksForKeys() {
    SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_REQUESTED);
    return SSL_do_handshake(ssl_.get()) == 1 && wire_.Say(Written());
  }

 private:
  std::string Written() {
    std::string text(BIO_ctrl_pending(SSL_get_wbio(ssl_.get())), '\0');
    BIO_read(SSL_get_wbio(ssl_.get()), text.data(), static_cast<int>(text.size()));
    return text;
  }
  Stranger wire_;
  server::Ssl ssl_;
};

TEST_F(TlsStrangersTest, AFloodOfThemHoldsFewThreadsAndKeepsNobodyOut) {
  ExpectAFloodHoldsFewThreads();
}

TEST_F(TlsStrangersTest, ThousandsOfConnectionsAreSurvived) { ExpectThousandsAreSurvived(); }

// As PeerDescriptorsMax() has it.
TEST_F(TlsStrangersTest, AConnectionTakesFiveDescriptors) {
  const auto descriptors = [&] {
    const std::filesystem::directory_iterator open(absl::StrCat("/proc/", daemon_->pid(), "/fd"));
    return std::distance(begin(open), end(open));
  };
  PeerClient client(1, {server::PeerSecret(kGroupSecret), {}}, files_);
  std::vector<wire::UniqueFd> connections;
  const auto add = [&](int count) {
    for (int i = 0; i < count; ++i) {
      auto connected = client.connections().Connect(coordinator_, 0);
      ASSERT_TRUE(connected.ok()) << connected.status();
      connections.push_back(*std::move(connected));
    }
  };
  // gRPC has them when it speaks.
  const auto all_speak = [&] {
    for (const wire::UniqueFd& one : connections) {
      ASSERT_TRUE(Stranger::Soon().WaitFor(one.get(), POLLIN).ok());
    }
  };
  add(1);
  all_speak();
  const auto before = descriptors();
  add(10);
  all_speak();
  EXPECT_EQ((descriptors() - before) / 10, 5) << "the daemon may open one for itself meanwhile";
}

TEST_F(TlsStrangersTest, NoHandshakeTakesMemoryOrTimeAndNobodyIsKeptOut) {
  // A certificate of the group's authority, and no secret: it has five seconds, whatever it says.
  TlsStranger keys(coordinator_, files_);
  ASSERT_TRUE(keys.ShakesHands());
  std::thread asks([&] {
    while (keys.AsksForKeys()) {
    }
  });
  const int64_t before = PeakKib();
  constexpr size_t kRecordBytes = 16'384;
  const auto record = [](char type, const std::string& body) {
    return std::string{type, 3, 3, static_cast<char>(body.size() >> 8),
                       static_cast<char>(body.size())} +
           body;
  };
  const std::string hello = TlsStranger(coordinator_, {}).Hello();
  const std::string zeros(kRecordBytes, '\0');
  for (const auto& [what, first, then] : {
           std::tuple("a hello of 16 MB", record(22, std::string("\1\xff\xff\xff", 4)),
                      record(22, zeros)),
           std::tuple("one hello after the other", hello, hello),
           std::tuple("changes of ciphers", hello, record(20, "\1")),
           std::tuple("warnings", hello, record(21, std::string("\1\0", 2))),
           std::tuple("handshakes of no bytes", hello, record(22, "")),
           std::tuple("data before its time", hello, record(23, zeros)),
       }) {
    std::deque<Stranger> four;
    for (int i = 0; i < 4; ++i) four.emplace_back(coordinator_);
    for (Stranger& one : four) {
      bool hears = one.Say(first);
      for (int i = 0; hears && i < 1'000; ++i) hears = one.Say(then);
      const auto began = std::chrono::steady_clock::now();
      one.Hear();
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(3))
          << what << ": it waits for the end of its patience";
    }
  }
  // As large as OpenSSL takes one, and never whole.
  std::deque<Stranger> large;
  for (int i = 0; i < 64; ++i) {
    large.emplace_back(coordinator_);
    bool hears = large.back().Say(record(22, std::string("\1\1\xff\0", 4)));
    for (int j = 0; hears && j < 7; ++j) hears = large.back().Say(record(22, zeros));
    EXPECT_TRUE(hears) << i;
  }
  EXPECT_GT(before, 0);
  EXPECT_LT(PeakKib() - before, kGrowthKibMax);
  // Whole handshakes: of nobody, of another authority, and of one who then does not say what a
  // daemon says.
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(TlsStranger(coordinator_, {}).ShakesHands());
    TlsStranger theirs(coordinator_, Files("theirs"));
    EXPECT_TRUE(theirs.ShakesHands());
    EXPECT_EQ(theirs.wire().Hear().find("dmuond"), std::string::npos);
    TlsStranger talks(coordinator_, files_);
    EXPECT_TRUE(talks.ShakesHands());
    EXPECT_TRUE(talks.Say("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
    talks.wire().Hear();
  }
  EXPECT_LT(PeakKib() - before, kGrowthKibMax);
  ExpectJoinsWithin(std::chrono::seconds(2));
  asks.join();
}

// ---- who is proven, and says what is wrong ----

TEST_F(PeerStrangersTest, AnEpochNearTheEndOfThemAndAMessageBeyondTheQuotaAreRefusedByName) {
  {
    FakeMember member(coordinator_);
    v1::JoinRequest join = FakeMember::RightJoin();
    join.set_epoch(std::numeric_limits<uint32_t>::max());
    member.Join(join);
    ExpectRefused(
        member.Finish(),
        {StatusCode::kFailedPrecondition, "EPOCH_EXHAUSTED", {"node 1", "epoch 4294967295"}});
  }
  FakeMember member(coordinator_);
  member.Join(FakeMember::RightJoin());
  ASSERT_TRUE(member.Next().has_value());
  v1::MemberMessage first;
  first.mutable_part()->set_data(std::string(1000, 'x'));
  first.mutable_part()->set_total(int64_t{1} << 40);
  member.Send(first);
  ExpectRefused(member.Finish(), {StatusCode::kResourceExhausted,
                                  "PEER_MESSAGE_TOO_LARGE",
                                  {"1099511627776 bytes", "--peer_message_bytes_max"}});
}

// ---- calls for state ----

TEST(PeerStrangersCallsTest, NobodyReadsOrWritesStateWithoutTheSecret) {
  const std::string coordinator = FreeAddress();
  auto group = StartGroup(2, "cpu:1", {"--threads=1"}, coordinator);
  ASSERT_TRUE(group.ok()) << group.status();
  auto session = Session::Open({.address = (*group)[1]->address()});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->Register(OneMatrix(1)).ok());
  ASSERT_TRUE((*session)->Attach().ok());
  FillOneMatrix(**session);
  ASSERT_TRUE((*session)->Push().ok());

  // Whose connection is proven, but not what is said on it: he may sit on the way.
  PeerClient caller(1);
  const auto channel = caller.Connect(coordinator);
  ASSERT_TRUE(channel.ok()) << channel.status();
  const auto stub = v1::Direct::NewStub(*channel);
  v1::ReadStateRequest read;
  read.set_job_incarnation(1);
  read.set_kind(v1::STATE_KIND_MASTER);
  v1::WriteStateRequest write;
  write.set_job_incarnation(1);
  write.set_attempt(std::numeric_limits<uint64_t>::max());  // all later ones would be older
  write.set_kind(v1::STATE_KIND_STEP);
  write.set_data(std::string(sizeof(double), '\0'));
  for (const bool claims : {false, true}) {
    if (claims) {
      for (v1::PeerProof* proof : {read.mutable_proof(), write.mutable_proof()}) {
        proof->set_node(1);
        proof->set_epoch(1);
        proof->set_counter(1);
        proof->set_proof(std::string(32, '\0'));
      }
    }
    grpc::ClientContext reading;
    auto reader = stub->ReadState(&reading, read);
    v1::ReadStateReply part;
    EXPECT_FALSE(reader->Read(&part));
    const Refusal refusal = {StatusCode::kUnauthenticated, "PEER_NOT_PROVEN", {"node 0"}};
    ExpectRefused(server::FromGrpc(reader->Finish()), refusal);
    grpc::ClientContext writing;
    v1::WriteStateReply reply;
    ExpectRefused(server::FromGrpc(stub->WriteState(&writing, write, &reply)), refusal);
  }

  // A load that comes after it is what it says, and not empty.
  const std::vector<float> momentum(8 * 16, 0.25F);
  const absl::Status loaded = (*session)->PushState(
      {{.parameter = 0, .kind = client::StateKind::kMomentum, .values = momentum}});
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ((*session)->Pull(0, client::StateKind::kMomentum).value(), momentum);
}

// In the place of another node, or on the way to it: what it answers does not count, and no write
// passes for done.
class FalseOwner final : public v1::Direct::Service {
 public:
  FalseOwner() : listener_(*server::ListenTcp("127.0.0.1:0")) {
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  [[nodiscard]] std::string address() const { return absl::StrCat("127.0.0.1:", listener_.port); }
  // The next connection is its gRPC's; with `end`, once that has proven it.
  void TakeOne(server::PeerConnections* end) {
    ASSERT_TRUE(Stranger::Soon().WaitFor(listener_.socket.get(), POLLIN).ok());
    wire::UniqueFd socket(
        ::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (end != nullptr) {
      auto proven = end->Prove(std::move(socket));
      ASSERT_TRUE(proven.ok()) << proven.status();
      socket = std::move(proven->socket);
    }
    grpc::AddInsecureChannelFromFd(server_.get(), socket.Release());
  }
  // Somebody else has connected.
  [[nodiscard]] bool HasAnother() const {
    pollfd polled{listener_.socket.get(), POLLIN, 0};
    return ::poll(&polled, 1, 0) > 0;
  }
  grpc::Status ReadState(grpc::ServerContext* /*context*/, const v1::ReadStateRequest* /*request*/,
                         grpc::ServerWriter<v1::ReadStateReply>* writer) override {
    v1::ReadStateReply reply;
    reply.set_data(std::string(8 * sizeof(float), '\0'));
    writer->Write(reply);
    return grpc::Status::OK;
  }
  grpc::Status WriteState(grpc::ServerContext* /*context*/,
                          const v1::WriteStateRequest* /*request*/,
                          v1::WriteStateReply* /*reply*/) override {
    return grpc::Status::OK;
  }

  // The group of the calls has formed, with this one as node 1.
  void Join(server::DirectCalls& calls) const {
    v1::JoinReply formed;
    formed.set_epoch(1);
    formed.add_peer_addresses("127.0.0.1:9");
    formed.add_peer_addresses(address());
    calls.OnFormed(formed);
  }

 private:
  const server::TcpListener listener_;
  std::unique_ptr<grpc::Server> server_;
};

TEST(PeerStrangersCallsTest, WhoAnswersInAnotherNodesPlaceIsNotBelieved) {
  FalseOwner stranger;
  PeerClient self(0);
  PeerClient other(1);
  server::DirectCalls calls(0, 2, self.connections(), server::PeerSecret(kGroupSecret));
  stranger.Join(calls);
  for (server::PeerConnections* end :
       {static_cast<server::PeerConnections*>(nullptr), &other.connections()}) {
    std::thread takes([&] { stranger.TakeOne(end); });
    ExpectRefused(calls.ReadState(1, v1::ReadStateRequest(), 8).status(),
                  {StatusCode::kUnavailable, "PEER_NOT_PROVEN", {"node 1"}});
    takes.join();
  }
  ExpectRefused(calls.WriteState(1, v1::WriteStateRequest()),
                {StatusCode::kUnavailable, "PEER_NOT_PROVEN", {"node 1"}});
}

// Each made a connection of its own, of which the other end closes all but a few.
TEST(PeerStrangersCallsTest, CallsThatComeAtOnceShareOneConnectionAndTooManyAreRefused) {
  constexpr int kTooMany = 5;
  FalseOwner owner;
  PeerClient self(0);
  PeerClient other(1);
  server::DirectCalls calls(0, 2, self.connections(), server::PeerSecret(kGroupSecret));
  owner.Join(calls);
  std::mutex mutex;
  std::condition_variable refused_one;
  int refused = 0;
  int answered = 0;
  const auto call = [&] {
    const absl::Status status = calls.WriteState(1, v1::WriteStateRequest());
    const std::lock_guard<std::mutex> lock(mutex);
    // The one that is answered does not prove its answers here.
    answered += scheduler::ReasonOf(status) == "PEER_NOT_PROVEN" ? 1 : 0;
    refused += scheduler::ReasonOf(status) == "PEER_CALLS_TOO_MANY" ? 1 : 0;
    refused_one.notify_one();
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 1 + server::DirectCalls::kWaitingMax + kTooMany; ++i) {
    callers.emplace_back(call);
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    EXPECT_TRUE(
        refused_one.wait_for(lock, std::chrono::seconds(30), [&] { return refused == kTooMany; }));
  }
  owner.TakeOne(&other.connections());
  EXPECT_FALSE(owner.HasAnother());
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(answered, 1 + server::DirectCalls::kWaitingMax);
  EXPECT_FALSE(owner.HasAnother());
}

}  // namespace
}  // namespace dmuond::testing
