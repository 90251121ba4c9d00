// A member of a group of daemons that is none: it says to the coordinator what a test wants.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_
#define DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/common/errors.h"
#include "server/daemon/group/peer_secret.h"
#include "server/daemon/lanes/lane_bits.h"
#include "server/version.h"
#include "tests/client/daemon_group.h"

namespace dmuond::testing {

// Node 1 of two, made of the protocol alone. Its stream ends after `patience`.
class FakeMember {
 public:
  explicit FakeMember(const std::string& coordinator,
                      std::chrono::milliseconds patience = std::chrono::seconds(30))
      : stub_(v1::Peer::NewStub(
            grpc::CreateChannel(coordinator, grpc::InsecureChannelCredentials()))) {
    context_.set_deadline(std::chrono::system_clock::now() + patience);
    context_.set_wait_for_ready(true);
    stream_ = stub_->Join(&context_);
  }
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
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dmuond-lane",
        *server::MakeCpuNodeDevice(/*threads=*/1), /*rails=*/true);
    if (!bits.ok()) std::abort();
    return *bits;
  }
  // As a daemon that knows the group's secret; what the coordinator says to it is read next.
  void Join(const v1::JoinRequest& join) {
    v1::MemberMessage message;
    *message.mutable_join() = join;
    if (join.nonce().empty()) message.mutable_join()->set_nonce(server::NewNonce());
    v1::CoordinatorMessage question;
    if (!stream_->Write(message) || !stream_->Read(&question)) return;
    const server::PeerSecret secret(kGroupSecret);
    proven_ = secret.CheckChallenge(message.join(), question.peer_challenge());
    const v1::PeerAnswer answer = secret.Answer(message.join(), question.peer_challenge());
    *message.mutable_peer_answer() = answer;
    stream_->Write(message);
  }
  // Whether the coordinator has proven itself.
  [[nodiscard]] bool proven() const { return proven_; }
  void Send(const v1::MemberMessage& message) { stream_->Write(message); }
  // Nothing more is said: the coordinator ends the stream after what was.
  void Leave() { stream_->WritesDone(); }
  // Whether the coordinator counts it as a member: then its heart beats for it.
  bool IsTaken() {
    v1::CoordinatorMessage message;
    return stream_->Read(&message) && message.has_heartbeat();
  }
  // The next message that is no heartbeat.
  std::optional<v1::CoordinatorMessage> Next() {
    v1::CoordinatorMessage message;
    while (stream_->Read(&message)) {
      if (!message.has_heartbeat()) return message;
    }
    return std::nullopt;
  }
  absl::Status Finish() {
    v1::CoordinatorMessage ignored;
    while (stream_->Read(&ignored)) {
    }
    return server::FromGrpc(stream_->Finish());
  }

 private:
  grpc::ClientContext context_;
  bool proven_ = false;
  std::unique_ptr<v1::Peer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>> stream_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_FAKE_MEMBER_H_
