// Waits in a thread of its own until a daemon says that it is ready.
#ifndef DMUOND_SERVER_CTL_READY_WAIT_H_
#define DMUOND_SERVER_CTL_READY_WAIT_H_

#include <stop_token>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace dmuond::server::ctl {

class ReadyWait {
 public:
  ReadyWait(std::string socket, absl::Duration timeout);
  ~ReadyWait();  // gives up
  ReadyWait(const ReadyWait&) = delete;
  ReadyWait& operator=(const ReadyWait&) = delete;

  // Readable when the waiting is over.
  [[nodiscard]] int done_fd() const { return done_.get(); }
  // OK: the daemon is ready. DEADLINE_EXCEEDED: it was not in time. REQUIRES: done_fd() is
  // readable.
  [[nodiscard]] absl::Status Result();

 private:
  absl::Status Wait();

  const std::string socket_;
  const wire::UniqueFd done_;
  const absl::Time until_;
  std::stop_source stop_;
  absl::Status result_;  // the thread's, until it has ended
  std::thread thread_;
};

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_READY_WAIT_H_
