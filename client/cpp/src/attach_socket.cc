#include "client/cpp/src/attach_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "client/cpp/src/status.h"
#include "dmuond/wire/frame.h"
#include "dmuond/wire/socket_path.h"
#include "dmuond/wire/start_thread.h"

namespace dmuond::client {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kFrameTimeout{30};
constexpr std::chrono::milliseconds kWelcomeTimeout{10'000};

absl::Status Unreachable(const std::string& path, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, kDaemonUnreachable,
                   absl::StrCat("no dmuond answers at '", path, "': ", why));
}

absl::StatusOr<wire::UniqueFd> ConnectOnce(const sockaddr_un& address) {
  wire::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  int result = 0;
  do {
    result = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return absl::ErrnoToStatus(errno, "connect");
  const timeval timeout{kFrameTimeout.count(), 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  return socket;
}

// A daemon that is just starting has no socket yet (ENOENT), or does not listen (ECONNREFUSED).
bool MayBeStarting(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsUnavailable(status);
}

absl::StatusOr<wire::UniqueFd> ConnectUntil(const std::string& path, Clock::time_point deadline) {
  ASSIGN_OR_RETURN(const sockaddr_un address, wire::SocketAddress(path));
  std::chrono::milliseconds pause{5};
  for (;;) {
    absl::StatusOr<wire::UniqueFd> socket = ConnectOnce(address);
    if (socket.ok()) return socket;
    if (!MayBeStarting(socket.status()) || Clock::now() + pause > deadline) {
      return Unreachable(path, std::string(socket.status().message()));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(200));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachSocket>> AttachSocket::Connect(
    const std::string& path, std::chrono::milliseconds timeout, std::function<void()> on_lost) {
  ASSIGN_OR_RETURN(wire::UniqueFd socket, ConnectUntil(path, Clock::now() + timeout));
  DaemonProcess daemon(socket.get());
  pollfd answer{socket.get(), POLLIN, 0};
  if (::poll(&answer, 1, static_cast<int>(kWelcomeTimeout.count())) == 0) {
    return MakeError(absl::StatusCode::kUnavailable, kDaemonUnreachable,
                     absl::StrCat(daemon.Text(), " at '", path, "' has not answered for ",
                                  absl::FormatDuration(absl::FromChrono(kWelcomeTimeout)),
                                  ", and has not ended: it is stopped, or gets no processor time"));
  }
  absl::StatusOr<wire::Frame> packet = wire::ReceivePacket(socket.get());
  v1::AttachFrame frame;
  if (!packet.ok() || !frame.ParseFromString(packet->body) || !frame.has_welcome()) {
    return Unreachable(path,
                       "it closed the attach socket without a welcome: it does not allow "
                       "this user, or is full");
  }
  wire::UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  std::unique_ptr<AttachSocket> attach(new AttachSocket(std::move(socket), std::move(daemon),
                                                        std::move(stop), frame.welcome().nonce(),
                                                        std::move(on_lost)));
  ASSIGN_OR_RETURN(attach->watcher_, wire::StartThread("the watch of the daemon",
                                                       [raw = attach.get()] { raw->Watch(); }));
  return attach;
}

AttachSocket::AttachSocket(wire::UniqueFd socket, DaemonProcess daemon, wire::UniqueFd stop,
                           std::string nonce, std::function<void()> on_lost)
    : socket_(std::move(socket)),
      daemon_(std::move(daemon)),
      stop_(std::move(stop)),
      nonce_(std::move(nonce)),
      on_lost_(std::move(on_lost)) {}

AttachSocket::~AttachSocket() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the watcher wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  if (watcher_.joinable()) watcher_.join();
}

absl::StatusOr<AttachSocket::Received> AttachSocket::NextFrame() {
  absl::StatusOr<wire::Frame> packet = wire::ReceivePacket(socket_.get());
  if (!packet.ok()) return DaemonLost(packet.status().message(), HowItEnded());
  Received received;
  if (!received.frame.ParseFromString(packet->body) || packet->fds.size() != 1) {
    return absl::InternalError(absl::StrCat("an attach frame of ", packet->body.size(),
                                            " bytes with ", packet->fds.size(), " descriptors"));
  }
  received.fd = std::move(packet->fds.front());
  return received;
}

bool AttachSocket::GoneWithin(std::chrono::milliseconds grace) const {
  const auto deadline = std::chrono::steady_clock::now() + grace;
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const int found = ::poll(&polled, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (found >= 0 || errno != EINTR) return found > 0;
  }
}

void AttachSocket::Watch() const {
  pollfd polled[] = {{stop_.get(), POLLIN, 0}, {socket_.get(), POLLRDHUP, 0}};
  while (::poll(polled, 2, -1) < 0) {
    // Only EINTR is possible.
  }
  if (polled[0].revents == 0) on_lost_();
}

}  // namespace dmuond::client
