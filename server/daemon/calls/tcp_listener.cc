#include "server/daemon/calls/tcp_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::server {
namespace {

// The kernel's own bound (net.core.somaxconn, 4096 by default) is below this one.
constexpr int kTcpBacklog = 65'536;

absl::StatusOr<wire::UniqueFd> Bind(const addrinfo& to) {
  wire::UniqueFd socket(
      ::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  const int on = 1;
  const int off = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // [::] has IPv4's connections, too.
  if (to.ai_family == AF_INET6) {
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (::bind(socket.get(), to.ai_addr, to.ai_addrlen) != 0) {
    return absl::ErrnoToStatus(errno, "bind");
  }
  if (::listen(socket.get(), kTcpBacklog) != 0) return absl::ErrnoToStatus(errno, "listen");
  return socket;
}

int BoundPort(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

}  // namespace

void Resolved::Free::operator()(addrinfo* found) const { ::freeaddrinfo(found); }

Resolved Resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  Resolved resolved;
  resolved.error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  resolved.addresses.reset(found);
  return resolved;
}

absl::Status NotResolved(const std::string& address, int error) {
  return absl::UnavailableError(
      absl::StrCat("the host of ", address, " cannot be resolved: ", ::gai_strerror(error)));
}

std::string HostOf(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  return host.size() > 2 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

std::string PortOf(const std::string& address) { return address.substr(address.rfind(':') + 1); }

uint64_t HolderOf(const sockaddr_storage& from) {
  uint64_t holder = 0;
  if (from.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(from).sin_addr.s_addr);
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(from).sin6_addr;
  const bool is_4 = IN6_IS_ADDR_V4MAPPED(&address);
  for (int i = is_4 ? 12 : 0; i < (is_4 ? 16 : 8); ++i) holder = holder << 8 | address.s6_addr[i];
  return holder;
}

std::string AddressOf(const sockaddr_storage& from) {
  std::array<char, NI_MAXHOST> host{};
  const int failed = ::getnameinfo(reinterpret_cast<const sockaddr*>(&from), sizeof(from),
                                   host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
  return failed == 0 ? host.data() : "";
}

absl::StatusOr<TcpListener> ListenTcp(const std::string& address) {
  const std::string port = PortOf(address);
  const std::string given = HostOf(address);
  absl::Status failed = absl::UnavailableError("it has no address");
  // Where there is no IPv6, IPv4 alone.
  for (const std::string& host : given == "0.0.0.0" ? std::array<std::string, 2>{"::", given}
                                                    : std::array<std::string, 2>{given, ""}) {
    if (host.empty()) break;
    const Resolved resolved = Resolve(host, port, AI_PASSIVE);
    if (resolved.error != 0) return NotResolved(address, resolved.error);
    for (const addrinfo* to = resolved.addresses.get(); to != nullptr; to = to->ai_next) {
      absl::StatusOr<wire::UniqueFd> bound = Bind(*to);
      if (bound.ok()) {
        const int bound_port = BoundPort(bound->get());
        return TcpListener{*std::move(bound), bound_port};
      }
      failed = bound.status();
    }
  }
  return failed;
}

}  // namespace dmuond::server
