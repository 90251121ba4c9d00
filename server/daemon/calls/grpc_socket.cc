#include "server/daemon/calls/grpc_socket.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "scheduler/shown_pid.h"
#include "server/common/log.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/trainer_process.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

// Threads of connections that are closed and whose proof has not ended yet.
constexpr size_t kEndingMax = 32;

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcSocket>> GrpcSocket::Make(ListeningSocket listener,
                                                             Options options) {
  absl::StatusOr<std::unique_ptr<AcceptLoop>> loop = AcceptLoop::Make(options.name, listener.fd());
  if (!loop.ok()) return loop.status();
  return std::unique_ptr<GrpcSocket>(
      new GrpcSocket(std::move(listener), std::move(options), *std::move(loop)));
}

GrpcSocket::GrpcSocket(ListeningSocket listener, Options options, std::unique_ptr<AcceptLoop> loop)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      loop_(std::move(loop)),
      rate_(options_.per_second),
      limits_(options_.limits),
      proofs_(options_.limits.strangers + kEndingMax) {}

GrpcSocket::~GrpcSocket() { Stop(); }

void GrpcSocket::Serve(grpc::Server& server) {
  server_ = &server;
  thread_ = std::thread([this] {
    loop_->Run({.on_connection =
                    [this](wire::UniqueFd socket, const sockaddr_storage& from) {
                      const Origin origin = OriginOf(socket.get(), from);
                      Take(std::move(socket), origin);
                    },
                .on_ready = [this](uint64_t id) { OnReady(id); },
                .on_round = [this] { return DropStrangers(); }});
  });
}

void GrpcSocket::Stop() {
  {
    MutexLock lock(mutex_);
    if (stop_) return;
    stop_ = true;
    for (const auto& [id, connection] : connections_) {
      if (!connection.known && options_.prove) ::shutdown(connection.held.get(), SHUT_RDWR);
    }
  }
  loop_->Stop();
  proofs_.Stop();
  if (thread_.joinable()) thread_.join();
  listener_.Close();
}

std::optional<Caller> GrpcSocket::CallerOf(const grpc::ServerContext& context) {
  MutexLock lock(mutex_);
  const Connection* connection = Find(context);
  // The number may be that of a newer connection: then the call's own has ended, and the call with
  // it.
  if (connection == nullptr || context.IsCancelled()) return std::nullopt;
  return connection->caller;
}

void GrpcSocket::MakeKnown(const grpc::ServerContext& context) {
  MutexLock lock(mutex_);
  Connection* connection = Find(context);
  if (connection == nullptr || connection->known || context.IsCancelled()) return;
  connection->known = true;
  limits_.MakeKnown(connection->id, connection->holder);
}

GrpcSocket::Connection* GrpcSocket::Find(const grpc::ServerContext& context) {
  const std::string peer = context.peer();  // "fd:7"
  absl::string_view text = peer;
  int number = -1;
  if (!absl::ConsumePrefix(&text, "fd:") || !absl::SimpleAtoi(text, &number)) return nullptr;
  const auto id = by_number_.find(number);
  if (id == by_number_.end()) return nullptr;
  const auto found = connections_.find(id->second);
  return found == connections_.end() ? nullptr : &found->second;
}

void GrpcSocket::OnReady(uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = connections_.find(id);
  // Who is still being proven ends at once, with the thread that does it.
  const bool known = found == connections_.end() || found->second.known || !options_.prove;
  known ? Remove(id) : End(id);
}

GrpcSocket::Origin GrpcSocket::OriginOf(int socket, const sockaddr_storage& from) const {
  if (options_.prove) return {.holder = HolderOf(from), .fields = {{"address", AddressOf(from)}}};
  const wire::PeerProcess peer = PeerOf(socket);
  return {.holder = peer.uid(),
          .caller = {.process = peer.id(), .uid = peer.uid()},
          .fields = {{"uid", peer.uid()}, scheduler::PidField<log::Field>(peer.pid())}};
}

// Strangers do not fill the log.
void GrpcSocket::Refuse(absl::string_view why, const Origin& origin) {
  const std::optional<int64_t> before = refusals_.Now(Clock::now());
  if (!before.has_value()) return;
  std::vector<log::Field> fields = {{"socket", options_.name}, {"why", why}};
  fields.insert(fields.end(), origin.fields.begin(), origin.fields.end());
  fields.emplace_back("others_since_the_last_line", *before);
  log::Warn("connection refused", fields);
}

void GrpcSocket::Take(wire::UniqueFd socket, const Origin& origin) {
  const uint64_t id = loop_->NewId();
  {
    MutexLock lock(mutex_);
    if (stop_) return;
    const absl::string_view refused = Count(id, socket.get(), origin);
    if (!refused.empty()) return Refuse(refused, origin);
    if (!options_.prove) GiveToGrpc(connections_.at(id), socket.get());
  }
  if (!options_.prove) return grpc::AddInsecureChannelFromFd(server_, socket.Release());
  const auto given = std::make_shared<wire::UniqueFd>(std::move(socket));
  // While there are too many, others wait in the kernel's queue.
  const absl::Status begun =
      proofs_.Begin([this, id, origin, given] { Prove(id, std::move(*given), origin); });
  if (begun.ok()) return;
  MutexLock lock(mutex_);
  if (!stop_) Refuse(begun.message(), origin);
  Remove(id);
}

absl::string_view GrpcSocket::Count(uint64_t id, int socket, const Origin& origin) {
  const Clock::time_point now = Clock::now();
  const auto& allowed = options_.allowed_uids;
  if (allowed.has_value() &&
      std::find(allowed->begin(), allowed->end(), origin.caller.uid) == allowed->end()) {
    return "user not allowed (--allowed_uids)";
  }
  const bool tcp = options_.prove != nullptr;
  if (tcp && !rate_.Take(now, origin.holder)) return "its address begins too many in a second";
  wire::UniqueFd held(::fcntl(socket, F_DUPFD_CLOEXEC, 0));
  if (!held.valid()) return "no descriptor is left";
  const ConnectionLimits::Verdict verdict = limits_.Add(id, origin.holder);
  if (!verdict.taken) {
    return tcp ? "its address has too many" : "its user has too many (--connections_per_uid, _max)";
  }
  if (verdict.instead.has_value()) {
    Refuse(tcp ? "too many prove nothing: another one is closed"
               : "its user has too many that prove nothing: the oldest is closed",
           origin);
    End(*verdict.instead);
  }
  if (!loop_->Watch(held.get(), id, EPOLLRDHUP)) {
    limits_.Remove(id, origin.holder);
    return "it cannot be watched";
  }
  connections_[id] = {.id = id,
                      .holder = origin.holder,
                      .caller = origin.caller,
                      .held = std::move(held),
                      .since = now};
  return "";
}

void GrpcSocket::GiveToGrpc(Connection& connection, int number) {
  connection.number = number;
  by_number_[number] = connection.id;
}

void GrpcSocket::Prove(uint64_t id, wire::UniqueFd socket, const Origin& origin) {
  absl::StatusOr<Proven> proven = options_.prove(std::move(socket));
  int number = -1;
  {
    MutexLock lock(mutex_);
    const auto found = connections_.find(id);
    if (!proven.ok()) {
      if (!stop_) Refuse(proven.status().message(), origin);
      Remove(id);
    } else if (found != connections_.end() && !stop_) {
      Connection& connection = found->second;
      connection.caller.node = proven->node;
      connection.known = true;
      limits_.MakeKnown(id, connection.holder);
      number = proven->socket.Release();
      GiveToGrpc(connection, number);
    }
  }
  if (number >= 0) grpc::AddInsecureChannelFromFd(server_, number);
}

bool GrpcSocket::DropStrangers() {
  if (!options_.strange_for.has_value()) return false;
  const Clock::time_point now = Clock::now();
  std::vector<uint64_t> overdue;
  MutexLock lock(mutex_);
  for (const auto& [id, connection] : connections_) {
    if (!connection.known && connection.since + *options_.strange_for <= now) overdue.push_back(id);
  }
  for (const uint64_t id : overdue) {
    log::Debug("connection closed: it has proven nothing in time",
               {{"socket", options_.name},
                scheduler::PidField<log::Field>(connections_.at(id).caller.process.pid),
                {"uid", connections_.at(id).caller.uid}});
    End(id);
  }
  return !connections_.empty();
}

// For gRPC, too, which closes its own descriptor then.
void GrpcSocket::End(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  ::shutdown(found->second.held.get(), SHUT_RDWR);
  Remove(id);
}

void GrpcSocket::Remove(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const Connection& connection = found->second;
  // By itself it would go when gRPC's descriptor is closed as well.
  loop_->Forget(connection.held.get());
  limits_.Remove(id, connection.holder);
  const auto number = by_number_.find(connection.number);
  if (number != by_number_.end() && number->second == id) by_number_.erase(number);
  connections_.erase(found);
}

}  // namespace dmuond::server
