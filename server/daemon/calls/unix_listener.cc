#include "server/daemon/calls/unix_listener.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dmuond/wire/socket_path.h"

namespace dmuond::server {
namespace {

// gRPC's clients do not wait for a place in the queue of a Unix socket: a trainer that finds it
// full is told UNAVAILABLE. So it has room for whatever a neighbour opens meanwhile; the kernel's
// own bound (net.core.somaxconn, 4096 by default) is below this one.
constexpr int kBacklog = 65'536;

}  // namespace

void ListeningSocket::Close() {
  if (!socket_.valid()) return;
  struct stat file {};
  if (::lstat(path_.c_str(), &file) == 0 && file.st_dev == device_ && file.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
  socket_.Reset();
}

absl::StatusOr<ListeningSocket> Listen(const UnixListener& listener) {
  const std::string& path = listener.path;
  const auto failed = [&](const char* call) {
    return absl::ErrnoToStatus(errno, absl::StrCat(call, " of ", listener.what, " ", path));
  };
  const absl::StatusOr<sockaddr_un> address = wire::SocketAddress(path);
  if (!address.ok()) return address.status();
  wire::UniqueFd socket(::socket(AF_UNIX, listener.type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return failed("socket()");
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    return failed("bind()");
  }
  struct stat file {};
  if (::lstat(path.c_str(), &file) != 0) return failed("lstat()");
  // Nobody can connect before listen(): the right mode and group are in place by then.
  if (::chmod(path.c_str(), listener.mode) != 0) return failed("chmod()");
  if (listener.group.has_value() &&
      ::chown(path.c_str(), static_cast<uid_t>(-1), *listener.group) != 0) {
    return failed("chown()");
  }
  if (::listen(socket.get(), kBacklog) != 0) return failed("listen()");
  return ListeningSocket(std::move(socket), path, file.st_dev, file.st_ino);
}

}  // namespace dmuond::server
