#include "server/daemon/group/peers.h"

#include <sys/random.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "scheduler/convert/convert.h"
#include "scheduler/membership.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/grpc_socket.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/group/delivery_queue.h"
#include "server/daemon/group/direct_calls.h"
#include "server/daemon/group/direct_service.h"
#include "server/daemon/group/directory_proof.h"
#include "server/daemon/group/peer_channel.h"
#include "server/daemon/group/peer_connections.h"
#include "server/daemon/group/stream_writer.h"
#include "server/daemon/process/reflection.h"
#include "server/daemon/rpc_counting.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;
using MemberServerStream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>;

constexpr std::chrono::milliseconds kRejoinAfter{200};
// After refusals; each in a row doubles the time.
constexpr std::chrono::milliseconds kRejoinAfterMax{30'000};
constexpr std::chrono::seconds kSayJoiningEvery{10};
constexpr std::chrono::milliseconds kLookEvery{100};
constexpr std::chrono::milliseconds kHeartbeatEvery{1000};
constexpr std::chrono::milliseconds kSilenceMax{5000};
// What a member may take to show its directory: it is not watched before it has joined.
constexpr std::chrono::milliseconds kShowMax{10'000};
constexpr std::chrono::seconds kSayUnprovenEvery{10};
constexpr std::chrono::minutes kSayRefusedEvery{1};
constexpr absl::Duration kSayExpiryBefore = absl::Hours(14 * 24);
constexpr std::chrono::hours kSayExpiryEvery{24};
// Beside the inputs of a plan, whose limit is `message_bytes_max`, in a message.
constexpr int64_t kBesideBytesMax = int64_t{64} << 10;

// Of connections that an address begins in a second. All daemons of a group may stand behind one.
constexpr size_t kConnectionsPerSecond = 256;

// Each node has a connection for its stream and one for direct calls, and some that end.
ConnectionLimits::Limits LimitsFor(int32_t nodes) {
  const auto of_nodes = static_cast<size_t>(nodes);
  ConnectionLimits::Limits limits;
  limits.strangers = 64 + 2 * of_nodes;
  limits.strangers_per_holder = 32 + of_nodes;
  limits.per_holder = limits.strangers_per_holder + 64 + 8 * of_nodes;
  limits.all = limits.strangers + 64 + 8 * of_nodes;
  return limits;
}
// Streams, a call of every trainer of nodes with 32 of them, and gRPC's own: more threads than
// daemons ever keep busy. A call beyond gets RESOURCE_EXHAUSTED.
int ThreadsMax(int32_t nodes) { return nodes + 64 + 32 * nodes; }

uint64_t RandomBootId() {
  uint64_t id = 0;
  while (::getrandom(&id, sizeof(id), 0) != sizeof(id)) {
  }
  return id;
}

// With the brackets of an IPv6 address.
std::string HostPartOf(const std::string& address) { return address.substr(0, address.rfind(':')); }

class GrpcPeers final : public Peers, public v1::Peer::Service {
 public:
  GrpcPeers(PeerOptions options, Daemon& daemon, std::unique_ptr<PeerCredentials> credentials)
      : options_(std::move(options)),
        daemon_(daemon),
        credentials_(std::move(credentials)),
        connections_(options_.node, options_.proofs, *credentials_),
        boot_id_(RandomBootId()),
        calls_(options_.node, options_.nodes, connections_,
               credentials_->tls() ? std::nullopt : options_.proofs.secret),
        to_core_(static_cast<size_t>(options_.message_bytes_max + kBesideBytesMax)) {}
  ~GrpcPeers() override { Stop(); }

  absl::Status Listen() {
    absl::StatusOr<TcpListener> listener = ListenTcp(options_.listen);
    if (!listener.ok()) {
      return Error(absl::StatusCode::kUnavailable, "ADDRESS_TAKEN",
                   Say("cannot listen on '", Named("address", options_.listen),
                       "' for other daemons: ", listener.status().message()));
    }
    // Without a port of its own, what others reach this daemon by has the one really bound.
    std::string& advertise = options_.advertise;
    if (advertise.empty()) advertise = absl::StrCat(HostPartOf(options_.listen), ":0");
    if (absl::EndsWith(advertise, ":0")) {
      advertise = absl::StrCat(HostPartOf(advertise), ":", listener->port);
    }
    absl::StatusOr<std::unique_ptr<GrpcSocket>> socket = GrpcSocket::Make(
        ListeningSocket(std::move(listener->socket)),
        {.name = options_.listen,
         .limits = LimitsFor(options_.nodes),
         // Also of who keeps the library busy that proves it.
         .strange_for = kUnprovenMax + std::chrono::seconds(1),
         .prove = [this](wire::UniqueFd connection) -> absl::StatusOr<GrpcSocket::Proven> {
           auto proven = connections_.Prove(std::move(connection));
           if (!proven.ok()) return proven.status();
           return GrpcSocket::Proven{std::move(proven->socket), proven->node};
         },
         .per_second = kConnectionsPerSecond});
    if (!socket.ok()) return socket.status();
    socket_ = *std::move(socket);
    grpc::ServerBuilder builder;
    builder.SetOption(WithoutReflection());
    CountCalls(builder, daemon_.rpcs());
    grpc::ResourceQuota quota("peers");
    builder.SetResourceQuota(quota.SetMaxThreads(ThreadsMax(options_.nodes)));
    builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
    builder.RegisterService(this);
    builder.RegisterService(direct_.get());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::InternalError("no server for other daemons");
    socket_->Serve(*server_);
    return absl::OkStatus();
  }
  void Join() override {
    if (options_.node == 0) {
      MutexLock lock(mutex_);
      machine_.emplace(options_.nodes, FromProto(JoinRequest()));
    } else {
      joiner_ = std::thread([this] { JoinUntilStopped(); });
    }
    pulse_ = std::thread([this] { BeatUntilStopped(); });
  }

  // ---- PeerLinks ----
  void SendToMembers(std::optional<int32_t> node, const v1::CoordinatorMessage& message) override {
    const SharedParts<v1::CoordinatorMessage> parts = ShareParts(message);
    MutexLock lock(mutex_);
    for (auto& [member, stream] : members_) {
      if (!node.has_value() || *node == member) stream.writer->Push(parts);
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
  std::optional<absl::Time> CertificatesExpire() override {
    if (!credentials_->tls()) return std::nullopt;
    return credentials_->expires();
  }
  std::map<int32_t, steady_clock::time_point> Heard() override {
    MutexLock lock(mutex_);
    if (machine_.has_value()) return machine_->Heard();
    if (!heard_.has_value()) return {};
    return {{0, *heard_}};
  }
  absl::StatusOr<StateTensor> ReadState(int32_t node, const v1::ReadStateRequest& request,
                                        size_t elements) override {
    return calls_.ReadState(node, request, elements);
  }
  absl::Status WriteState(int32_t node, const v1::WriteStateRequest& request) override {
    return calls_.WriteState(node, request);
  }
  absl::StatusOr<std::vector<v1::LaneTrace>> TraceNode(int32_t node,
                                                       const v1::TraceNodeRequest& request,
                                                       const std::stop_token& stop) override {
    return calls_.TraceNode(node, request, stop);
  }
  absl::StatusOr<ClockAhead> ReadClock(int32_t node) override { return calls_.ReadClock(node); }

  // ---- Peer service ----
  grpc::Status Join(grpc::ServerContext* context, MemberServerStream* stream) override {
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
    const v1::JoinRequest join = message.join();
    // Before anything that it says is looked at, or anything is done for it.
    if (absl::Status own = CheckConnected(*context, join.node()); !own.ok()) {
      SayUnproven(own);
      return ToGrpc(own);
    }
    const scheduler::MemberInfo info = FromProto(join);
    const int32_t node = info.node.value();
    const absl::Status admitted = Admit(
        join, context, [&](const v1::DirectoryProof& proof) -> std::optional<v1::DirectoryAnswer> {
          v1::CoordinatorMessage question;
          *question.mutable_directory_proof() = proof;
          if (!stream->Write(question)) return std::nullopt;
          while (stream->Read(&message)) {  // its heart beats meanwhile
            if (message.has_directory_answer()) return message.directory_answer();
          }
          return std::nullopt;
        });
    StreamWriter<v1::CoordinatorMessage> writer(
        [stream](const v1::CoordinatorMessage& m) { return stream->Write(m); });
    absl::Status joined = admitted.ok() ? writer.Start() : admitted;
    if (joined.ok()) joined = Add(info, {context, &writer});
    if (!joined.ok()) {
      SayRefused(node, joined);
      return ToGrpc(joined);
    }
    PartReader<v1::MemberMessage> parts(options_.message_bytes_max + kBesideBytesMax);
    absl::StatusOr<bool> whole = true;
    while (whole.ok() && stream->Read(&message)) {
      OnHeartbeat(info.node, context);
      whole = parts.Take(message);
      if (!whole.ok() || !*whole || message.has_heartbeat()) continue;
      DeliverOf(info.node, context, std::exchange(message, {}));
      to_core_.WaitForRoom();
    }
    Remove(info, context);
    if (whole.ok()) return grpc::Status::OK;
    log::Error("a daemon is shut out", {{"node", node}, {"what", whole.status()}});
    return ToGrpc(whole.status());
  }

  // ---- Peers ----
  void ReloadCertificates() override {
    if (!credentials_->tls()) return;
    if (absl::Status read = credentials_->Reload(); !read.ok()) {
      log::Error("the TLS files were not taken; those from before still count", {{"what", read}});
      return;
    }
    log::Info("the TLS files are read: new connections use them",
              {{"expires", absl::FormatTime(credentials_->expires(), absl::UTCTimeZone())}});
    SayExpiry();
  }
  void Stop() override {
    {
      MutexLock lock(mutex_);
      if (stopped_) return;
      stopped_ = true;
      calls_.Stop();
      connections_.Stop();
      if (joining_ != nullptr) joining_->TryCancel();
      for (auto& [node, stream] : members_) stream.context->TryCancel();
      changed_.NotifyAll();
    }
    if (pulse_.joinable()) pulse_.join();
    if (joiner_.joinable()) joiner_.join();
    if (socket_ != nullptr) socket_->Stop();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
    to_core_.WaitUntilDelivered();  // the last that it hears of the group
  }

 private:
  // The node that has made the connection of a call; nullopt: that has ended.
  std::optional<int32_t> ConnectedBy(const grpc::ServerContext& context) {
    const std::optional<Caller> caller = socket_->CallerOf(context);
    if (!caller.has_value()) return std::nullopt;
    return caller->node;
  }
  // Whether who says that he is `node` has made his connection as that one.
  absl::Status CheckConnected(const grpc::ServerContext& context, int32_t node) {
    const std::optional<int32_t> connected = ConnectedBy(context);
    if (!connected.has_value()) return absl::CancelledError("the caller has gone");
    if (*connected == node) return absl::OkStatus();
    return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN",
                 Say("who joins as node ", Named("node", node), " has connected as node ",
                     Named("other_node", *connected)));
  }
  // Who is refused comes again and again.
  void SayRefused(int32_t node, const absl::Status& status) {
    const auto now = steady_clock::now();
    const std::string reason = ReasonOf(status);  // the text may differ each time
    {
      MutexLock lock(mutex_);
      // Of all that say that they are none of the group's nodes, one.
      Said& said = said_refused_[node >= 0 && node < options_.nodes ? node : -1];
      if (reason == said.reason && now - said.when < kSayRefusedEvery) return;
      said = {reason, now};
    }
    log::Warn("a daemon may not join", {{"node", node}, {"reason", reason}, {"what", status}});
  }
  // A certificate that has expired shows at the next connection only, which may be months later.
  void SayExpiry() {
    if (!credentials_->tls()) return;
    const absl::Time expires = credentials_->expires();
    if (expires - absl::Now() > kSayExpiryBefore) return;
    log::Warn(expires > absl::Now() ? "a certificate of --peer_tls_ca or --peer_tls_certificate "
                                      "expires soon: renew it, then SIGHUP"
                                    : "a certificate of --peer_tls_ca or --peer_tls_certificate "
                                      "has expired: nobody can join the group",
              {{"expires", absl::FormatTime(expires, absl::UTCTimeZone())}});
  }
  // Strangers do not fill the log.
  void SayUnproven(const absl::Status& status) {
    if (!absl::IsUnauthenticated(status)) return;
    {
      MutexLock lock(mutex_);
      const auto now = steady_clock::now();
      if (said_unproven_.has_value() && now - *said_unproven_ < kSayUnprovenEvery) return;
      said_unproven_ = now;
    }
    log::Warn("somebody who is not proven calls", {{"reason", ReasonOf(status)}, {"what", status}});
  }

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

  // A member's stream, which its handler owns and takes away before it returns.
  struct MemberStream {
    grpc::ServerContext* context = nullptr;
    StreamWriter<v1::CoordinatorMessage>* writer = nullptr;
    bool ended = false;  // with the group that it was of: what it still says is of none
  };

  absl::Status Add(const scheduler::MemberInfo& info, const MemberStream& stream) {
    MutexLock lock(mutex_);
    if (stopped_) return NotNow();
    // Lanes that were replaced have made epochs that the machine has not.
    machine_->OnEpoch(scheduler::GroupEpoch(daemon_.newest_epoch()));
    const auto actions = machine_->OnJoin(steady_clock::now(), info);
    if (!actions.ok()) return actions.status();
    const auto before = members_.find(info.node.value());
    if (before != members_.end()) before->second.context->TryCancel();
    members_[info.node.value()] = stream;
    Perform(*actions);
    return absl::OkStatus();
  }
  void Remove(const scheduler::MemberInfo& info, const grpc::ServerContext* context) {
    MutexLock lock(mutex_);
    const auto mine = members_.find(info.node.value());
    // The same process may have joined again: this end is not that stream's.
    if (mine == members_.end() || mine->second.context != context) return;
    const bool ended = mine->second.ended;
    members_.erase(mine);
    if (!ended) Perform(machine_->OnGone(steady_clock::now(), info.node, info.boot_id));
  }
  void OnHeartbeat(scheduler::NodeRank node, const grpc::ServerContext* context) {
    MutexLock lock(mutex_);
    if (IsOfGroup(node, context)) machine_->OnHeartbeat(steady_clock::now(), node);
  }
  void DeliverOf(scheduler::NodeRank node, const grpc::ServerContext* context,
                 v1::MemberMessage message) {
    const size_t bytes = message.ByteSizeLong();
    MutexLock lock(mutex_);
    if (!IsOfGroup(node, context)) return;
    to_core_.Append([this, node = node.value(),
                     message = std::move(message)] { daemon_.OnMemberMessage(node, message); },
                    bytes);
  }
  [[nodiscard]] bool IsOfGroup(scheduler::NodeRank node, const grpc::ServerContext* context) const
      DMUOND_REQUIRES(mutex_) {
    const auto found = members_.find(node.value());
    return found != members_.end() && found->second.context == context && !found->second.ended;
  }
  // A member that shows that it has this node's snapshot directory, before it joins.
  struct Showing {
    grpc::ServerContext* context = nullptr;
    steady_clock::time_point began;
  };
  // What it says of itself wherever a new group begins.
  v1::JoinRequest JoinRequest() const {
    v1::JoinRequest join;
    join.set_node(options_.node);
    join.set_nodes(options_.nodes);
    join.set_lanes(options_.lanes);
    join.set_version(kBuildVersion);
    join.set_protocol_min(kPeerProtocolMin);
    join.set_protocol_max(kPeerProtocolMax);
    join.set_device_type(options_.device_type);
    join.mutable_devices()->Add(options_.devices.begin(), options_.devices.end());
    *join.mutable_bits() = options_.bits;
    join.set_peer_address(options_.advertise);
    join.set_epoch(std::max(options_.epoch, daemon_.newest_epoch()));
    join.set_boot_id(boot_id_);
    join.set_lane_memory_bytes(options_.lane_memory_bytes);
    join.set_snapshots(options_.snapshots != nullptr);
    join.set_jobs_max(options_.jobs_max);
    return join;
  }

  // Tells members and core what the membership machine has decided. Since whatever the core hears
  // is appended under the lock, it hears it in this order: a group has formed; all that members
  // say in it; it has broken; and then nothing of it any more.
  void Perform(const std::vector<scheduler::MembershipAction>& actions) DMUOND_REQUIRES(mutex_) {
    for (const scheduler::MembershipAction& action : actions) {
      if (const auto* formed = std::get_if<scheduler::GroupFormed>(&action)) {
        v1::CoordinatorMessage message;
        message.mutable_join()->set_epoch(formed->epoch.value());
        message.mutable_join()->set_nonce(NewNonce());
        for (const std::string& address : formed->peer_addresses) {
          message.mutable_join()->add_peer_addresses(address);
        }
        calls_.OnFormed(message.join());
        for (auto& [node, stream] : members_) stream.writer->Push(message);
        to_core_.Append([this, epoch = formed->epoch.value()] { daemon_.OnFormed(epoch); });
      } else if (const auto* broken = std::get_if<scheduler::GroupBroken>(&action)) {
        Break(broken->lost.value(), broken->detail);
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
  }
  // Everybody joins anew, for the next epoch; a stream's end is what tells them. Nobody is admitted
  // before the core has heard of this epoch's end, so that it says nothing of it to the next one.
  void Break(int32_t lost, const std::string& why) DMUOND_REQUIRES(mutex_) {
    log::Error("group broken", {{"node", lost}, {"what", why}});
    for (auto& [node, stream] : members_) {
      stream.ended = true;
      stream.context->TryCancel();
    }
    to_core_.Append([this, lost, why] {
      daemon_.OnMemberGone(lost, why);
      MutexLock lock(mutex_);
      machine_->StartOver();
    });
  }

  // Beats, and judges silence, whatever the core does meanwhile.
  void BeatUntilStopped() {
    auto say_expiry_at = steady_clock::now();
    for (;;) {
      const auto now = steady_clock::now();
      if (now >= say_expiry_at) {
        SayExpiry();
        say_expiry_at = now + kSayExpiryEvery;
      }
      MutexLock lock(mutex_);
      if (stopped_) return;
      const bool listens = !to_core_.full();
      if (machine_.has_value()) {
        for (const auto& [node, stream] : members_) {
          if (!listens) machine_->OnHeartbeat(now, scheduler::NodeRank(node));
        }
        Perform(machine_->OnTick(now));
      }
      for (const auto& [node, showing] : showing_) {
        if (now - showing.began >= kShowMax) showing.context->TryCancel();
      }
      if (to_coordinator_ != nullptr && now - beaten_ >= kHeartbeatEvery) {
        beaten_ = now;
        v1::MemberMessage beat;
        beat.mutable_heartbeat()->set_counter(++beats_);
        to_coordinator_->Push(std::move(beat));
      }
      if (heard_.has_value() && !listens) heard_ = now;
      if (joining_ != nullptr && heard_.has_value() && now - *heard_ >= kSilenceMax) {
        silent_ = true;
        joining_->TryCancel();
      }
      changed_.WaitUntil(mutex_, now + kLookEvery);
    }
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
      rejoin_after_ =
          refused_.empty() ? kRejoinAfter : std::min(2 * rejoin_after_, kRejoinAfterMax);
      log::Debug("the next attempt to join",
                 {{"again_after_ms", rejoin_after_.count()}, {"what", why}});
      const auto again = now + rejoin_after_;
      while (!stopped_ && steady_clock::now() < again) changed_.WaitUntil(mutex_, again);
      if (stopped_) return;
    }
  }

  // One stream to the coordinator, from its connection to its end; says why it ended.
  std::string JoinOnce() {
    absl::StatusOr<wire::UniqueFd> connected = connections_.Connect(options_.coordinator, 0);
    if (!connected.ok()) {
      const absl::Status& failed = connected.status();
      return Remember("there is no proven connection to the coordinator",
                      std::string(failed.message()), absl::IsUnauthenticated(failed));
    }
    const auto stub = v1::Peer::NewStub(ChannelOver(*std::move(connected)));
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
    absl::StatusOr<bool> whole = true;
    if (stream->Write(join) && BeginToListen()) {
      auto writer_of_stream = std::make_unique<StreamWriter<v1::MemberMessage>>(
          [&stream](const v1::MemberMessage& m) { return stream->Write(m); });
      if (absl::Status begun = writer_of_stream->Start(); !begun.ok()) {
        whole = begun;
        context.TryCancel();  // it is read to its end
      }
      {
        MutexLock lock(mutex_);
        to_coordinator_ = std::move(writer_of_stream);
      }
      PartReader<v1::CoordinatorMessage> parts(options_.message_bytes_max + kBesideBytesMax);
      v1::CoordinatorMessage message;
      while (stream->Read(&message)) {
        {
          MutexLock lock(mutex_);
          heard_ = steady_clock::now();
          if (!formed && !message.has_directory_proof()) {
            not_joined_ =
                "it has joined, and others have not: dmuonctl status on node 0 names them";
          } else if (!formed && refused_.empty()) {
            not_joined_ = "node 0 compares its snapshot directory with this node's";
          }
        }
        whole = parts.Take(message);
        if (!whole.ok()) break;
        if (!*whole || message.has_heartbeat()) continue;
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
          calls_.OnFormed(message.join());
          {
            MutexLock lock(mutex_);
            not_joined_.clear();
          }
          to_core_.Append([this, epoch = message.join().epoch()] { daemon_.OnFormed(epoch); });
          continue;
        }
        const size_t bytes = message.ByteSizeLong();
        to_core_.Append(
            [this, message = std::exchange(message, {})] { daemon_.OnCoordinatorMessage(message); },
            bytes);
        to_core_.WaitForRoom();
      }
    }
    if (!whole.ok()) context.TryCancel();
    std::unique_ptr<StreamWriter<v1::MemberMessage>> writer;
    {
      MutexLock lock(mutex_);
      writer = std::move(to_coordinator_);
      joining_ = nullptr;
      heard_.reset();
    }
    writer.reset();  // the stream has ended, and with it a write that waits
    const grpc::Status status = stream->Finish();
    std::string why = WhyEnded(status);
    if (!whole.ok()) why = std::string(whole.status().message());
    if (formed) {
      // The core says nothing of the epoch that has ended to the coordinator that is joined next.
      to_core_.Append([this, why] { daemon_.OnCoordinatorGone(why); });
      to_core_.WaitUntilDelivered();
    }
    return Remember("the coordinator refuses this daemon", why,
                    !formed && IsRefusal(status.error_code()));
  }
  // Remembers whether an attempt to join has ended by a refusal, and says so once.
  std::string Remember(const char* line, const std::string& why, bool refused) {
    if (refused && refused_ != why) log::Error(line, {{"what", why}});
    refused_ = refused ? why : "";
    return why;
  }

  std::string WhyEnded(const grpc::Status& status) {
    MutexLock lock(mutex_);
    if (std::exchange(silent_, false)) {
      return absl::StrCat("nothing heard of the coordinator for ", kSilenceMax.count(), " ms");
    }
    // What a stream's own end says to the other side is only that.
    if (status.ok() || status.error_code() == grpc::StatusCode::CANCELLED) {
      return "the coordinator closed the stream; its log says why";
    }
    return status.error_message();
  }
  // Whether the coordinator has decided so, and not the network or the moment.
  static bool IsRefusal(grpc::StatusCode code) {
    switch (code) {
      case grpc::StatusCode::OK:
      case grpc::StatusCode::CANCELLED:
      case grpc::StatusCode::DEADLINE_EXCEEDED:
      case grpc::StatusCode::UNAVAILABLE:
      case grpc::StatusCode::UNKNOWN:
        return false;
      default:
        return true;
    }
  }

  // From now on the coordinator must be heard of.
  bool BeginToListen() {
    MutexLock lock(mutex_);
    heard_ = steady_clock::now();
    return true;
  }

  PeerOptions options_;
  Daemon& daemon_;
  const std::unique_ptr<PeerCredentials> credentials_;
  PeerConnections connections_;  // outlives the server and all channels
  const uint64_t boot_id_;
  DirectCalls calls_;
  const std::unique_ptr<v1::Direct::Service> direct_ = MakeDirectService(
      daemon_, calls_,
      {.node_of = [this](const grpc::ServerContext& context) { return ConnectedBy(context); },
       .refused = [this](const absl::Status& status) { SayUnproven(status); }});
  std::unique_ptr<GrpcSocket> socket_;
  std::unique_ptr<grpc::Server> server_;

  DeliveryQueue to_core_;

  Mutex mutex_;  // never held while the core is called
  CondVar changed_;
  bool stopped_ DMUOND_GUARDED_BY(mutex_) = false;
  std::optional<scheduler::MembershipMachine> machine_ DMUOND_GUARDED_BY(mutex_);  // node 0
  std::map<int32_t, MemberStream> members_ DMUOND_GUARDED_BY(mutex_);              // node 0
  std::map<int32_t, uint64_t> have_shown_directory_ DMUOND_GUARDED_BY(mutex_);  // boot id by node
  std::map<int32_t, Showing> showing_ DMUOND_GUARDED_BY(mutex_);                // by node
  std::unique_ptr<StreamWriter<v1::MemberMessage>> to_coordinator_ DMUOND_GUARDED_BY(mutex_);
  grpc::ClientContext* joining_ DMUOND_GUARDED_BY(mutex_) = nullptr;
  // Other nodes: when something of the coordinator came last, since the request to join was sent.
  std::optional<steady_clock::time_point> heard_ DMUOND_GUARDED_BY(mutex_);
  std::optional<steady_clock::time_point> said_unproven_ DMUOND_GUARDED_BY(mutex_);
  struct Said {
    std::string reason;
    steady_clock::time_point when;
  };
  std::map<int32_t, Said> said_refused_ DMUOND_GUARDED_BY(mutex_);  // by node
  steady_clock::time_point beaten_ DMUOND_GUARDED_BY(mutex_);
  uint64_t beats_ DMUOND_GUARDED_BY(mutex_) = 0;
  // Other nodes, until the group has formed: how the last attempt to join ended.
  std::string not_joined_ DMUOND_GUARDED_BY(mutex_) = "node 0 has not answered yet";
  steady_clock::time_point said_joining_ DMUOND_GUARDED_BY(mutex_);
  bool silent_ DMUOND_GUARDED_BY(mutex_) = false;  // the stream to the coordinator ends for that
  // The joiner's own: why it was refused, the last time, and how long it waited then.
  std::string refused_;
  std::chrono::milliseconds rejoin_after_ = kRejoinAfter;
  std::thread joiner_;
  std::thread pulse_;
};

}  // namespace

int64_t PeerDescriptorsMax(int32_t nodes, bool tls) {
  // gRPC's and the one by which the connection's end is seen; with TLS also the connection's own,
  // this end of the socket pair, and what ends the thread between them.
  const int64_t accepted = tls ? 5 : 2;
  const int64_t made = tls ? 4 : 1;
  const ConnectionLimits::Limits limits = LimitsFor(nodes);
  return accepted * static_cast<int64_t>(limits.all) + made * nodes;
}

absl::StatusOr<std::unique_ptr<Peers>> Peers::Start(PeerOptions options, Daemon& daemon) {
  absl::StatusOr<std::unique_ptr<PeerCredentials>> credentials = PeerCredentials::Make(
      {options.tls_ca_file, options.tls_certificate_file, options.tls_key_file},
      options.allow_plaintext, options.listen, options.coordinator);
  if (!credentials.ok()) return credentials.status();
  auto peers = std::make_unique<GrpcPeers>(std::move(options), daemon, *std::move(credentials));
  absl::Status listening = peers->Listen();
  if (!listening.ok()) return listening;
  return peers;
}

}  // namespace dmuond::server
