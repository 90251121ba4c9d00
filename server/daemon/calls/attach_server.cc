#include "server/daemon/calls/attach_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/frame.h"
#include "scheduler/shown_pid.h"
#include "server/common/errors.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kNonceBytes = 16;
constexpr size_t kExpiredKept = 1024;
// An attach sends one small frame for each arena before the trainer reads the first of them.
constexpr int kSendBufferBytes = 1 << 20;
// After running out of descriptors; the listener stays readable meanwhile.
constexpr std::chrono::milliseconds kAcceptPause{100};
// So late a thread is not by itself.
constexpr std::chrono::milliseconds kStoppedFor{1'000};

absl::StatusOr<std::string> MakeNonce() {
  std::string nonce(kNonceBytes, '\0');
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  return nonce;
}

log::Field PidFieldOf(const TrainerProcess& process) {
  return scheduler::PidField<log::Field>(process.peer.pid());
}

}  // namespace

struct AttachServer::Connection {
  AttachId id;
  std::shared_ptr<TrainerProcess> process;
  wire::UniqueFd socket;
  std::string nonce;  // empty: claimed
  Clock::time_point claim_deadline;
  bool closed = false;  // by this end; the process has not closed its own
};

// The connections are held here too: a descriptor must not be closed, and its number used again,
// while the thread polls it.
struct AttachServer::Round {
  std::vector<pollfd> polled;
  std::vector<std::shared_ptr<Connection>> connections;  // for polled[2], [3], …: one or two each
  std::vector<size_t> connection_of;                     // by index in `polled`, minus 2
  int timeout_ms = -1;
};

absl::StatusOr<std::unique_ptr<AttachServer>> AttachServer::Start(Options options,
                                                                  Callbacks callbacks) {
  if (options.allowed_uids.empty()) options.allowed_uids.push_back(::geteuid());
  absl::StatusOr<ListeningSocket> listener = Listen({.what = "attach socket",
                                                     .path = options.path,
                                                     .type = SOCK_SEQPACKET,
                                                     .mode = options.mode,
                                                     .group = options.group});
  if (!listener.ok()) return listener.status();
  wire::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  std::unique_ptr<AttachServer> server(new AttachServer(std::move(options), std::move(callbacks),
                                                        *std::move(listener), std::move(wake)));
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  return server;
}

AttachServer::AttachServer(Options options, Callbacks callbacks, ListeningSocket listener,
                           wire::UniqueFd wake)
    : options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      limits_(options_.limits) {}

AttachServer::~AttachServer() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
  listener_.Close();
}

void AttachServer::Wake() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

absl::StatusOr<AttachPeer> AttachServer::Claim(absl::string_view nonce) {
  MutexLock lock(mutex_);
  const auto found = nonces_.find(std::string(nonce));
  if (found == nonces_.end() &&
      std::find(expired_.begin(), expired_.end(), nonce) != expired_.end()) {
    return Error(absl::StatusCode::kUnauthenticated, "CLAIM_EXPIRED",
                 Say("the session was opened later than ",
                     Named("timeout_ms", options_.claim_timeout.count()),
                     " ms after its attach connection, which is closed: connect ", options_.path,
                     " again, as clients do by themselves; a larger --claim_timeout gives slow "
                     "starts more time"));
  }
  if (found == nonces_.end()) {
    return Error(absl::StatusCode::kUnauthenticated, "NONCE_UNKNOWN",
                 Say("the nonce (", Named("nonce_bytes", nonce.size()),
                     " bytes) is not that of an open attach connection: connect ", options_.path,
                     " and read Welcome first; a nonce opens one session"));
  }
  Connection& connection = *connections_.at(found->second);
  connection.nonce.clear();
  nonces_.erase(found);
  limits_.MakeKnown(connection.id.value(), connection.process->peer.uid());
  return AttachPeer{connection.id, connection.process};
}

bool AttachServer::Knows(absl::string_view nonce) {
  MutexLock lock(mutex_);
  return nonces_.contains(std::string(nonce));
}

absl::Status AttachServer::Send(AttachId id, const v1::AttachFrame& frame, int fd) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    const auto found = connections_.find(id);
    if (found != connections_.end() && !found->second->closed) connection = found->second;
  }
  if (connection == nullptr) {
    return Error(absl::StatusCode::kNotFound, "TRAINER_LOST",
                 Say("attach connection ", id.value(), " has ended"));
  }
  absl::Status sent = wire::SendPacket(connection->socket.get(), frame.SerializeAsString(),
                                       fd < 0 ? std::vector<int>{} : std::vector<int>{fd});
  if (sent.ok() || absl::IsInvalidArgument(sent)) return sent;
  // The server's thread sees the end and reports it as it reports any other.
  ::shutdown(connection->socket.get(), SHUT_RDWR);
  return Error(absl::StatusCode::kUnavailable, "TRAINER_LOST",
               Say("the trainer's process (", scheduler::SayPid(connection->process->peer.pid()),
                   ") is gone or does not read its attach connection: ", sent.message()));
}

void AttachServer::Close(AttachId id) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    connection = found->second;
    connection->closed = true;
    if (!connection->nonce.empty()) nonces_.erase(std::exchange(connection->nonce, ""));
    if (connection->process->peer.EndIsSeen()) Remove(id);
  }
  if (!connection->process->peer.EndIsSeen()) {
    ::shutdown(connection->socket.get(), SHUT_WR);
    return;
  }
  // The thread may still hold the connection for the length of a poll: end it for the peer now.
  ::shutdown(connection->socket.get(), SHUT_RDWR);
  Wake();
}

std::shared_ptr<AttachServer::Connection> AttachServer::Remove(AttachId id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return nullptr;
  std::shared_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  limits_.Remove(id.value(), connection->process->peer.uid());
  if (!connection->nonce.empty()) nonces_.erase(connection->nonce);
  return connection;
}

void AttachServer::FillRound(Round& round) {
  const Clock::time_point now = Clock::now();
  Clock::time_point wake_at = Clock::time_point::max();
  const bool accepting = now >= accept_again_;
  if (!accepting) wake_at = accept_again_;
  round = Round();
  round.polled.push_back({wake_.get(), POLLIN, 0});
  round.polled.push_back({accepting ? listener_.fd() : -1, POLLIN, 0});
  MutexLock lock(mutex_);
  for (const auto& [id, connection] : connections_) {
    // Claim() clears a nonce without waking the thread: then it wakes once for nothing.
    if (!connection->nonce.empty()) wake_at = std::min(wake_at, connection->claim_deadline);
    round.connections.push_back(connection);
    for (const int fd : {connection->socket.get(), connection->process->peer.pidfd()}) {
      if (fd < 0) continue;
      round.polled.push_back({fd, POLLIN, 0});
      round.connection_of.push_back(round.connections.size() - 1);
    }
  }
  if (wake_at != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at - now).count();
    // In short parts: after one that took much longer, this process has been stopped.
    round.timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, kStoppedFor.count()));
  }
}

void AttachServer::Run() {
  for (;;) {
    Round round;
    FillRound(round);
    {
      MutexLock lock(mutex_);
      if (stop_) return;
    }
    const Clock::time_point due = Clock::now() + std::chrono::milliseconds(round.timeout_ms);
    if (::poll(round.polled.data(), round.polled.size(), round.timeout_ms) < 0 && errno != EINTR) {
      log::Error("attach server cannot poll",
                 {{"error", absl::ErrnoToStatus(errno, "poll").message()}});
      accept_again_ = Clock::now() + kAcceptPause;  // no busy loop, whatever the reason
      continue;
    }
    if (round.polled[0].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken = ::read(wake_.get(), &count, sizeof(count));
    }
    if (round.polled[1].revents != 0) AcceptAll();
    for (size_t i = 2; i < round.polled.size(); ++i) {
      // Readable is enough: a trainer has nothing to say, so it is an end or a breach.
      if (round.polled[i].revents == 0) continue;
      EndByItself(round.connections[round.connection_of[i - 2]]->id);
    }
    if (round.timeout_ms >= 0 && Clock::now() - due > kStoppedFor) ForgiveTheStopped();
    DropOverdue();
  }
}

// This process was stopped: claims that came meanwhile lie in the other socket still.
void AttachServer::ForgiveTheStopped() {
  const Clock::time_point deadline = Clock::now() + options_.claim_timeout;
  MutexLock lock(mutex_);
  for (const auto& [id, connection] : connections_) connection->claim_deadline = deadline;
}

void AttachServer::EndByItself(AttachId id) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = Remove(id);
  }
  // Both descriptors of a connection may report its end, and Close() may have been first.
  if (connection == nullptr) return;
  ::shutdown(connection->socket.get(), SHUT_RDWR);
  connection->process->disconnected = true;
  if (!connection->nonce.empty() || connection->closed) return;
  log::Debug(
      "attach connection ended",
      {{"attach", id}, PidFieldOf(*connection->process), {"uid", connection->process->peer.uid()}});
  callbacks_.on_gone(id);
}

void AttachServer::DropOverdue() {
  const Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<Connection>> overdue;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, connection] : connections_) {
      if (!connection->nonce.empty() && connection->claim_deadline <= now) {
        overdue.push_back(connection);
      }
    }
    for (const auto& connection : overdue) {
      expired_.push_back(connection->nonce);
      if (expired_.size() > kExpiredKept) expired_.pop_front();
      Remove(connection->id);
    }
  }
  for (const auto& connection : overdue) {
    log::Info("attach connection closed: no session opened in time",
              {PidFieldOf(*connection->process), {"uid", connection->process->peer.uid()}});
  }
}

void AttachServer::AcceptAll() {
  for (;;) {
    wire::UniqueFd socket(
        ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      Welcome(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      const absl::Status why = absl::ErrnoToStatus(errno, "accept");
      const Clock::time_point now = Clock::now();
      if (const std::optional<int64_t> before = pauses_.Now(now); before.has_value()) {
        log::Warn("attach connection not accepted; tried again until one is",
                  {{"error", why.message()}, {"others_since_the_last_line", *before}});
      }
      accept_again_ = now + kAcceptPause;
    }
    return;
  }
}

void AttachServer::Welcome(wire::UniqueFd socket) {
  const auto process = std::make_shared<TrainerProcess>(PeerOf(socket.get()));
  const uid_t uid = process->peer.uid();
  const auto refuse = [&](const char* why) {
    const std::optional<int64_t> before = refusals_.Now(Clock::now());
    if (!before.has_value()) return;
    log::Warn("attach connection refused", {{"why", why},
                                            {"uid", uid},
                                            PidFieldOf(*process),
                                            {"others_since_the_last_line", *before}});
  };
  const auto& allowed = options_.allowed_uids;
  if (std::find(allowed.begin(), allowed.end(), uid) == allowed.end()) {
    return refuse("user not allowed (--allowed_uids)");
  }
  absl::StatusOr<std::string> nonce = MakeNonce();
  if (!nonce.ok()) {
    log::Error("no nonce", {{"error", nonce.status()}});
    return;
  }
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
  v1::AttachFrame frame;
  frame.mutable_welcome()->set_nonce(*nonce);
  auto connection = std::make_shared<Connection>();
  connection->nonce = *nonce;
  connection->claim_deadline = Clock::now() + options_.claim_timeout;
  {
    MutexLock lock(mutex_);
    const ConnectionLimits::Verdict verdict = limits_.Add(next_id_, uid);
    if (!verdict.taken) {
      return refuse("too many (--connections_max, --connections_per_uid)");
    }
    if (verdict.instead.has_value()) {
      refuse("its user has too many without a session: the oldest is closed");
      const std::shared_ptr<Connection> oldest = Remove(AttachId(*verdict.instead));
      ::shutdown(oldest->socket.get(), SHUT_RDWR);
    }
    connection->id = AttachId(next_id_++);
    connection->process = process;
    connection->socket = std::move(socket);
    connections_.emplace(connection->id, connection);
    nonces_.emplace(*std::move(nonce), connection->id);
  }
  // Only now may the nonce be known. If this fails, the next poll says so.
  [[maybe_unused]] const absl::Status sent =
      wire::SendPacket(connection->socket.get(), frame.SerializeAsString());
}

}  // namespace dmuond::server
