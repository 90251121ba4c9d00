// What the bits depend on that this node's lanes compute. Only the program that computes knows
// which libraries it has loaded and which of their kernels run, and the daemon links no device's
// libraries. So the lanes' program is asked, in the environment that lanes get.
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/lanes/lane_binary.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

// Runs `binary --device=DEVICE --print_bits` and waits for its end: some tens of milliseconds on
// the CPU. `rails`: of lanes in a group of several nodes, which need what brings memory to others.
// An error has what the program has printed. Threads: any.
[[nodiscard]] absl::StatusOr<v1::LaneBits> AskForBits(const LaneBinary& binary,
                                                      const NodeDevice& device, bool rails);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_BITS_H_
