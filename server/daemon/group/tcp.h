// TCP connections between daemons: a socket that listens, and the way to another daemon's.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_TCP_H_
#define DMUOND_SERVER_DAEMON_GROUP_TCP_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/wire/unique_fd.h"

namespace dmuond::server {

// How long whoever waits for a descriptor does so.
struct Patience {
  std::chrono::steady_clock::time_point until;
  int cancel = -1;  // readable: no longer; -1: there is no such descriptor

  // For `events` of poll(). DEADLINE_EXCEEDED; CANCELLED.
  [[nodiscard]] absl::Status WaitFor(int fd, short events) const;
};

struct TcpListener {
  wire::UniqueFd socket;  // non-blocking
  int port = 0;           // the one that is bound
};
// On host:port; the port 0 is any free one. "0.0.0.0" and "[::]" are every address of this machine;
// of a name's addresses it is the first that can be had. The error says why there is none.
[[nodiscard]] absl::StatusOr<TcpListener> ListenTcp(const std::string& address);

// A non-blocking connection to host:port, whose addresses are tried one after the other. UNAVAILABLE
// names the address and says what the last one of them answered.
[[nodiscard]] absl::StatusOr<wire::UniqueFd> ConnectTcp(const std::string& address,
                                                        const Patience& patience);

// What every connection between daemons gets: small messages go at once, and a machine that is gone
// is noticed.
void SetUpTcp(int fd);

// The host of host:port, without the brackets of an IPv6 address.
[[nodiscard]] std::string HostOf(const std::string& address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_TCP_H_
