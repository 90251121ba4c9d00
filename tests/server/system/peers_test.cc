// What crosses from daemon to daemon: over mutual TLS with certificates made here, and optimizer
// state between nodes.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/trainers.h"
#include "tests/server/certificates.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/peer_client.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

namespace fs = std::filesystem;
using client::LayoutBuilder;
using client::Session;
using client::StateKind;

constexpr int32_t kMatrix = 0;
constexpr int32_t kVector = 1;
constexpr size_t kMatrixSize = 24 * 40;

client::Layout TwoParameters(int32_t world) {
  LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix",
               .shape = {24, 40},
               .contribution = client::Contribution::kSame,
               .reduce_factor = 1});
  builder.Add({.name = "vector",
               .shape = {100},
               .route = client::Route::kAdamW,
               .contribution = client::Contribution::kSame,
               .reduce_factor = 1});
  return *builder.Build();
}
void FillWith(std::span<float> values, int seed) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>((i * 7 + seed * 13) % 33) - 16) / 32;
  }
}
client::StepScalars AllScalars() {
  return {.groups = {{.learning_rate = 0.01, .momentum = 0.95, .beta2 = 0.999}}};
}

// All state that a trainer can pull, and its weights.
std::vector<std::vector<float>> PullAll(Session& session) {
  std::vector<std::vector<float>> all;
  for (const auto& [parameter, kind] :
       {std::pair(kMatrix, StateKind::kMaster), std::pair(kMatrix, StateKind::kMomentum),
        std::pair(kMatrix, StateKind::kStep), std::pair(kVector, StateKind::kMaster),
        std::pair(kVector, StateKind::kExpAvg), std::pair(kVector, StateKind::kExpAvgSq),
        std::pair(kVector, StateKind::kStep)}) {
    auto values = session.Pull(parameter, kind);
    EXPECT_TRUE(values.ok()) << values.status();
    all.push_back(values.ok() ? *std::move(values) : std::vector<float>());
  }
  for (const int32_t parameter : {kMatrix, kVector}) {
    const std::span<float> weights = session.Weight<float>(parameter);
    all.emplace_back(weights.begin(), weights.end());
  }
  return all;
}

// One trainer on each node. Two steps, momentum and moments pushed back changed, one more step:
// what every rank pulls afterwards.
std::vector<std::vector<std::vector<float>>> TrainOn(const DaemonGroup& group) {
  const auto world = static_cast<int32_t>(group.size());
  std::vector<std::vector<std::vector<float>>> pulled(world);
  OnEveryRank(world, [&](int32_t rank) {
    auto opened =
        Session::Open({.address = group[rank]->address(), .rank = rank, .world_size = world});
    ASSERT_TRUE(opened.ok()) << opened.status();
    Session& session = **opened;
    const auto registered = session.Register(TwoParameters(world));
    ASSERT_TRUE(registered.ok()) << registered.status();
    ASSERT_TRUE(session.Attach().ok());
    FillWith(session.Weight<float>(kMatrix), 1);
    FillWith(session.Weight<float>(kVector), 2);
    ASSERT_TRUE(session.Push().ok());
    for (int step = 1; step <= 3; ++step) {
      FillWith(session.Gradient<float>(kMatrix), step);
      FillWith(session.Gradient<float>(kVector), step + 1);
      const auto outcome = session.Step(AllScalars());
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      if (step != 2) continue;
      std::vector<float> momentum(kMatrixSize);
      FillWith(momentum, 77);
      const absl::Status loaded = session.PushState(
          {{.parameter = kMatrix, .kind = StateKind::kMomentum, .values = momentum},
           {.parameter = kVector, .kind = StateKind::kStep, .values = {9}},
           {.parameter = kVector, .kind = StateKind::kExpAvg, .values = std::vector(100, 0.125F)}});
      ASSERT_TRUE(loaded.ok()) << loaded;
      EXPECT_EQ(session.Pull(kMatrix, StateKind::kMomentum).value(), momentum);
      EXPECT_EQ(session.Pull(kVector, StateKind::kStep).value(), std::vector<float>{9});
    }
    pulled[rank] = PullAll(session);
    EXPECT_TRUE(session.Close().ok());
  });
  return pulled;
}

TEST(StateAcrossNodesTest, IsTheSameFromEveryNodeAndOnAnyNumberOfThem) {
  std::vector<std::vector<float>> expected;
  for (const int nodes : {1, 2, 3}) {
    auto group = nodes == 1 ? absl::StatusOr<DaemonGroup>(DaemonGroup())
                            : StartGroup(nodes, "cpu:1", {"--threads=1"});
    ASSERT_TRUE(group.ok()) << group.status();
    if (nodes == 1) {
      auto alone = DaemonProcess::Start({.flags = {"--threads=1"}});
      ASSERT_TRUE(alone.ok()) << alone.status();
      group->push_back(*std::move(alone));
    }
    const auto pulled = TrainOn(*group);
    if (nodes == 1) expected = pulled[0];
    for (const auto& rank : pulled) EXPECT_EQ(rank, expected) << nodes << " nodes";
  }
}

std::vector<std::string> Joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class MutualTlsTest : public ::testing::Test {
 protected:
  // Whether node 1 forms a group with the coordinator, or its first attempt to join ends in vain.
  static bool Forms(const std::string& address, const std::vector<std::string>& flags) {
    auto member = DaemonProcess::Start(
        {.flags = Joined(GroupFlags(1, 2, address), flags), .wait_for = "live"});
    EXPECT_TRUE(member.ok()) << member.status();
    return Forms(**member);
  }
  static bool Forms(const DaemonProcess& member) {
    bool formed = false;
    EXPECT_TRUE(DaemonStatus(member.address()).WaitFor([&](const v1::GetStatusReply& status) {
      formed = status.epoch() > 0;
      return formed || absl::StrContains(member.Log(), "joining again");
    })) << member.Log();
    return formed;
  }
  const Certificates certificates_;
};

TEST_F(MutualTlsTest, DaemonsOfOneAuthorityTrainTogether) {
  auto group = StartGroup(2, "cpu:1", Joined({"--threads=1"}, certificates_.Flags("ours", "ours")));
  ASSERT_TRUE(group.ok()) << group.status();
  const auto pulled = TrainOn(*group);
  EXPECT_EQ(pulled[0], pulled[1]);
  EXPECT_FALSE(pulled[0].empty());
}

TEST_F(MutualTlsTest, AnotherAuthorityOrNoneFormsNoGroup) {
  const std::string address = FreeAddress();
  auto coordinator = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, address), certificates_.Flags("ours", "ours")),
       .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  EXPECT_FALSE(Forms(address, certificates_.Flags("theirs", "ours")))
      << "a certificate that nobody knows";
  EXPECT_FALSE(Forms(address, certificates_.Flags("ours", "theirs")))
      << "a coordinator that the member does not trust";
  EXPECT_FALSE(Forms(address, {})) << "plaintext";
  EXPECT_TRUE(Forms(address, certificates_.Flags("ours", "ours")));
}

// Who is no daemon of the group reads no state, certificate or not.
TEST_F(MutualTlsTest, ACallerWithoutCertificateGetsNothing) {
  const std::string address = FreeAddress();
  auto coordinator = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, address), certificates_.Flags("ours", "ours")),
       .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  for (const auto& credentials :
       {grpc::InsecureChannelCredentials(), grpc::SslCredentials(grpc::SslCredentialsOptions())}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
    v1::WriteStateReply reply;
    const auto stub = v1::Direct::NewStub(grpc::CreateChannel(address, credentials));
    const grpc::Status status = stub->WriteState(&context, v1::WriteStateRequest(), &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
}

// Without a secret: every certificate of the authority could be any node, if nobody looked at
// names.
TEST_F(MutualTlsTest, ACertificateWithTheNodesNameIsAProofAndAnotherOfItsAuthorityIsNone) {
  for (const char* name : {"node0", "node1", "other"}) {
    certificates_.IssueNamed(name, absl::StrCat(name, ".cluster"));
  }
  const std::string address = FreeAddress();
  auto coordinator = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, address), certificates_.NamedFlags("node0")),
       .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  const auto start_member = [&](const std::string& at, const std::string& certificate) {
    auto member = DaemonProcess::Start(
        {.flags = Joined(GroupFlags(1, 2, at), certificates_.NamedFlags(certificate)),
         .wait_for = "live"});
    EXPECT_TRUE(member.ok()) << member.status();
    return *std::move(member);
  };
  {
    const auto other = start_member(address, "other");
    EXPECT_TRUE(other->WaitLogged("'other.cluster', not 'node1.cluster'")) << other->Log();
  }
  PeerClient caller(1, {std::nullopt, {"node0.cluster", "node1.cluster"}},
                    {certificates_.Path("ours-ca.pem"), certificates_.Path("other.pem"),
                     certificates_.Path("other.key")});
  EXPECT_EQ(caller.Connect(address).status().code(), absl::StatusCode::kUnauthenticated);

  DaemonGroup group;
  group.push_back(*std::move(coordinator));
  group.push_back(start_member(address, "node1"));
  for (const auto& daemon : group) {
    const absl::Status ready = daemon->WaitServing("ready", std::chrono::seconds(20));
    ASSERT_TRUE(ready.ok()) << ready;
  }
  const auto pulled = TrainOn(group);  // reads and writes state of both nodes
  EXPECT_EQ(pulled[0], pulled[1]);

  // Nor does a member believe a coordinator with another name.
  const std::string elsewhere = FreeAddress();
  auto false_one = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, elsewhere), certificates_.NamedFlags("other")),
       .wait_for = "live"});
  ASSERT_TRUE(false_one.ok()) << false_one.status();
  const auto member = start_member(elsewhere, "node1");
  EXPECT_FALSE(Forms(*member));
}

TEST_F(MutualTlsTest, SighupTakesAnotherCertificateAndKeepsTheOldOneWhereTheNewOneIsBroken) {
  const std::string address = FreeAddress();
  const auto with = [&](const std::string& ca, const std::string& name) {
    for (const auto& [from, to] :
         {std::pair{ca + "-ca.pem", "now-ca.pem"}, std::pair{name + ".pem", "now.pem"},
          std::pair{name + ".key", "now.key"}}) {
      fs::copy_file(certificates_.Path(from), certificates_.Path(to),
                    fs::copy_options::overwrite_existing);
    }
  };
  with("theirs", "theirs");
  auto coordinator = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, address),
                       Joined(certificates_.Flags("now", "now"), {"--log_format=json"})),
       .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  {
    auto member = DaemonProcess::Start(
        {.flags = Joined(GroupFlags(1, 2, address),
                         Joined(certificates_.Flags("ours", "ours"), {"--log_format=json"})),
         .wait_for = "live"});
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_FALSE(Forms(**member));
    for (const absl::string_view line : absl::StrSplit((*member)->Log(), '\n', absl::SkipEmpty())) {
      EXPECT_TRUE(absl::StartsWith(line, "{\"time\":")) << line;
    }
  }

  std::ofstream(certificates_.Path("now.pem")) << "garbage";
  ASSERT_EQ(::kill((*coordinator)->pid(), SIGHUP), 0);
  ASSERT_TRUE((*coordinator)->WaitLogged("the TLS files were not taken"));
  EXPECT_THAT((*coordinator)->Log(), ::testing::HasSubstr("now.pem holds no certificate in PEM"));

  with("ours", "ours");
  ASSERT_EQ(::kill((*coordinator)->pid(), SIGHUP), 0);
  ASSERT_TRUE((*coordinator)->WaitLogged("the TLS files are read"));
  EXPECT_TRUE(Forms(address, certificates_.Flags("ours", "ours")));
}

TEST_F(MutualTlsTest, ABrokenFileIsNamedAtTheStartAndNotCalledAPortThatIsTaken) {
  std::ofstream(certificates_.Path("ours.pem")) << "-----BEGIN CERTIFICATE-----\nAAAA\n";
  const auto daemon = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(0, 2, FreeAddress()), certificates_.Flags("ours", "ours")),
       .wait_for = "live"});
  ASSERT_FALSE(daemon.ok());
  const std::string said(daemon.status().message());
  EXPECT_THAT(said, ::testing::HasSubstr("ours.pem is broken: certificate 1"));
  EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("taken")));
}

// Two daemons that were given one --node_rank: the second one is refused for as long as both live.
TEST(RefusedNodeTest, WhoIsRefusedComesLessAndLessOftenAndTheLogSaysItOnce) {
  const std::string address = FreeAddress();
  auto coordinator = DaemonProcess::Start({.flags = GroupFlags(0, 3, address), .wait_for = "live"});
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  auto first = DaemonProcess::Start({.flags = GroupFlags(1, 3, address), .wait_for = "live"});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(DaemonStatus((*coordinator)->address()).WaitFor([](const auto& status) {
    return status.missing_nodes_size() == 1;
  }));
  auto second = DaemonProcess::Start(
      {.flags = Joined(GroupFlags(1, 3, address), {"--log_level=debug"}), .wait_for = "live"});
  ASSERT_TRUE(second.ok()) << second.status();
  // The waits double from 400 ms on: four refusals take 3 s, where 200 ms each would make 15.
  ASSERT_TRUE((*second)->WaitLogged("again_after_ms=3200")) << (*second)->Log();
  const auto times = [](const std::string& text, const std::string& what) {
    int found = 0;
    for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(times((*coordinator)->Log(), "a daemon may not join"), 1) << (*coordinator)->Log();
  EXPECT_THAT((*coordinator)->Log(), ::testing::HasSubstr("node=1 reason=RANK_TWICE what="));
  EXPECT_EQ(times((*second)->Log(), "again_after_ms="), 4) << (*second)->Log();
}

// Node 0 takes seconds to look for what this one has written into the directory.
TEST(RefusedNodeTest, WhoseDirectoryIsAnotherDoesNotSayThatItHasJoined) {
  const ScratchDirectory scratch;
  const std::string address = FreeAddress();
  const auto start = [&](int node) {
    return DaemonProcess::Start(
        {.flags = Joined(
             GroupFlags(node, 2, address),
             {absl::StrCat("--snapshot_dir=", scratch.path(), "/", node), "--log_level=debug"}),
         .wait_for = "live"});
  };
  auto coordinator = start(0);
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  auto refused = start(1);
  ASSERT_TRUE(refused.ok()) << refused.status();
  DaemonStatus status((*refused)->address());
  EXPECT_TRUE(status.WaitFor([&](const v1::GetStatusReply& reply) {
    return absl::StrContains(reply.not_joined(), "has joined") ||
           absl::StrContains((*refused)->Log(), "again_after_ms=400");
  }));
  EXPECT_THAT(status.Get().not_joined(), ::testing::HasSubstr("is not node 0's"));
  EXPECT_TRUE(status.WaitFor([&](const v1::GetStatusReply& reply) {
    return !absl::StrContains(reply.not_joined(), "is not node 0's") ||
           absl::StrContains((*refused)->Log(), "again_after_ms=800");
  }));
  EXPECT_THAT(status.Get().not_joined(), ::testing::HasSubstr("is not node 0's"));
}

// As clusters have it where the way out leads through a proxy.
TEST(GroupThatFormsTest, GoesRoundTheEnvironmentsProxies) {
  const std::string nobody = "http://" + FreeAddress();
  for (const char* name : {"http_proxy", "https_proxy", "grpc_proxy"}) {
    ::setenv(name, nobody.c_str(), 1);
  }
  const auto group = StartGroup(2, "cpu:1");
  for (const char* name : {"http_proxy", "https_proxy", "grpc_proxy"}) ::unsetenv(name);
  EXPECT_TRUE(group.ok()) << group.status();
}

TEST(GroupThatHasNotFormedTest, TellsTrainersWhoIsMissing) {
  const std::string address = FreeAddress();
  std::vector<std::unique_ptr<DaemonProcess>> daemons;
  for (const int node : {0, 1}) {
    auto daemon = DaemonProcess::Start(
        {.flags = Joined(GroupFlags(node, 3, address), {"--register_timeout=1s"}),
         .wait_for = "live"});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemons.push_back(*std::move(daemon));
  }
  DaemonStatus member(daemons[1]->address());
  ASSERT_TRUE(member.WaitFor([](const v1::GetStatusReply& reply) {
    return absl::StrContains(reply.not_joined(), "others have not");
  }));
  const auto refusal = [&](int node) {
    const auto session =
        Session::Open({.address = daemons[node]->address(), .rank = node, .world_size = 3});
    EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
    return std::string(session.status().message());
  };
  EXPECT_THAT(refusal(0), ::testing::EndsWith("Awaited is the daemon of node 2"));
  EXPECT_THAT(refusal(1), ::testing::HasSubstr("it has joined, and others have not"));
}

// More than gRPC takes in one message, for a unit that one rank's node does not own.
TEST(StateAcrossNodesTest, ATensorOfManyMebibytesIsPushedToWhoOwnsIt) {
  auto group = StartGroup(2, "cpu:1", {"--threads=1"});
  ASSERT_TRUE(group.ok()) << group.status();
  for (int node = 0; node < 2; ++node) {  // neither owns what it pushes, in one of both
    auto session = Session::Open({.address = (*group)[node]->address()});
    ASSERT_TRUE(session.ok()) << session.status();
    LayoutBuilder builder(1);
    builder.AddGroup({.preset = "torch"});
    builder.Add({.name = "matrix", .shape = {1100, 1200}});
    ASSERT_TRUE((*session)->Register(*builder.Build()).ok());
    ASSERT_TRUE((*session)->Attach().ok());
    ASSERT_TRUE((*session)->Push().ok());
    std::vector<float> momentum(1100 * 1200);
    FillWith(momentum, 5);
    const absl::Status loaded =
        (*session)->PushState({{.parameter = 0, .kind = StateKind::kMomentum, .values = momentum}});
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ((*session)->Pull(0, StateKind::kMomentum).value(), momentum);
    EXPECT_TRUE((*session)->Close().ok());
  }
}

}  // namespace
}  // namespace dmuond::testing
