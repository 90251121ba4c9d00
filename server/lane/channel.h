// A lane's end of the socket pair to its daemon. Buffers are kept from message to message.
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_CHANNEL_H_
#define DMUOND_SERVER_LANE_CHANNEL_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"

namespace dmuond::server::lane {

class Channel {
 public:
  explicit Channel(wire::UniqueFd socket) : socket_(std::move(socket)) {}

  [[nodiscard]] int fd() const { return socket_.get(); }
  // Whether Receive() would find something, a closed socket included.
  [[nodiscard]] bool Readable() const;
  // Blocks for the rest of a message. UNAVAILABLE: the daemon is gone.
  absl::Status Receive(v1::LaneCommand& command, std::vector<wire::UniqueFd>& fds);
  absl::Status Send(const v1::LaneReport& report);

 private:
  wire::UniqueFd socket_;
  std::string in_;
  std::string out_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_CHANNEL_H_
