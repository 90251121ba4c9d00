// What NCCL has to find in the environment of lanes on GPUs, where daemons know it better than
// NCCL.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_NCCL_VARIABLES_H_
#define DMUOND_SERVER_DAEMON_MEMORY_NCCL_VARIABLES_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

// The variables that the daemon's own environment does not have:
//   NCCL_HOSTID         the kernel's boot id. NCCL asks for the host's name as well, which differs
//                       between containers, and its members of one host would then exchange over
//                       the network.
//   NCCL_SOCKET_IFNAME  the network interface that `rail_address`, a name or number of this host,
//   is
//                       of: NCCL takes one of its own choice.
// FAILED_PRECONDITION: no interface has that address. Asks name servers.
[[nodiscard]] absl::StatusOr<NodeDevice::Variables> NcclVariables(const std::string& rail_address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_NCCL_VARIABLES_H_
