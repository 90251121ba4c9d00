// The process at the other end of a connected Unix socket, as the kernel knows it.
//
//   wire::PeerProcess peer = wire::PeerProcess::Of(socket);
//   if (peer.Runs()) …
//
// Two processes are told apart by the inodes of their pidfds, and where the kernel gives these none
// (before Linux 6.9) by their pids. A process of a PID namespace that is neither this one nor below
// it has no pid here: the kernel calls it 0, and so each of its kind. Before Linux 6.5 it has no
// pidfd either, and nobody here sees its end.
//
// Threads: any, after Of().
#ifndef DMUOND_WIRE_PEER_PROCESS_H_
#define DMUOND_WIRE_PEER_PROCESS_H_

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "base/unique_fd.h"

namespace dmuond::wire {

// Names a process, as far as the kernel lets this one tell it from others.
struct ProcessId {
  enum class Same : uint8_t { kYes, kNo, kUnknown };

  pid_t pid = 0;       // 0: it has none here. For messages, and where there is no inode
  uint64_t inode = 0;  // of its pidfd; no other process has it, ever. 0: not known

  // REQUIRES: the two have lived at one time. (A pid is given again.)
  [[nodiscard]] Same SameAs(const ProcessId& other) const {
    if (inode != 0 && other.inode != 0) return inode == other.inode ? Same::kYes : Same::kNo;
    if (pid > 0 || other.pid > 0) return pid == other.pid ? Same::kYes : Same::kNo;
    return Same::kUnknown;
  }
};

class PeerProcess {
 public:
  // What is asked of the kernel. Tests leave something out, as an older kernel does.
  struct Asked {
    bool peer_pidfd = true;  // SO_PEERPIDFD, Linux 6.5
    bool inode = true;       // Linux 6.9
  };

  PeerProcess() = default;  // nothing is known
  static PeerProcess Of(int connected, Asked asked) {
    PeerProcess peer;
    ucred credentials{};
    socklen_t size = sizeof(credentials);
    if (::getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return peer;
    peer.id_.pid = credentials.pid;
    peer.uid_ = credentials.uid;
    peer.pidfd_ = PidFd(connected, credentials.pid, asked.peer_pidfd);
    if (peer.pidfd_.valid() && asked.inode) peer.id_.inode = InodeOf(peer.pidfd_.get());
    return peer;
  }
  static PeerProcess Of(int connected) { return Of(connected, Asked()); }

  [[nodiscard]] const ProcessId& id() const { return id_; }
  [[nodiscard]] pid_t pid() const { return id_.pid; }
  [[nodiscard]] uid_t uid() const { return uid_; }
  // Becomes readable when the process has ended; -1: its end is not seen.
  [[nodiscard]] int pidfd() const { return pidfd_.get(); }
  [[nodiscard]] bool EndIsSeen() const { return pidfd_.valid(); }
  // Whether it is known to have ended, or ends within that time.
  [[nodiscard]] bool HasEnded(std::chrono::milliseconds within = {}) const {
    if (!pidfd_.valid()) return false;
    pollfd polled{pidfd_.get(), POLLIN, 0};
    return ::poll(&polled, 1, static_cast<int>(within.count())) > 0;
  }

 private:
  // From the socket where the kernel can: a pid may be used again, and may be 0.
  static UniqueFd PidFd(int connected, pid_t pid, bool from_socket) {
    constexpr int kSoPeerPidFd = 77;  // Debian 12's headers do not know it
    int pidfd = -1;
    socklen_t size = sizeof(pidfd);
    if (from_socket && ::getsockopt(connected, SOL_SOCKET, kSoPeerPidFd, &pidfd, &size) == 0) {
      return UniqueFd(pidfd);
    }
    if (pid <= 0) return {};
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  }

  static uint64_t InodeOf(int pidfd) {
    constexpr int64_t kPidFs = 0x50494446;  // elsewhere all pidfds have one inode
    struct statfs system {};
    struct stat file {};
    if (::fstatfs(pidfd, &system) != 0 || system.f_type != kPidFs) return 0;
    return ::fstat(pidfd, &file) == 0 ? file.st_ino : 0;
  }

  ProcessId id_;
  uid_t uid_ = static_cast<uid_t>(-1);  // nobody
  UniqueFd pidfd_;
};

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_PEER_PROCESS_H_
