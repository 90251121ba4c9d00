// A member of a group of daemons that is none: it says to the coordinator what a test wants.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_
#define DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/common/errors.h"
#include "server/daemon/lanes/lane_bits.h"
#include "server/version.h"
#include "tests/server/system/peer_client.h"

namespace dmuond::testing {

// Node 1 of two, made of the protocol alone. Its stream ends after `patience`.
class FakeMember {
 public:
  // With TLS where there are files.
  explicit FakeMember(std::string coordinator,
                      std::chrono::milliseconds patience = std::chrono::seconds(30),
                      server::TlsFiles files = {})
      : coordinator_(std::move(coordinator)), patience_(patience), files_(std::move(files)) {}
  ~FakeMember() { context_.TryCancel(); }

  static v1::JoinRequest RightJoin() {
    v1::JoinRequest join;
    join.set_node(1);
    join.set_nodes(2);
    join.set_lanes(1);
    join.set_jobs_max(1);
    join.set_version(server::kBuildVersion);
    join.set_protocol_min(server::kPeerProtocolMin);
    join.set_protocol_max(server::kPeerProtocolMax);
    *join.mutable_bits() = RightBits();
    join.set_device_type("cpu");
    join.set_peer_address("127.0.0.1:9");
    join.set_boot_id(42);
    return join;
  }
  // As a daemon with the lanes beside this program says them.
  static const v1::LaneBits& RightBits() {
    static const auto bits = server::AskForBits(
        server::LaneBinary(std::filesystem::read_symlink("/proc/self/exe").parent_path() /
                           "dmuond-lane"),
        *server::MakeCpuNodeDevice(/*threads=*/1), /*rails=*/true);
    if (!bits.ok()) std::abort();
    return *bits;
  }
  // As a daemon that knows the group's secret; what the coordinator says to it is read next.
  void Join(const v1::JoinRequest& join) {
    Connect(join.node());
    v1::MemberMessage message;
    *message.mutable_join() = join;
    Send(message);
  }
  void Send(const v1::MemberMessage& message) {
    Connect(/*node=*/1);
    if (stream_ != nullptr) stream_->Write(message);
  }
  // As the node that it has proven to be, whatever it says later. It is done once.
  void Connect(int32_t node) {
    if (client_ != nullptr) return;
    client_ = std::make_unique<PeerClient>(
        node, server::PeerProofs{server::PeerSecret(kGroupSecret), {}}, files_);
    auto channel = client_->Connect(coordinator_);
    connected_ = channel.status();
    if (!channel.ok()) return;
    stub_ = v1::Peer::NewStub(*channel);
    context_.set_deadline(std::chrono::system_clock::now() + patience_);
    stream_ = stub_->Join(&context_);
  }
  // Nothing more is said: the coordinator ends the stream after what was.
  void Leave() {
    if (stream_ != nullptr) stream_->WritesDone();
  }
  // Whether the coordinator counts it as a member: then its heart beats for it.
  bool IsTaken() {
    v1::CoordinatorMessage message;
    return stream_ != nullptr && stream_->Read(&message) && message.has_heartbeat();
  }
  // The next message that is no heartbeat.
  std::optional<v1::CoordinatorMessage> Next() {
    v1::CoordinatorMessage message;
    while (stream_ != nullptr && stream_->Read(&message)) {
      if (!message.has_heartbeat()) return message;
    }
    return std::nullopt;
  }
  absl::Status Finish() {
    if (stream_ == nullptr) return connected_;
    v1::CoordinatorMessage ignored;
    while (stream_->Read(&ignored)) {
    }
    return server::FromGrpc(stream_->Finish());
  }

 private:
  const std::string coordinator_;
  const std::chrono::milliseconds patience_;
  const server::TlsFiles files_;
  absl::Status connected_;
  std::unique_ptr<PeerClient> client_;
  grpc::ClientContext context_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>> stream_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_
