// What the daemon tells the service manager that has started it, systemd for instance: that it
// serves, that it leaves, and that its cores turn. By sd_notify's protocol: datagrams to the socket
// that $NOTIFY_SOCKET names. Where there is none, or one that cannot be sent to, nothing is told.
//
//   ServiceManager manager = ServiceManager::Take();
//   manager.Tell("READY=1");
//   manager.Turned();  // after each tick of all cores
//
// Threads: one at a time.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_SERVICE_MANAGER_H_
#define DMUOND_SERVER_DAEMON_PROCESS_SERVICE_MANAGER_H_

#include <chrono>
#include <string>

#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace dmuond::server {

class ServiceManager {
 public:
  // Takes the address out of this process's environment, so that no process that it starts can
  // speak in its place. REQUIRES: no other thread reads the environment.
  [[nodiscard]] static ServiceManager Take();

  // One assignment of sd_notify(3). It does not wait: a manager that does not read misses it.
  void Tell(absl::string_view state);
  // Tells the watchdog, in time, that every core has come through a tick. A manager that does not
  // hear so for $WATCHDOG_USEC ends this process.
  void Turned();

 private:
  wire::UniqueFd socket_;  // connected; invalid: nobody is told
  // From one word for the watchdog to the next; 0: it is not told.
  std::chrono::microseconds every_{0};
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_SERVICE_MANAGER_H_
