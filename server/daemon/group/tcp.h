// TCP connections to other daemons.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_TCP_H_
#define DMUOND_SERVER_DAEMON_GROUP_TCP_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server {

// How long whoever waits for a descriptor does so.
struct Patience {
  std::chrono::steady_clock::time_point until;
  int cancel = -1;  // readable: no longer; -1: there is no such descriptor

  // For `events` of poll(). DEADLINE_EXCEEDED; CANCELLED.
  [[nodiscard]] absl::Status WaitFor(int fd, short events) const;
};

// A non-blocking connection to host:port, whose addresses are tried one after the other.
// UNAVAILABLE names the address and says what the last one of them answered.
[[nodiscard]] absl::StatusOr<wire::UniqueFd> ConnectTcp(const std::string& address,
                                                        const Patience& patience);

// What every connection between daemons gets: small messages go at once, and a machine that is gone
// is noticed.
void SetUpTcp(int fd);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_TCP_H_
