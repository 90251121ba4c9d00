#include "server/lane/tcp_watch.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {
namespace {

// Calls with the descriptor of each TCP connection, and its other end.
void ForEach(absl::FunctionRef<void(int fd, const sockaddr_storage& peer)> call) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int type = 0;
    socklen_t size = sizeof(type);
    if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) continue;
    sockaddr_storage peer{};
    size = sizeof(peer);
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    if (peer.ss_family == AF_INET || peer.ss_family == AF_INET6) call(fd, peer);
  }
}

std::string Text(const sockaddr_storage& peer) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  if (peer.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(peer);
    ::inet_ntop(AF_INET, &address.sin_addr, host.data(), host.size());
    return absl::StrCat(host.data(), ":", ntohs(address.sin_port));
  }
  const auto& address = reinterpret_cast<const sockaddr_in6&>(peer);
  ::inet_ntop(AF_INET6, &address.sin6_addr, host.data(), host.size());
  return absl::StrCat("[", host.data(), "]:", ntohs(address.sin6_port));
}

}  // namespace

void EndSilentConnections(std::chrono::milliseconds timeout) {
  const auto milliseconds = static_cast<unsigned>(timeout.count());
  // A connection ends at a question that is not answered: three of them within the time.
  const int seconds = static_cast<int>(std::max<int64_t>(1, timeout.count() / 3000));
  const int on = 1;
  ForEach([&](int fd, const sockaddr_storage&) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
    ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  });
}

TcpTraffic ReadTcpTraffic() {
  TcpTraffic traffic;
  ForEach([&traffic](int fd, const sockaddr_storage& peer) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
    traffic.bytes += info.tcpi_bytes_received + info.tcpi_bytes_acked;
    absl::StrAppend(&traffic.connections, traffic.connections.empty() ? "" : "; ", Text(peer),
                    ": last bytes ", info.tcpi_last_data_recv / 1000, " s ago, ", info.tcpi_unacked,
                    " packets not acknowledged");
  });
  return traffic;
}

}  // namespace dmuond::server::lane
