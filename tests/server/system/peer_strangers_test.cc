// Who reaches the ports of a group's daemons and is none of them: any user of the machine, on
// loopback too. It reads and writes no state, takes no seat, is told nothing, and keeps nobody out.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/mutex.h"
#include "server/common/errors.h"
#include "server/daemon/group/direct_calls.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_test.h"
#include "tests/client/trainers.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/fake_member.h"
#include "tests/server/system/one_matrix.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using client::Session;

class PeerStrangersTest : public DaemonTest {
 protected:
  void SetUp() override {
    StartDaemon({.flags = GroupFlags(0, 2, coordinator_), .wait_for = "live"});
  }
  std::unique_ptr<DaemonProcess> StartMember(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> all = GroupFlags(1, 2, coordinator_);
    all.insert(all.end(), flags.begin(), flags.end());
    auto member = DaemonProcess::Start({.flags = all, .wait_for = "live"});
    EXPECT_TRUE(member.ok()) << member.status();
    return *std::move(member);
  }
  const std::string coordinator_ = FreeAddress();
};

TEST_F(PeerStrangersTest, NobodyTakesANodesSeatWithoutTheSecret) {
  const auto join_with = [](const std::string& nonce) {
    v1::MemberMessage message;
    *message.mutable_join() = FakeMember::RightJoin();
    message.mutable_join()->set_epoch(std::numeric_limits<uint32_t>::max());
    message.mutable_join()->set_nonce(nonce);
    return message;
  };
  const Refusal refusal = {StatusCode::kUnauthenticated, "PEER_NOT_PROVEN", {"node 1"}};
  FakeMember silent(coordinator_);
  silent.Send(join_with(""));
  ExpectRefused(silent.Finish(), refusal);

  // What it was sent is not what it must send.
  FakeMember reflects(coordinator_);
  reflects.Send(join_with(server::NewNonce()));
  const auto question = reflects.Next();
  ASSERT_TRUE(question.has_value() && question->has_peer_challenge());
  v1::MemberMessage answer;
  answer.mutable_peer_answer()->set_proof(question->peer_challenge().proof());
  reflects.Send(answer);
  ExpectRefused(reflects.Finish(), refusal);

  FakeMember skips(coordinator_);
  skips.Send(join_with(server::NewNonce()));
  ASSERT_TRUE(skips.Next().has_value());
  v1::MemberMessage state;
  state.mutable_member_state()->set_epoch(1);
  skips.Send(state);
  ExpectRefused(skips.Finish(), refusal);

  // Nothing of all that has counted: the right one gets the seat, and the first epoch.
  FakeMember member(coordinator_);
  member.Join(FakeMember::RightJoin());
  EXPECT_TRUE(member.proven());
  const auto formed = member.Next();
  ASSERT_TRUE(formed.has_value() && formed->has_join());
  EXPECT_EQ(formed->join().epoch(), 1);
}

TEST_F(PeerStrangersTest, ADaemonWithAnotherSecretJoinsNoGroupAndSaysWhy) {
  const std::string file = ::testing::TempDir() + "/another-secret";
  {
    const wire::UniqueFd made(::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::string text(64, 'z');
    ASSERT_EQ(::write(made.get(), text.data(), text.size()), std::ssize(text));
  }
  const auto member = StartMember({"--peer_secret_file=" + file});
  EXPECT_TRUE(member->WaitLogged("does not know the group's secret")) << member->Log();
  EXPECT_TRUE(daemon_->WaitLogged("who joins as node 1 does not prove itself")) << daemon_->Log();
  EXPECT_FALSE(member->WaitServing("ready", std::chrono::milliseconds(10)).ok());
  std::filesystem::remove(file);
}

// A server in the place of a coordinator that is gone, which does not know the secret.
class FalseCoordinator final : public v1::Peer::Service {
 public:
  explicit FalseCoordinator(const std::string& address) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  grpc::Status Join(
      grpc::ServerContext* /*context*/,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>* stream) override {
    v1::MemberMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    v1::CoordinatorMessage question;
    question.mutable_peer_challenge()->set_nonce(server::NewNonce());
    question.mutable_peer_challenge()->set_proof(message.join().nonce());
    stream->Write(question);
    MutexLock lock(mutex_);
    while (stream->Read(&message)) ++told_;
    return grpc::Status::OK;
  }
  int told() {
    MutexLock lock(mutex_);
    return told_;
  }

 private:
  Mutex mutex_;
  int told_ DMUOND_GUARDED_BY(mutex_) = 0;  // messages of members after their first
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(PeerStrangersTest, AMemberTellsNothingToACoordinatorThatIsNotProven) {
  daemon_->Kill();
  FalseCoordinator stranger(coordinator_);
  const auto member = StartMember();
  EXPECT_TRUE(member->WaitLogged("does not know the group's secret")) << member->Log();
  EXPECT_EQ(stranger.told(), 0);
}

TEST_F(PeerStrangersTest, AFloodOfThemHoldsFewThreadsAndKeepsNobodyOut) {
  const auto threads = [&] {
    const std::filesystem::directory_iterator tasks(
        absl::StrCat("/proc/", daemon_->pid(), "/task"));
    return std::distance(begin(tasks), end(tasks));
  };
  const auto before = threads();
  std::vector<std::unique_ptr<FakeMember>> flood(200);
  for (auto& one : flood) one = std::make_unique<FakeMember>(coordinator_);
  // That the oldest end for the later ones' sake, and not by their time alone, is shown with a
  // clock of its own in peer_proofs_test.
  EXPECT_FALSE(flood[0]->Finish().ok());
  EXPECT_LT(threads(), before + 150);
  FakeMember member(coordinator_);
  member.Join(FakeMember::RightJoin());
  const auto formed = member.Next();
  EXPECT_TRUE(formed.has_value() && formed->has_join());
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

  const auto stub =
      v1::Direct::NewStub(grpc::CreateChannel(coordinator, grpc::InsecureChannelCredentials()));
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

// In the place of a node that is gone: what it answers does not count, and no write passes for
// done.
class FalseOwner final : public v1::Direct::Service {
 public:
  explicit FalseOwner(const std::string& address) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
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

 private:
  std::unique_ptr<grpc::Server> server_;
};

TEST(PeerStrangersCallsTest, WhoAnswersInAnotherNodesPlaceIsNotBelieved) {
  const std::string address = FreeAddress();
  const FalseOwner stranger(address);
  const server::PeerProofs proofs{server::PeerSecret(kGroupSecret), {}};
  const auto credentials = server::PeerCredentials::Make({}, /*allow_plaintext=*/true, "", "");
  ASSERT_TRUE(credentials.ok()) << credentials.status();
  server::DirectCalls calls(0, 2, proofs, **credentials);
  v1::JoinReply formed;
  formed.set_epoch(1);
  formed.add_peer_addresses("127.0.0.1:9");
  formed.add_peer_addresses(address);
  calls.OnFormed(formed);
  ExpectRefused(calls.ReadState(1, v1::ReadStateRequest(), 8).status(),
                {StatusCode::kUnavailable, "PEER_NOT_PROVEN", {"node 1"}});
  ExpectRefused(calls.WriteState(1, v1::WriteStateRequest()),
                {StatusCode::kUnavailable, "PEER_NOT_PROVEN", {"node 1"}});
}

}  // namespace
}  // namespace dmuond::testing
