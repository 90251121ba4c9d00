// Stream frames (proto/dmuond/wire/frame.h) on their way into a socket that may be full. Keep()
// keeps them, in order, with copies of their descriptors; Flush() sends as much as fits, many
// frames by one system call.
//
// Threads: one at a time.
#ifndef DMUOND_SERVER_DAEMON_LANES_OUTBOX_H_
#define DMUOND_SERVER_DAEMON_LANES_OUTBOX_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"

namespace dmuond::server {

class Outbox {
 public:
  // Bytes that may wait. A plan of a large job is one frame of some tens of MiB.
  static constexpr size_t kWaitingBytesMax = size_t{2} << 30;

  // `fds` may be closed when this returns. INVALID_ARGUMENT: the frame is too large.
  // RESOURCE_EXHAUSTED: too much waits, or this process has no descriptors left.
  absl::Status Keep(const std::string& body, const std::vector<int>& fds);
  // Sends what fits. UNAVAILABLE: the other end is gone.
  absl::Status Flush(int socket);
  [[nodiscard]] bool empty() const { return frames_.empty(); }
  void Clear() {
    frames_.clear();
    waiting_bytes_ = 0;
  }

 private:
  struct Waiting {
    std::string bytes;  // header and body
    size_t sent = 0;
    std::vector<wire::UniqueFd> fds;  // go with the first byte
  };
  std::deque<Waiting> frames_;
  size_t waiting_bytes_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_OUTBOX_H_
