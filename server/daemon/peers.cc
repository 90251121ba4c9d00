#include "server/daemon/peers.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "kernels/mutex.h"
#include "scheduler/membership.h"
#include "server/convert.h"
#include "server/daemon/directory_proof.h"
#include "server/daemon/errors.h"
#include "server/daemon/log.h"
#include "server/daemon/peer_credentials.h"
#include "server/daemon/reflection.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRejoinAfter{200};
constexpr std::chrono::milliseconds kRejoinAfterRefusal{2000};
constexpr std::chrono::seconds kSayJoiningEvery{10};
constexpr std::chrono::milliseconds kHeartbeatEvery{1000};
constexpr std::chrono::milliseconds kSilenceMax{5000};
// What a member may take to show its directory: it is not watched before it has joined.
constexpr std::chrono::milliseconds kShowMax{10'000};
constexpr std::chrono::seconds kCallTimeout{60};
constexpr size_t kReplyBytes = size_t{1} << 20;

// One direction of a stream: messages queue here and a thread writes them, so that no caller
// blocks.
template <typename Message>
class Writer {
 public:
  explicit Writer(std::function<bool(const Message&)> write)
      : write_(std::move(write)), thread_([this] { Run(); }) {}
  ~Writer() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  void Push(Message message) {
    MutexLock lock(mutex_);
    queue_.push_back(std::move(message));
    changed_.NotifyAll();
  }

 private:
  void Run() {
    for (;;) {
      Message message;
      {
        MutexLock lock(mutex_);
        while (queue_.empty() && !stop_) changed_.Wait(mutex_);
        if (queue_.empty()) return;
        message = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!write_(message)) return;  // the reader of the same stream sees its end
    }
  }

  const std::function<bool(const Message&)> write_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::deque<Message> queue_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

uint64_t RandomBootId() {
  uint64_t id = 0;
  while (::getrandom(&id, sizeof(id), 0) != sizeof(id)) {
  }
  return id;
}

// Of host:port.
std::string HostOf(const std::string& address) { return address.substr(0, address.rfind(':')); }

class GrpcPeers final : public Peers, public v1::Peer::Service {
 public:
  GrpcPeers(PeerOptions options, Daemon& daemon, PeerCredentials credentials)
      : options_(std::move(options)),
        daemon_(daemon),
        credentials_(std::move(credentials)),
        boot_id_(RandomBootId()) {}
  ~GrpcPeers() override { Stop(); }

  absl::Status Listen() {
    grpc::ServerBuilder builder;
    builder.SetOption(WithoutReflection());
    int port = 0;
    builder.AddListeningPort(options_.listen, credentials_.server, &port);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return Error(absl::StatusCode::kUnavailable, "ADDRESS_TAKEN",
                   Say("cannot listen on '", Named("address", options_.listen),
                       "' for other daemons: the port is taken or the address is not ours"));
    }
    // Without a port of its own, what others reach this daemon by has the one really bound.
    std::string& advertise = options_.advertise;
    if (advertise.empty()) advertise = absl::StrCat(HostOf(options_.listen), ":0");
    if (absl::EndsWith(advertise, ":0")) advertise = absl::StrCat(HostOf(advertise), ":", port);
    return absl::OkStatus();
  }
  void Join() override {
    if (options_.node == 0) {
      MutexLock lock(mutex_);
      machine_.emplace(options_.nodes, Self());
    } else {
      joiner_ = std::thread([this] { JoinUntilStopped(); });
    }
  }

  // ---- PeerLinks ----
  void SendToMembers(std::optional<int32_t> node, const v1::CoordinatorMessage& message) override {
    MutexLock lock(mutex_);
    for (auto& [member, stream] : members_) {
      if (!node.has_value() || *node == member) stream.writer->Push(message);
    }
  }
  void SendToCoordinator(const v1::MemberMessage& message) override {
    MutexLock lock(mutex_);
    // Without a stream the group is gone; the daemon hears of it by OnCoordinatorGone.
    if (to_coordinator_ != nullptr) to_coordinator_->Push(message);
  }
  GroupGaps Gaps() override {
    MutexLock lock(mutex_);
    GroupGaps gaps;
    gaps.not_joined = not_joined_;
    if (!machine_.has_value() || machine_->formed()) return gaps;
    for (const scheduler::NodeRank node : machine_->missing()) {
      gaps.missing.push_back(node.value());
    }
    return gaps;
  }
  absl::StatusOr<StateTensor> ReadState(int32_t node, const v1::ReadStateRequest& request,
                                        size_t elements) override {
    absl::StatusOr<std::unique_ptr<v1::Peer::Stub>> stub = StubOf(node);
    if (!stub.ok()) return stub.status();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    auto reader = (*stub)->ReadState(&context, request);
    StateTensor tensor(elements);
    v1::ReadStateReply reply;
    size_t received = 0;
    while (reader->Read(&reply)) {
      const auto first = static_cast<size_t>(reply.first_element());
      const size_t count = reply.data().size() / sizeof(float);
      if (first > elements || count > elements - first) {
        context.TryCancel();
        return absl::InternalError(absl::StrCat("node ", node, " sent state out of range"));
      }
      std::memcpy(tensor.data() + first, reply.data().data(), count * sizeof(float));
      received += count;
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) return FromGrpc(status);
    if (received != elements) {
      return absl::InternalError(
          absl::StrCat("node ", node, " sent ", received, " of ", elements, " elements"));
    }
    return tensor;
  }
  absl::Status WriteState(int32_t node, const v1::WriteStateRequest& request) override {
    absl::StatusOr<std::unique_ptr<v1::Peer::Stub>> stub = StubOf(node);
    if (!stub.ok()) return stub.status();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    v1::WriteStateReply reply;
    return FromGrpc((*stub)->WriteState(&context, request, &reply));
  }

  // ---- Peer service ----
  grpc::Status Join(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>* stream) override {
    v1::MemberMessage message;
    if (!stream->Read(&message) || !message.has_join()) {
      return ToGrpc(Error(absl::StatusCode::kInvalidArgument, "JOIN_INVALID",
                          "a member's first message is its JoinRequest"));
    }
    if (options_.node != 0) {
      return ToGrpc(
          Error(absl::StatusCode::kFailedPrecondition, "NOT_THE_COORDINATOR",
                Say("this is node ", Named("node", options_.node), "; node 0 coordinates")));
    }
    const scheduler::MemberInfo info = FromProto(message.join());
    const int32_t node = info.node.value();
    const absl::Status admitted =
        Admit(message.join(), context,
              [&](const v1::DirectoryProof& proof) -> std::optional<v1::DirectoryAnswer> {
                v1::CoordinatorMessage question;
                *question.mutable_directory_proof() = proof;
                if (!stream->Write(question)) return std::nullopt;
                while (stream->Read(&message)) {  // its heart beats meanwhile
                  if (message.has_directory_answer()) return message.directory_answer();
                }
                return std::nullopt;
              });
    const absl::Status joined = admitted.ok() ? Add(info, context, stream) : admitted;
    if (!joined.ok()) {
      log::Warn("a daemon may not join", {{"node", node}, {"what", joined}});
      return ToGrpc(joined);
    }
    while (stream->Read(&message)) {
      {
        MutexLock lock(mutex_);
        machine_->OnHeartbeat(steady_clock::now(), info.node);
      }
      if (!message.has_heartbeat()) daemon_.OnMemberMessage(node, message);
    }
    Remove(info, context);
    return grpc::Status::OK;
  }
  grpc::Status ReadState(grpc::ServerContext* context, const v1::ReadStateRequest* request,
                         grpc::ServerWriter<v1::ReadStateReply>* writer) override {
    absl::StatusOr<StateTensor> tensor =
        daemon_.ReadStateForPeer(*request, [context] { return context->IsCancelled(); });
    if (!tensor.ok()) return ToGrpc(tensor.status());
    const size_t per_reply = kReplyBytes / sizeof(float);
    for (size_t first = 0; first < tensor->size(); first += per_reply) {
      const size_t count = std::min(per_reply, tensor->size() - first);
      v1::ReadStateReply reply;
      reply.set_first_element(static_cast<int64_t>(first));
      reply.set_data(std::string(reinterpret_cast<const char*>(tensor->data() + first),
                                 count * sizeof(float)));
      if (!writer->Write(reply)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status WriteState(grpc::ServerContext* /*context*/, const v1::WriteStateRequest* request,
                          v1::WriteStateReply* /*reply*/) override {
    return ToGrpc(daemon_.WriteStateForPeer(*request));
  }

  // ---- Peers ----
  void Tick() override {
    const auto now = steady_clock::now();
    MutexLock turn(turns_);
    Effects effects;
    {
      MutexLock lock(mutex_);
      if (machine_.has_value()) effects = Take(machine_->OnTick(now));
      for (const auto& [node, showing] : showing_) {
        if (now - showing.began >= kShowMax) showing.context->TryCancel();
      }
      if (to_coordinator_ != nullptr && now - beaten_ >= kHeartbeatEvery) {
        beaten_ = now;
        v1::MemberMessage beat;
        beat.mutable_heartbeat()->set_counter(++beats_);
        to_coordinator_->Push(std::move(beat));
      }
      if (joining_ != nullptr && to_coordinator_ != nullptr && now - heard_ >= kSilenceMax) {
        joining_->TryCancel();
      }
    }
    Perform(std::move(effects));
  }

  void Stop() override {
    {
      MutexLock lock(mutex_);
      if (stopped_) return;
      stopped_ = true;
      if (joining_ != nullptr) joining_->TryCancel();
      for (auto& [node, stream] : members_) stream.context->TryCancel();
      changed_.NotifyAll();
    }
    if (joiner_.joinable()) joiner_.join();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  }

 private:
  // Whether it may join: of this group, with this directory. A process that has joined before need
  // not show that again: a broken link is mended while the directory hangs. Who does show it may
  // hang with the directory, and nothing can end that: one thread for each node, not more.
  absl::Status Admit(
      const v1::JoinRequest& join, grpc::ServerContext* context,
      const std::function<std::optional<v1::DirectoryAnswer>(const v1::DirectoryProof&)>& ask) {
    const scheduler::MemberInfo info = FromProto(join);
    const int32_t node = info.node.value();
    {
      MutexLock lock(mutex_);
      if (!machine_.has_value() || stopped_) return NotNow();
      if (absl::Status fits = machine_->Check(info); !fits.ok()) return fits;
      const auto shown = have_shown_directory_.find(node);
      if (shown != have_shown_directory_.end() && shown->second == info.boot_id) {
        return absl::OkStatus();
      }
      if (!showing_.try_emplace(node, Showing{context, steady_clock::now()}).second) {
        return absl::UnavailableError(
            absl::StrCat("node ", node,
                         " is showing its snapshot directory already: does it answer on node 0?"));
      }
    }
    absl::Status sees = ProveDirectory(options_.snapshots, join, ask);
    MutexLock lock(mutex_);
    showing_.erase(node);
    if (sees.ok()) have_shown_directory_[node] = info.boot_id;
    return sees;
  }
  static absl::Status NotNow() {
    return absl::UnavailableError("the coordinator is starting or leaving");
  }

  absl::Status Add(const scheduler::MemberInfo& info, grpc::ServerContext* context,
                   grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>* stream) {
    MutexLock turn(turns_);
    Effects effects;
    {
      MutexLock lock(mutex_);
      if (stopped_) return NotNow();
      // Lanes that were replaced have made epochs that the machine has not.
      machine_->OnEpoch(scheduler::GroupEpoch(daemon_.newest_epoch()));
      auto actions = machine_->OnJoin(steady_clock::now(), info);
      if (!actions.ok()) return actions.status();
      members_[info.node.value()] = {
          context, std::make_unique<Writer<v1::CoordinatorMessage>>(
                       [stream](const v1::CoordinatorMessage& m) { return stream->Write(m); })};
      effects = Take(*actions);
    }
    Perform(std::move(effects));
    return absl::OkStatus();
  }
  void Remove(const scheduler::MemberInfo& info, const grpc::ServerContext* context) {
    MutexLock turn(turns_);
    std::unique_ptr<Writer<v1::CoordinatorMessage>> writer;
    Effects effects;
    {
      MutexLock lock(mutex_);
      const auto mine = members_.find(info.node.value());
      if (mine != members_.end() && mine->second.context == context) {
        writer = std::move(mine->second.writer);
        members_.erase(mine);
      }
      effects = Take(machine_->OnGone(steady_clock::now(), info.node, info.boot_id));
    }
    writer.reset();
    Perform(std::move(effects));
  }

  struct MemberStream {
    grpc::ServerContext* context = nullptr;
    std::unique_ptr<Writer<v1::CoordinatorMessage>> writer;
  };
  // A member that shows that it has this node's snapshot directory, before it joins.
  struct Showing {
    grpc::ServerContext* context = nullptr;
    steady_clock::time_point began;
  };
  // What the membership machine wants of the daemon: done without the lock, since the daemon calls
  // back.
  struct Effects {
    std::optional<uint32_t> formed;
    std::optional<std::pair<int32_t, std::string>> lost;
  };

  scheduler::MemberInfo Self() const {
    scheduler::MemberInfo info;
    info.node = scheduler::NodeRank(options_.node);
    info.nodes = options_.nodes;
    info.lanes = options_.lanes;
    info.version = kBuildVersion;
    info.device_type = "cpu";
    info.peer_address = options_.advertise;
    info.epoch = scheduler::GroupEpoch(options_.epoch);
    info.boot_id = boot_id_;
    info.lane_memory_bytes = options_.lane_memory_bytes;
    return info;
  }
  v1::JoinRequest JoinRequest() const {
    const scheduler::MemberInfo self = Self();
    v1::JoinRequest join;
    join.set_node(self.node.value());
    join.set_nodes(self.nodes);
    join.set_lanes(self.lanes);
    join.set_version(self.version);
    join.set_device_type(self.device_type);
    join.set_peer_address(self.peer_address);
    join.set_epoch(std::max(options_.epoch, daemon_.newest_epoch()));
    join.set_boot_id(self.boot_id);
    join.set_lane_memory_bytes(self.lane_memory_bytes);
    join.set_snapshots(options_.snapshots != nullptr);
    return join;
  }

  Effects Take(const std::vector<scheduler::MembershipAction>& actions) DMUOND_REQUIRES(mutex_) {
    Effects effects;
    for (const scheduler::MembershipAction& action : actions) {
      if (const auto* formed = std::get_if<scheduler::GroupFormed>(&action)) {
        v1::CoordinatorMessage message;
        message.mutable_join()->set_epoch(formed->epoch.value());
        for (const std::string& address : formed->peer_addresses) {
          message.mutable_join()->add_peer_addresses(address);
        }
        addresses_ = formed->peer_addresses;
        for (auto& [node, stream] : members_) stream.writer->Push(message);
        effects.formed = formed->epoch.value();
      } else if (const auto* broken = std::get_if<scheduler::GroupBroken>(&action)) {
        effects.lost.emplace(broken->lost.value(), broken->detail);
      } else if (const auto* beat = std::get_if<scheduler::SendHeartbeat>(&action)) {
        v1::CoordinatorMessage message;
        message.mutable_heartbeat()->set_counter(beat->counter);
        for (auto& [node, stream] : members_) stream.writer->Push(message);
      } else {
        const auto& dropped = std::get<scheduler::MemberDropped>(action);
        const auto found = members_.find(dropped.node.value());
        if (found != members_.end()) found->second.context->TryCancel();
      }
    }
    return effects;
  }
  void Perform(Effects effects) DMUOND_REQUIRES(turns_) {
    if (effects.formed.has_value()) daemon_.OnFormed(*effects.formed);
    if (!effects.lost.has_value()) return;
    log::Error("group broken", {{"node", effects.lost->first}, {"what", effects.lost->second}});
    daemon_.OnMemberGone(effects.lost->first, effects.lost->second);
    // Everybody joins anew, for the next epoch; a stream's end is what tells them.
    MutexLock lock(mutex_);
    machine_->StartOver();
    for (auto& [node, stream] : members_) stream.context->TryCancel();
  }

  absl::StatusOr<std::unique_ptr<v1::Peer::Stub>> StubOf(int32_t node) {
    std::string address;
    {
      MutexLock lock(mutex_);
      if (node < 0 || node >= static_cast<int32_t>(addresses_.size())) {
        return Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                     Say("the group has not formed: node ", Named("node", node), " is not known"));
      }
      address = addresses_[node];
    }
    return v1::Peer::NewStub(grpc::CreateChannel(address, credentials_.channel));
  }

  void JoinUntilStopped() {
    for (;;) {
      const std::string why = JoinOnce();
      MutexLock lock(mutex_);
      if (stopped_) return;
      const auto now = steady_clock::now();
      if (why != not_joined_ || now - said_joining_ >= kSayJoiningEvery) {
        log::Info("joining again", {{"coordinator", options_.coordinator}, {"what", why}});
        said_joining_ = now;
      }
      not_joined_ = why;
      changed_.WaitUntil(
          mutex_, steady_clock::now() + (refused_.empty() ? kRejoinAfter : kRejoinAfterRefusal));
      if (stopped_) return;
    }
  }

  // One stream to the coordinator, from its opening to its end; says why it ended.
  std::string JoinOnce() {
    auto stub = v1::Peer::NewStub(grpc::CreateChannel(options_.coordinator, credentials_.channel));
    grpc::ClientContext context;
    {
      MutexLock lock(mutex_);
      if (stopped_) return "stopped";
      joining_ = &context;
    }
    auto stream = stub->Join(&context);
    v1::MemberMessage join;
    *join.mutable_join() = JoinRequest();
    bool formed = false;
    if (stream->Write(join)) {
      {
        MutexLock lock(mutex_);
        heard_ = steady_clock::now();
        to_coordinator_ = std::make_unique<Writer<v1::MemberMessage>>(
            [&stream](const v1::MemberMessage& m) { return stream->Write(m); });
      }
      v1::CoordinatorMessage message;
      while (stream->Read(&message)) {
        {
          MutexLock lock(mutex_);
          heard_ = steady_clock::now();
          if (!formed) {
            not_joined_ =
                "it has joined, and others have not: dmuonctl status on node 0 names them";
          }
          if (message.has_join()) {
            addresses_.assign(message.join().peer_addresses().begin(),
                              message.join().peer_addresses().end());
          }
        }
        if (message.has_heartbeat()) continue;
        if (message.has_directory_proof()) {
          v1::MemberMessage answer;
          *answer.mutable_directory_answer() =
              AnswerDirectory(options_.snapshots, options_.node, message.directory_proof());
          MutexLock lock(mutex_);
          to_coordinator_->Push(std::move(answer));
          continue;
        }
        if (message.has_join()) {
          formed = true;
          {
            MutexLock lock(mutex_);
            not_joined_.clear();
          }
          daemon_.OnFormed(message.join().epoch());
          continue;
        }
        daemon_.OnCoordinatorMessage(message);
      }
    }
    std::unique_ptr<Writer<v1::MemberMessage>> writer;
    {
      MutexLock lock(mutex_);
      writer = std::move(to_coordinator_);
      joining_ = nullptr;
    }
    writer.reset();  // the stream has ended, and with it a write that waits
    const grpc::Status status = stream->Finish();
    std::string why = status.ok() ? "the coordinator closed the stream" : status.error_message();
    const bool refused = !formed && (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                                     status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    if (formed) daemon_.OnCoordinatorGone(why);
    if (refused && refused_ != why) {
      log::Error("the coordinator refuses this daemon", {{"what", why}});
    }
    refused_ = refused ? why : "";
    return why;
  }

  PeerOptions options_;
  Daemon& daemon_;
  const PeerCredentials credentials_;
  const uint64_t boot_id_;
  std::unique_ptr<grpc::Server> server_;

  // Held from what the machine says until the daemon has done it: of two events, what comes of the
  // first is done first.
  Mutex turns_;
  Mutex mutex_;  // never held while turns_ is waited for
  CondVar changed_;
  bool stopped_ DMUOND_GUARDED_BY(mutex_) = false;
  std::optional<scheduler::MembershipMachine> machine_ DMUOND_GUARDED_BY(mutex_);  // node 0
  std::map<int32_t, MemberStream> members_ DMUOND_GUARDED_BY(mutex_);              // node 0
  std::map<int32_t, uint64_t> have_shown_directory_ DMUOND_GUARDED_BY(mutex_);  // boot id by node
  std::map<int32_t, Showing> showing_ DMUOND_GUARDED_BY(mutex_);                // by node
  std::vector<std::string> addresses_ DMUOND_GUARDED_BY(mutex_);                // by node
  std::unique_ptr<Writer<v1::MemberMessage>> to_coordinator_ DMUOND_GUARDED_BY(mutex_);
  grpc::ClientContext* joining_ DMUOND_GUARDED_BY(mutex_) = nullptr;
  steady_clock::time_point heard_ DMUOND_GUARDED_BY(mutex_);
  steady_clock::time_point beaten_ DMUOND_GUARDED_BY(mutex_);
  uint64_t beats_ DMUOND_GUARDED_BY(mutex_) = 0;
  // Other nodes, until the group has formed: how the last attempt to join ended.
  std::string not_joined_ DMUOND_GUARDED_BY(mutex_) = "node 0 has not answered yet";
  steady_clock::time_point said_joining_ DMUOND_GUARDED_BY(mutex_);
  std::string refused_;  // why, the last time; the joiner's own
  std::thread joiner_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Peers>> Peers::Start(PeerOptions options, Daemon& daemon) {
  absl::StatusOr<PeerCredentials> credentials =
      MakePeerCredentials({options.tls_ca_file, options.tls_certificate_file, options.tls_key_file},
                          options.allow_plaintext, options.listen, options.coordinator);
  if (!credentials.ok()) return credentials.status();
  auto peers = std::make_unique<GrpcPeers>(std::move(options), daemon, *std::move(credentials));
  absl::Status listening = peers->Listen();
  if (!listening.ok()) return listening;
  return peers;
}

}  // namespace dmuond::server
