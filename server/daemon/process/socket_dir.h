// The place of the daemon's sockets on disk: <dir>/NAME (gRPC, for trainers), <dir>/NAME.attach,
// <dir>/NAME.admin (gRPC, for dmuonctl), <dir>/NAME.lock.
// This checks that nobody else can put anything there, and that one daemon at a time serves it.
//
//   absl::StatusOr<SocketDir> place = SocketDir::Prepare(config.socket);
//   … listen at config.socket, and with each suffix …
//
// The lock is held as long as the object lives, and ends with the process however that ends. Its
// file stays: removing it would let two daemons lock two files of one name.
//
// Threads: one.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_SOCKET_DIR_H_
#define DMUOND_SERVER_DAEMON_PROCESS_SOCKET_DIR_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server {

class SocketDir {
 public:
  static constexpr char kAdminSuffix[] = ".admin";
  static constexpr char kLockSuffix[] = ".lock";

  // Makes the directory (0700; with socket_mode 0660 0750) where it is missing; otherwise it must
  // be a directory, no symbolic link, owned by this user, with no more rights than 0750. Takes the
  // lock, then removes sockets that a dead daemon has left. `socket` is an absolute path; `group`
  // (unset: the process's) is that of a new directory and of the sockets.
  // INVALID_ARGUMENT: path too long or not absolute. FAILED_PRECONDITION: directory, socket or lock
  // belongs to someone else, or is not what it should be. ALREADY_EXISTS: another dmuond (with its
  // pid) serves this socket. Waits for the lanes of one that has died.
  static absl::StatusOr<SocketDir> Prepare(const std::string& socket, mode_t socket_mode = 0600,
                                           std::optional<gid_t> group = std::nullopt);

  // The lock's descriptor. Processes that inherit it hold the lock, so that no successor begins
  // before they have ended.
  [[nodiscard]] int lock() const { return lock_.get(); }

  // Whether the lock's file was removed or replaced, as it is when the directory is removed: then
  // another daemon can serve this socket beside this one.
  [[nodiscard]] bool LockFileIsLost() const;

 private:
  SocketDir(std::string lock_path, wire::UniqueFd lock)
      : lock_path_(std::move(lock_path)), lock_(std::move(lock)) {}

  std::string lock_path_;
  wire::UniqueFd lock_;
};

// INVALID_ARGUMENT where a socket that lies beside `socket` would have too long a path: of the
// daemon's own, or, with `managed_mps`, of those that the control daemon of MPS makes.
[[nodiscard]] absl::Status CheckSocketPaths(const std::string& socket, bool managed_mps = false);

// Where daemon and clients meet unless told otherwise:
// ${XDG_RUNTIME_DIR:-/tmp}/dmuond-$UID/dmuond.sock.
[[nodiscard]] std::string DefaultSocket();

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_SOCKET_DIR_H_
