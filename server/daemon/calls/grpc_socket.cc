#include "server/daemon/calls/grpc_socket.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "dmuond/wire/start_thread.h"
#include "scheduler/shown_pid.h"
#include "server/common/log.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/trainer_process.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
// After running out of descriptors; the listener stays readable meanwhile.
constexpr std::chrono::milliseconds kAcceptPause{100};
// Before other events are looked at: the listener stays readable while there are more.
constexpr int kAcceptedAtOnce = 64;
// Threads of connections that are closed and whose proof has not ended yet.
constexpr size_t kEndingMax = 32;
// How late a stranger's connection is closed, and a pause ends.
constexpr std::chrono::milliseconds kLook{100};

bool Watch(int events, int fd, uint64_t id, uint32_t what, int how = EPOLL_CTL_ADD) {
  epoll_event event{};
  event.events = what;
  event.data.u64 = id;
  return ::epoll_ctl(events, how, fd, &event) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcSocket>> GrpcSocket::Make(ListeningSocket listener,
                                                             Options options) {
  wire::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  wire::UniqueFd events(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake.valid() || !events.valid() || !Watch(events.get(), wake.get(), kWake, EPOLLIN)) {
    return absl::ErrnoToStatus(errno, "eventfd or epoll");
  }
  return std::unique_ptr<GrpcSocket>(
      new GrpcSocket(std::move(listener), std::move(options), std::move(wake), std::move(events)));
}

GrpcSocket::GrpcSocket(ListeningSocket listener, Options options, wire::UniqueFd wake,
                       wire::UniqueFd events)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      events_(std::move(events)),
      rate_(options_.per_second),
      limits_(options_.limits) {}

GrpcSocket::~GrpcSocket() { Stop(); }

void GrpcSocket::Serve(grpc::Server& server) {
  server_ = &server;
  thread_ = std::thread([this] { Run(); });
}

void GrpcSocket::Stop() {
  {
    MutexLock lock(mutex_);
    if (stop_) return;
    stop_ = true;
    changed_.NotifyAll();
  }
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  listener_.Close();
  MutexLock lock(mutex_);
  for (const auto& [id, connection] : connections_) {
    if (!connection.known && options_.prove) ::shutdown(connection.held.get(), SHUT_RDWR);
  }
  while (proving_ > 0) changed_.Wait(mutex_);
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

void GrpcSocket::Run() {
  std::array<epoll_event, 64> ready;
  for (;;) {
    if (!accepting_ && Clock::now() >= accept_again_) {
      accepting_ = Watch(events_.get(), listener_.fd(), kListener, EPOLLIN);
    }
    int timeout_ms = accepting_ ? -1 : static_cast<int>(kLook.count());
    {
      MutexLock lock(mutex_);
      if (stop_) return;
      if (options_.strange_for.has_value() && !connections_.empty()) {
        timeout_ms = static_cast<int>(kLook.count());
      }
    }
    const int count =
        ::epoll_wait(events_.get(), ready.data(), static_cast<int>(ready.size()), timeout_ms);
    for (int i = 0; i < count; ++i) {
      const uint64_t id = ready[i].data.u64;
      if (id == kWake) continue;  // to stop
      if (id == kListener) {
        AcceptSome();
        continue;
      }
      MutexLock lock(mutex_);
      const auto found = connections_.find(id);
      // Who is still being proven ends at once, with the thread that does it.
      const bool known = found == connections_.end() || found->second.known || !options_.prove;
      known ? Remove(id) : End(id);
    }
    DropStrangers();
  }
}

void GrpcSocket::AcceptSome() {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    sockaddr_storage from{};
    socklen_t size = sizeof(from);
    wire::UniqueFd socket(::accept4(listener_.fd(), reinterpret_cast<sockaddr*>(&from), &size,
                                    SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      Origin origin;
      if (options_.prove) {
        origin.holder = HolderOf(from);
        origin.fields = {{"address", AddressOf(from)}};
      } else {
        const wire::PeerProcess peer = PeerOf(socket.get());
        origin.holder = peer.uid();
        origin.caller = {.process = peer.id(), .uid = peer.uid()};
        origin.fields = {{"uid", peer.uid()}, scheduler::PidField<log::Field>(peer.pid())};
      }
      Take(std::move(socket), origin);
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      log::Warn(
          "connection not accepted",
          {{"socket", options_.name}, {"error", absl::ErrnoToStatus(errno, "accept").message()}});
      accept_again_ = Clock::now() + kAcceptPause;
      ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
      accepting_ = false;
    }
    return;
  }
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
  {
    MutexLock lock(mutex_);
    const uint64_t id = next_id_++;
    const absl::string_view refused = Count(id, socket.get(), origin);
    if (!refused.empty()) return Refuse(refused, origin);
    if (options_.prove) return BeginProof(id, std::move(socket), origin);
    GiveToGrpc(connections_.at(id), socket.get());
  }
  grpc::AddInsecureChannelFromFd(server_, socket.Release());
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
  if (!Watch(events_.get(), held.get(), id, EPOLLRDHUP)) {
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

void GrpcSocket::BeginProof(uint64_t id, wire::UniqueFd socket, const Origin& origin) {
  // Threads whose connection was closed end at once; meanwhile others wait in the kernel's queue.
  while (proving_ >= options_.limits.strangers + kEndingMax && !stop_) changed_.Wait(mutex_);
  if (stop_) return Remove(id);
  const int fd = socket.get();
  absl::StatusOr<std::thread> thread = wire::StartThread(
      "a daemon's proof", [this, id, origin, fd] { Prove(id, wire::UniqueFd(fd), origin); });
  if (!thread.ok()) {
    Refuse(thread.status().message(), origin);
    return Remove(id);
  }
  [[maybe_unused]] const int given = socket.Release();  // to the thread, which closes it
  ++proving_;                                           // the thread cannot end before: the lock
  thread->detach();
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
  MutexLock lock(mutex_);
  --proving_;
  changed_.NotifyAll();
}

void GrpcSocket::DropStrangers() {
  if (!options_.strange_for.has_value()) return;
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
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, connection.held.get(), nullptr);
  limits_.Remove(id, connection.holder);
  const auto number = by_number_.find(connection.number);
  if (number != by_number_.end() && number->second == id) by_number_.erase(number);
  connections_.erase(found);
}

}  // namespace dmuond::server
