// What can be sent to a real coordinator's port: by a stranger on the raw connection, and by a node
// of the group in its stream, and in calls for state. The daemon lives, whatever comes.
//
// An input: a byte of flags, then a stranger's bytes, or messages one after another: what it is,
// two bytes of length, and so many of the message.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuond/v1/peer.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/daemon/group/directory_proof.h"
#include "server/daemon/group/peer_stream.h"
#include "server/daemon/group/tcp.h"
#include "server/storage/posix_storage.h"
#include "tests/client/daemon_group.h"
#include "tests/fuzz/reached.h"
#include "tests/server/daemon/support.h"
#include "tests/server/system/fake_member.h"
#include "tests/server/system/peer_client.h"

namespace dmuond {
namespace {

using testing::DaemonProcess;
using testing::FakeMember;

// Bits of the first byte.
constexpr uint8_t kRightJoin = 1;  // what the input does not say of a JoinRequest is as it must be
constexpr uint8_t kAnswersProof = 2;  // as a member with the same directory does
constexpr uint8_t kIsStranger = 4;    // who sends bytes, and proves nothing
// What a message is.
constexpr uint8_t kReadState = 1;
constexpr uint8_t kWriteState = 2;

// A stream that nobody ends is ended.
constexpr std::chrono::milliseconds kPatience{100};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

Reached reached(200, {"refused", "proofs", "formed", "answered"});

class Target {
 public:
  Target() {
    std::vector<std::string> flags = testing::GroupFlags(0, 2, coordinator_);
    flags.insert(flags.end(), {"--log_level=error", "--snapshot_dir=" + snapshots_.path()});
    auto daemon = DaemonProcess::Start({.flags = flags, .wait_for = "live"});
    if (!daemon.ok()) Die(daemon.status().ToString());
    daemon_ = *std::move(daemon);
    auto storage = server::storage::OpenPosixStorage(snapshots_.path());
    if (!storage.ok()) Die(storage.status().ToString());
    storage_ = *std::move(storage);
    auto channel = caller_.Connect(coordinator_);
    if (!channel.ok()) Die(channel.status().ToString());
    stub_ = v1::Direct::NewStub(*channel);
  }

  void Run(uint8_t flags, const std::string& input) {
    reached.NextInput();
    if ((flags & kIsStranger) != 0) return Talk(input);
    FakeMember member(coordinator_, kPatience);
    bool first = true;
    for (size_t at = 0; at + 3 <= input.size();) {
      const auto kind = static_cast<uint8_t>(input[at]);
      const size_t length =
          static_cast<uint8_t>(input[at + 1]) + (size_t{static_cast<uint8_t>(input[at + 2])} << 8);
      const std::string body = input.substr(at + 3, length);
      at += 3 + length;
      if (kind == kReadState || kind == kWriteState) {
        Call(kind, body);
        continue;
      }
      v1::MemberMessage message;
      if (!message.ParseFromString(body)) continue;
      if (std::exchange(first, false)) {
        if (!Join(member, flags, message)) break;
      } else {
        member.Send(message);
      }
    }
    member.Leave();
    (void)member.Finish();
    if (daemon_->Wait(std::chrono::milliseconds(0)) >= 0) {
      Die("the daemon died:\n" + daemon_->Log());
    }
  }

 private:
  // On the raw connection, as who listens hears it before anything is proven.
  void Talk(const std::string& input) {
    const server::Patience patience{.until = std::chrono::steady_clock::now() + kPatience};
    auto socket = server::ConnectTcp(coordinator_, patience);
    if (!socket.ok()) Die(socket.status().ToString());
    server::PlainStream stream(*std::move(socket), patience);
    char answer = 0;
    if (stream.Write("dmuond 1").ok() && stream.Write(input).ok() && stream.Read(&answer, 1).ok()) {
      ++reached["answered"];
    }
    if (daemon_->Wait(std::chrono::milliseconds(0)) >= 0) {
      Die("the daemon died:\n" + daemon_->Log());
    }
  }
  // False: the stream is at its end.
  bool Join(FakeMember& member, uint8_t flags, v1::MemberMessage message) {
    if ((flags & kRightJoin) != 0 && message.has_join()) {
      v1::JoinRequest join = FakeMember::RightJoin();
      join.set_snapshots(true);
      join.set_boot_id(++boots_);
      join.MergeFrom(message.join());
      *message.mutable_join() = join;
    }
    if (message.has_join()) {
      member.Join(message.join());
    } else {
      member.Send(message);
    }
    std::optional<v1::CoordinatorMessage> answer = member.Next();
    if (answer.has_value() && answer->has_directory_proof()) {
      ++reached["proofs"];
      if ((flags & kAnswersProof) == 0) return true;
      v1::MemberMessage shown;
      *shown.mutable_directory_answer() =
          server::AnswerDirectory(storage_.get(), 1, answer->directory_proof());
      member.Send(shown);
      answer = member.Next();
    }
    if (!answer.has_value()) ++reached["refused"];
    if (answer.has_value() && answer->has_join()) ++reached["formed"];
    return answer.has_value();
  }
  void Call(uint8_t kind, const std::string& body) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    if (kind == kWriteState) {
      v1::WriteStateRequest request;
      v1::WriteStateReply reply;
      if (request.ParseFromString(body)) (void)stub_->WriteState(&context, request, &reply);
      return;
    }
    v1::ReadStateRequest request;
    if (!request.ParseFromString(body)) return;
    auto reader = stub_->ReadState(&context, request);
    v1::ReadStateReply reply;
    while (reader->Read(&reply)) {
    }
    (void)reader->Finish();
  }

  const server::TempDir snapshots_;
  const std::string coordinator_ = testing::FreeAddress();
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<server::storage::Storage> storage_;
  testing::PeerClient caller_{1};
  std::unique_ptr<v1::Direct::Stub> stub_;
  uint64_t boots_ = 0;
};

}  // namespace
}  // namespace dmuond

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static dmuond::Target target;
  if (size < 1) return 0;
  target.Run(data[0], std::string(reinterpret_cast<const char*>(data) + 1, size - 1));
  return 0;
}
