#include "server/daemon/group/tcp.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/start_thread.h"
#include "server/daemon/calls/tcp_listener.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;
using Addresses = decltype(Resolved::addresses);

// A machine that answers nothing is gone after 30 s, and three questions.
constexpr int kSilentForS = 30;
constexpr int kAskEveryS = 10;
constexpr int kAskTimes = 3;
constexpr unsigned int kUnackedMs = 60'000;  // what was sent, and nothing says that it came

// A name server may not answer for long, and nothing ends its question: the thread that asks is
// left behind then.
absl::StatusOr<Addresses> ResolveWithin(const std::string& address, const Patience& patience) {
  const std::string host = HostOf(address);
  const std::string port = PortOf(address);
  Resolved numeric = Resolve(host, port, AI_NUMERICHOST);
  if (numeric.error == 0) return std::move(numeric.addresses);
  struct Question {
    wire::UniqueFd done{::eventfd(0, EFD_CLOEXEC)};
    Resolved answer;  // the thread's, until `done`
  };
  const auto question = std::make_shared<Question>();
  if (!question->done.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  absl::StatusOr<std::thread> thread = wire::StartThread("a name's address", [=] {
    question->answer = Resolve(host, port, 0);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(question->done.get(), &one, sizeof(one));
  });
  if (!thread.ok()) return thread.status();
  thread->detach();
  if (absl::Status waited = patience.WaitFor(question->done.get(), POLLIN); !waited.ok()) {
    return absl::Status(waited.code(), absl::StrCat("the host of ", address,
                                                    " is not resolved: ", waited.message()));
  }
  if (question->answer.error != 0) return NotResolved(address, question->answer.error);
  return std::move(question->answer.addresses);
}

absl::StatusOr<wire::UniqueFd> ConnectTo(const addrinfo& to, const Patience& patience) {
  wire::UniqueFd socket(
      ::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (::connect(socket.get(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return absl::ErrnoToStatus(errno, "connect");
    if (absl::Status waited = patience.WaitFor(socket.get(), POLLOUT); !waited.ok()) return waited;
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return absl::ErrnoToStatus(error, "connect");
  }
  SetUpTcp(socket.get());
  return socket;
}

}  // namespace

absl::Status Patience::WaitFor(int fd, short events) const {
  std::array<pollfd, 2> polled = {{{fd, events, 0}, {cancel, POLLIN, 0}}};
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - steady_clock::now()).count();
    // Also of who always has something to say.
    if (left <= 0) return absl::DeadlineExceededError("it takes too long");
    const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
    if (ready > 0 && polled[1].revents != 0) return absl::CancelledError("this daemon leaves");
    if (ready > 0) return absl::OkStatus();
  }
}

void SetUpTcp(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kSilentForS, sizeof(kSilentForS));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kAskEveryS, sizeof(kAskEveryS));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kAskTimes, sizeof(kAskTimes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnackedMs, sizeof(kUnackedMs));
}

absl::StatusOr<wire::UniqueFd> ConnectTcp(const std::string& address, const Patience& patience) {
  absl::StatusOr<Addresses> addresses = ResolveWithin(address, patience);
  if (!addresses.ok()) return addresses.status();
  absl::Status failed;
  int left = 0;
  for (const addrinfo* to = addresses->get(); to != nullptr; to = to->ai_next) ++left;
  for (const addrinfo* to = addresses->get(); to != nullptr; to = to->ai_next, --left) {
    // One that answers nothing leaves the others their share of the time.
    const auto now = steady_clock::now();
    const Patience share = {.until = now + (patience.until - now) / left,
                            .cancel = patience.cancel};
    absl::StatusOr<wire::UniqueFd> connected = ConnectTo(*to, share);
    if (connected.ok()) return connected;
    failed = connected.status();
    if (absl::IsCancelled(failed)) return failed;
  }
  return absl::UnavailableError(
      absl::StrCat("nobody answers at ", address, ": ", failed.message()));
}

}  // namespace dmuond::server
