// Paths of Unix sockets: the suffix by which a trainer finds the daemon's attach socket, and the
// one check that a path fits into a socket's address.
//
//   absl::StatusOr<sockaddr_un> address = wire::SocketAddress(path);
#ifndef DMUOND_WIRE_SOCKET_PATH_H_
#define DMUOND_WIRE_SOCKET_PATH_H_

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuond::wire {

// The attach socket lies beside the daemon's gRPC socket: its path ends with this, too.
inline constexpr char kAttachSuffix[] = ".attach";
// sockaddr_un has room for so many bytes and a zero.
inline constexpr size_t kSocketPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;

// INVALID_ARGUMENT names the path, its bytes and the limit where no socket can lie there.
[[nodiscard]] inline absl::Status CheckSocketPath(absl::string_view path) {
  if (path.size() <= kSocketPathBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the path of the Unix socket '", path, "' has ",
                                                 path.size(), " bytes, at most ",
                                                 kSocketPathBytesMax, " are possible"));
}

// The address of the socket at `path`, for bind() and connect(). Errors are CheckSocketPath()'s.
[[nodiscard]] inline absl::StatusOr<sockaddr_un> SocketAddress(absl::string_view path) {
  if (absl::Status fits = CheckSocketPath(path); !fits.ok()) return fits;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_SOCKET_PATH_H_
