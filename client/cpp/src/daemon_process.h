// The daemon's process, as the kernel knows it: whether it has ended, or has only gone silent.
// Threads: any.
#ifndef DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_
#define DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_

#include <chrono>
#include <string>

#include "dmuond/wire/peer_process.h"

namespace dmuond::client {

// The process that listens at the other end of a connected Unix socket.
class DaemonProcess {
 public:
  explicit DaemonProcess(int connected) : process_(wire::PeerProcess::Of(connected)) {}

  // Whether it is known to have ended, or ends within that time.
  [[nodiscard]] bool HasEnded(std::chrono::milliseconds within) const {
    return process_.HasEnded(within);
  }
  // "the daemon (pid 4711)"; without the number where the process is in another pid namespace.
  [[nodiscard]] std::string Text() const;
  // For people, of a connection that has hung up: that it has ended, or has closed it.
  [[nodiscard]] std::string HowItEnded() const;

 private:
  wire::PeerProcess process_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_DAEMON_PROCESS_H_
