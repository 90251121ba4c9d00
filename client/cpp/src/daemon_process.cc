#include "client/cpp/src/daemon_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace dmuond::client {
namespace {

constexpr int kSoPeerPidFd = 77;  // Linux 6.5; Debian 12's headers do not know it
// A process that ends closes its sockets first.
constexpr std::chrono::milliseconds kEndsWithin{500};

// From the socket where the kernel can, because a pid may be used again.
wire::UniqueFd PidFd(int connected, pid_t pid) {
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (::getsockopt(connected, SOL_SOCKET, kSoPeerPidFd, &pidfd, &size) == 0) {
    return wire::UniqueFd(pidfd);
  }
  if (pid <= 0) return {};
  return wire::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

DaemonProcess::DaemonProcess(int connected) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) pid_ = peer.pid;
  process_ = PidFd(connected, pid_);
}

bool DaemonProcess::HasEnded(std::chrono::milliseconds within) const {
  if (!process_.valid()) return false;
  pollfd polled{process_.get(), POLLIN, 0};
  return ::poll(&polled, 1, static_cast<int>(within.count())) > 0;
}

std::string DaemonProcess::Text() const {
  return pid_ > 0 ? absl::StrCat("the daemon (pid ", pid_, ")") : "the daemon";
}

std::string DaemonProcess::HowItEnded() const {
  if (HasEnded(kEndsWithin)) return absl::StrCat(Text(), " has ended");
  return absl::StrCat(Text(), pid_ > 0 ? ", which has not ended," : " has ended, or",
                      " has closed its connection to this trainer");
}

}  // namespace dmuond::client
