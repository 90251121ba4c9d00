// Checks whose daemon it is before it gets the token: anybody who can write into the directory
// could put a socket of their own there. Threads: any.
#ifndef DMUOND_CLIENT_CPP_SRC_SOCKET_OWNER_H_
#define DMUOND_CLIENT_CPP_SRC_SOCKET_OWNER_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace dmuond::client {

// OK where the socket `path`, its directory, and the process at the other end of `attach`, which is
// connected to its attach socket, are root's, this process's own user's or `server_uid`'s. Else
// PERMISSION_DENIED, reason SOCKET_OWNER, with metadata path, uid and own_uid.
[[nodiscard]] absl::Status CheckSocketOwner(const std::string& path, int attach,
                                            std::optional<uid_t> server_uid);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_SOCKET_OWNER_H_
