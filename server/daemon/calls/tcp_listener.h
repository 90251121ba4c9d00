// TCP sockets that listen, and who connects to them.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_CALLS_TCP_LISTENER_H_
#define DMUOND_SERVER_DAEMON_CALLS_TCP_LISTENER_H_

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

struct addrinfo;

namespace dmuond::server {

struct TcpListener {
  wire::UniqueFd socket;  // non-blocking
  int port = 0;           // the one that is bound
};
// On host:port; the port 0 is any free one. "0.0.0.0" and "[::]" are every address of this machine;
// of a name's addresses it is the first that can be had. The error says why there is none.
[[nodiscard]] absl::StatusOr<TcpListener> ListenTcp(const std::string& address);

// Of a connection, for its limits (connection_limits.h): its address or, of IPv6, the half of it
// that a network has, within which a machine can take as many as it likes.
[[nodiscard]] uint64_t HolderOf(const sockaddr_storage& from);
// For people.
[[nodiscard]] std::string AddressOf(const sockaddr_storage& from);

// The parts of host:port; the host without the brackets of an IPv6 address.
[[nodiscard]] std::string HostOf(const std::string& address);
[[nodiscard]] std::string PortOf(const std::string& address);

// What getaddrinfo() makes of them with `flags`.
struct Resolved {
  struct Free {
    void operator()(addrinfo* found) const;
  };
  int error = 0;  // of getaddrinfo()
  std::unique_ptr<addrinfo, Free> addresses;
};
// It may wait for a name server.
[[nodiscard]] Resolved Resolve(const std::string& host, const std::string& port, int flags);
[[nodiscard]] absl::Status NotResolved(const std::string& address, int error);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_TCP_LISTENER_H_
