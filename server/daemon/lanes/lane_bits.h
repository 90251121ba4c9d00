// What decides the bits that this node's lanes compute. Only the program that computes knows which
// libraries it has loaded, and which of their kernels run; the daemon has no device's libraries. So
// the lane's program is asked, with the environment that lanes get.
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_

#include <string>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

// Runs `binary --device=DEVICE --print_bits` and waits for its end, some tens of milliseconds on
// the CPU. Errors have what the program has said. Threads: any.
[[nodiscard]] absl::StatusOr<v1::LaneBits> AskForBits(const std::string& binary,
                                                      const NodeDevice& device);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_
