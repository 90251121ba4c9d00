// A Unix socket that listens, with its mode and group in place before anybody can connect.
#ifndef DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_
#define DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server {

struct UnixListener {
  std::string what;            // for errors: "attach socket"
  std::string path;            // nothing may lie there
  int type = 0;                // SOCK_STREAM or SOCK_SEQPACKET
  mode_t mode = 0600;          // 0600 or 0660
  std::optional<gid_t> group;  // of the socket file; unset: the process's
};

// A socket that listens, and the file that was made for it; a TCP socket has none. Move-only.
class ListeningSocket {
 public:
  explicit ListeningSocket(wire::UniqueFd socket) : socket_(std::move(socket)) {}
  ListeningSocket(wire::UniqueFd socket, std::string path, dev_t device, ino_t inode)
      : socket_(std::move(socket)), path_(std::move(path)), device_(device), inode_(inode) {}

  [[nodiscard]] int fd() const { return socket_.get(); }
  // Removes the file and closes the socket. Once the file is gone, the socket of another process
  // may lie at its path: that one is left alone.
  void Close();

 private:
  wire::UniqueFd socket_;
  std::string path_;
  // Nobody else's file has these while the socket is open: it keeps its file's inode.
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Non-blocking, closed on exec. The error names the path.
[[nodiscard]] absl::StatusOr<ListeningSocket> Listen(const UnixListener& listener);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_UNIX_LISTENER_H_
