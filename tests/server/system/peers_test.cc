// What crosses from daemon to daemon: over mutual TLS with certificates made here, and optimizer
// state between nodes.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_group.h"
#include "tests/client/trainers.h"
#include "tests/server/system/daemon_status.h"

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

// Certificates of two authorities, made by the openssl program.
class Certificates {
 public:
  Certificates() {
    std::string pattern = fs::temp_directory_path() / "dmuond-tls-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    directory_ = pattern;
    for (const char* authority : {"ours", "theirs"}) {
      const std::string name = absl::StrCat(directory_, "/", authority);
      Run(absl::StrCat("req -x509 -days 1 -subj /CN=", authority, kNewKey, "-keyout ", name,
                       "-ca.key -out ", name, "-ca.pem"));
      Issue(authority, authority, "IP:127.0.0.1");
    }
  }
  // A certificate of "ours" with another name.
  void IssueNamed(const std::string& file, const std::string& dns_name) const {
    Issue("ours", file, "DNS:" + dns_name);
  }
  ~Certificates() { fs::remove_all(directory_); }
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  [[nodiscard]] std::vector<std::string> Flags(const std::string& certificate,
                                               const std::string& trusted) const {
    return {"--peer_tls_ca=" + directory_ + "/" + trusted + "-ca.pem",
            "--peer_tls_certificate=" + directory_ + "/" + certificate + ".pem",
            "--peer_tls_key=" + directory_ + "/" + certificate + ".key"};
  }
  // The same without a secret: names are the proof.
  [[nodiscard]] std::vector<std::string> NamedFlags(const std::string& certificate) const {
    std::vector<std::string> flags = Flags(certificate, "ours");
    flags.insert(flags.end(), {"--peer_tls_names=node{rank}.cluster", "--peer_secret_file="});
    return flags;
  }
  [[nodiscard]] std::string Read(const std::string& file) const {
    std::ifstream in(directory_ + "/" + file);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  static constexpr char kNewKey[] = " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  void Issue(const std::string& authority, const std::string& file, const std::string& name) const {
    const std::string path = absl::StrCat(directory_, "/", file);
    const std::string by = absl::StrCat(directory_, "/", authority);
    std::ofstream(path + ".name") << "subjectAltName=" << name << "\n";
    Run(absl::StrCat("req -subj /CN=dmuond", kNewKey, "-keyout ", path, ".key -out ", path,
                     ".csr"));
    Run(absl::StrCat("x509 -req -days 1 -in ", path, ".csr -CA ", by, "-ca.pem -CAkey ", by,
                     "-ca.key -CAcreateserial -out ", path, ".pem -extfile ", path, ".name"));
  }
  static void Run(const std::string& arguments) {
    ASSERT_EQ(std::system(("openssl " + arguments + " >/dev/null 2>&1").c_str()), 0) << arguments;
  }
  std::string directory_;
};

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
    const auto stub = v1::Peer::NewStub(grpc::CreateChannel(address, credentials));
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
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = certificates_.Read("ours-ca.pem");
  options.pem_cert_chain = certificates_.Read("other.pem");
  options.pem_private_key = certificates_.Read("other.key");
  grpc::ChannelArguments arguments;
  arguments.SetSslTargetNameOverride("node0.cluster");
  const auto stub = v1::Peer::NewStub(
      grpc::CreateCustomChannel(address, grpc::SslCredentials(options), arguments));
  grpc::ClientContext context;
  v1::WriteStateRequest request;
  request.mutable_proof()->set_node(1);
  v1::WriteStateReply reply;
  EXPECT_EQ(stub->WriteState(&context, request, &reply).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);

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
