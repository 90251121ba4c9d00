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
#include "scheduler/shown_pid.h"
#include "server/common/log.h"
#include "server/daemon/trainer_process.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
// After running out of descriptors; the listener stays readable meanwhile.
constexpr std::chrono::milliseconds kAcceptPause{100};
// How late a stranger's connection is closed, and a pause ends.
constexpr std::chrono::milliseconds kLook{100};

bool Watch(int events, int fd, uint64_t id, uint32_t what, int how = EPOLL_CTL_ADD) {
  epoll_event event{};
  event.events = what;
  event.data.u64 = id;
  return ::epoll_ctl(events, how, fd, &event) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcSocket>> GrpcSocket::Listen(Options options) {
  absl::StatusOr<ListeningSocket> listener = server::Listen({.what = "socket",
                                                             .path = options.path,
                                                             .type = SOCK_STREAM,
                                                             .mode = options.mode,
                                                             .group = options.group});
  if (!listener.ok()) return listener.status();
  wire::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  wire::UniqueFd events(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake.valid() || !events.valid() || !Watch(events.get(), wake.get(), kWake, EPOLLIN)) {
    return absl::ErrnoToStatus(errno, "eventfd or epoll");
  }
  return std::unique_ptr<GrpcSocket>(
      new GrpcSocket(std::move(options), *std::move(listener), std::move(wake), std::move(events)));
}

GrpcSocket::GrpcSocket(Options options, ListeningSocket listener, wire::UniqueFd wake,
                       wire::UniqueFd events)
    : options_(std::move(options)),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      events_(std::move(events)),
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
  }
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
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
  limits_.MakeKnown(connection->id, connection->caller.uid);
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
        AcceptAll();
        continue;
      }
      MutexLock lock(mutex_);
      Remove(id);
    }
    DropStrangers();
  }
}

void GrpcSocket::AcceptAll() {
  for (;;) {
    wire::UniqueFd socket(
        ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      Take(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      log::Warn(
          "connection not accepted",
          {{"socket", options_.path}, {"error", absl::ErrnoToStatus(errno, "accept").message()}});
      accept_again_ = Clock::now() + kAcceptPause;
      ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
      accepting_ = false;
    }
    return;
  }
}

void GrpcSocket::Take(wire::UniqueFd socket) {
  const Clock::time_point now = Clock::now();
  const wire::PeerProcess peer = PeerOf(socket.get());
  const uid_t uid = peer.uid();
  const auto refuse = [&](const char* why) {
    const std::optional<int64_t> before = refusals_.Now(now);
    if (!before.has_value()) return;
    log::Warn("connection refused", {{"socket", options_.path},
                                     {"why", why},
                                     {"uid", uid},
                                     scheduler::PidField<log::Field>(peer.pid()),
                                     {"others_since_the_last_line", *before}});
  };
  const auto& allowed = options_.allowed_uids;
  if (allowed.has_value() && std::find(allowed->begin(), allowed->end(), uid) == allowed->end())
    return refuse("user not allowed (--allowed_uids)");
  wire::UniqueFd held(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!held.valid()) return refuse("no descriptor is left");
  const int number = socket.get();
  {
    MutexLock lock(mutex_);
    const uint64_t id = next_id_++;
    const ConnectionLimits::Verdict verdict = limits_.Add(id, uid);
    if (!verdict.taken) return refuse("its user has too many (--connections_per_uid, _max)");
    if (verdict.instead.has_value()) {
      refuse("its user has too many that prove nothing: the oldest is closed");
      End(*verdict.instead);
    }
    if (!Watch(events_.get(), held.get(), id, EPOLLRDHUP)) {
      limits_.Remove(id, uid);
      return refuse("it cannot be watched");
    }
    connections_[id] = {.id = id,
                        .caller = {.process = peer.id(), .uid = uid},
                        .number = number,
                        .held = std::move(held),
                        .since = now};
    by_number_[number] = id;
  }
  grpc::AddInsecureChannelFromFd(server_, socket.Release());
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
               {{"socket", options_.path},
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
  limits_.Remove(id, connection.caller.uid);
  const auto number = by_number_.find(connection.number);
  if (number != by_number_.end() && number->second == id) by_number_.erase(number);
  connections_.erase(found);
}

}  // namespace dmuond::server
