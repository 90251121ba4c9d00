// Answers the calls of the group's other nodes to this one, once they are proven (direct_calls.h).
#ifndef DMUOND_SERVER_DAEMON_GROUP_DIRECT_SERVICE_H_
#define DMUOND_SERVER_DAEMON_GROUP_DIRECT_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "server/daemon/daemon.h"
#include "server/daemon/group/direct_calls.h"

namespace dmuond::server {

struct DirectCallers {
  // The node that has made the connection of a call; unset: that has ended.
  std::function<std::optional<int32_t>(const grpc::ServerContext&)> node_of;
  std::function<void(const absl::Status&)> refused;  // hears of the calls that are not proven
};
// `daemon` and `calls` must outlive the service.
std::unique_ptr<v1::Direct::Service> MakeDirectService(Daemon& daemon, DirectCalls& calls,
                                                       DirectCallers callers);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_DIRECT_SERVICE_H_
