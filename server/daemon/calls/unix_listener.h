// A Unix socket that listens, with its mode and group in place before anybody can connect.
#ifndef DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_
#define DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "dmuond/wire/unique_fd.h"

namespace dmuond::server {

struct UnixListener {
  std::string what;            // for errors: "attach socket"
  std::string path;            // nothing may lie there
  int type = 0;                // SOCK_STREAM or SOCK_SEQPACKET
  mode_t mode = 0600;          // 0600 or 0660
  std::optional<gid_t> group;  // of the socket file; unset: the process's
};

// Non-blocking, closed on exec. The error names the path.
[[nodiscard]] absl::StatusOr<wire::UniqueFd> Listen(const UnixListener& listener);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_
