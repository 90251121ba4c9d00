#include "server/daemon/process/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "dmuond/wire/socket_path.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

// The variable's value, which is removed; "" where there is none.
std::string TakeVariable(const char* name) {
  const char* value = std::getenv(name);
  std::string taken = value == nullptr ? "" : value;
  ::unsetenv(name);
  return taken;
}

// A datagram socket that is connected to a path, or to an abstract address, which begins with '@'.
absl::StatusOr<wire::UniqueFd> ConnectTo(const std::string& name) {
  if (name[0] != '/' && name[0] != '@') {
    return absl::InvalidArgumentError("it begins with neither / nor @");
  }
  absl::StatusOr<sockaddr_un> address = wire::SocketAddress(name);
  if (!address.ok()) return address.status();
  if (name[0] == '@') address->sun_path[0] = '\0';
  wire::UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  // An abstract address is as long as it is said to be; a path ends with a zero.
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  // The API's type for addresses of every family.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), length) != 0) {
    return absl::ErrnoToStatus(errno, "connect");
  }
  return socket;
}

}  // namespace

ServiceManager ServiceManager::Take() {
  const std::string name = TakeVariable("NOTIFY_SOCKET");
  const std::string period = TakeVariable("WATCHDOG_USEC");
  const std::string of_pid = TakeVariable("WATCHDOG_PID");
  ServiceManager manager;
  if (name.empty()) return manager;
  absl::StatusOr<wire::UniqueFd> socket = ConnectTo(name);
  if (!socket.ok()) {
    log::Warn("the service manager cannot be told that this daemon serves",
              {{"NOTIFY_SOCKET", name}, {"what", socket.status()}});
    return manager;
  }
  manager.socket_ = *std::move(socket);
  // Inherited from a process that the watchdog is about, it is not about this one.
  int64_t usec = 0;
  int64_t pid = 0;
  const bool mine = of_pid.empty() || (absl::SimpleAtoi(of_pid, &pid) && pid == ::getpid());
  if (mine && absl::SimpleAtoi(period, &usec) && usec > 0) {
    manager.every_ = std::chrono::microseconds(usec) / 3;
  }
  return manager;
}

void ServiceManager::Tell(absl::string_view state) {
  if (!socket_.valid()) return;
  if (::send(socket_.get(), state.data(), state.size(), MSG_NOSIGNAL) >= 0) return;
  log::Warn("the service manager was not told",
            {{"state", std::string(state)}, {"what", absl::ErrnoToStatus(errno, "send")}});
}

void ServiceManager::Turned() {
  if (every_.count() == 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + every_;
  Tell("WATCHDOG=1");
}

}  // namespace dmuond::server
