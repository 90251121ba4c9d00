// The daemon's process, as the kernel knows it: whether it has ended, or has only gone silent.
// Threads: any.
#ifndef DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_
#define DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <string>

#include "dmuond/wire/unique_fd.h"

namespace dmuond::client {

// The process that listens at the other end of a connected Unix socket.
class DaemonProcess {
 public:
  explicit DaemonProcess(int connected);

  // Whether it is known to have ended, or ends within that time.
  [[nodiscard]] bool HasEnded(std::chrono::milliseconds within) const;
  // "the daemon (pid 4711)"; without the number where the process is in another pid namespace.
  [[nodiscard]] std::string Text() const;
  // For people, of a connection that has hung up: that it has ended, or has closed it.
  [[nodiscard]] std::string HowItEnded() const;

 private:
  pid_t pid_ = 0;
  wire::UniqueFd process_;  // a pidfd; invalid where the process is not visible
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_
