// A rail over TCP, by Gloo's pairs. For host memory: lanes of the CPU device.
#ifndef DMUOND_SERVER_LANE_GLOO_GROUP_H_
#define DMUOND_SERVER_LANE_GLOO_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/lane/peer_group.h"

namespace dmuond::server::lane {

// Listens on the setup's address, on ports of the system's choice. `notify` is called from the
// group's own thread after each thing that is through.
absl::StatusOr<std::unique_ptr<PeerGroup>> MakeGlooGroup(PeerGroupSetup setup);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_GLOO_GROUP_H_
