// The links to the group's other daemons, as the core sees them. peers.h implements them.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_LINKS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_LINKS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/memory/state_transfer.h"

namespace dmuond::server {

// Why a group has not formed, as one of its daemons sees it.
struct GroupGaps {
  std::vector<int32_t> missing;  // on node 0: the nodes that have not joined
  std::string not_joined;        // on other nodes: why this one has not joined
};

// Monotonic clocks of nodes have nothing in common but their speed.
struct ClockAhead {
  int64_t ahead_us = 0;  // the other node's clock minus this node's
  int64_t error_us = 0;  // how far that may be off
};
inline int64_t MonotonicUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Threads: any.
class PeerLinks {
 public:
  virtual ~PeerLinks() = default;
  // Never blocks.
  virtual GroupGaps Gaps() = 0;
  // When each other daemon that is of the group was heard of last: on node 0 the members, on other
  // nodes node 0. Never blocks.
  virtual std::map<int32_t, std::chrono::steady_clock::time_point> Heard() = 0;
  // When the first of the certificates between daemons expires; without TLS: never. Never blocks.
  virtual std::optional<absl::Time> CertificatesExpire() = 0;
  // Sends to one member or, without `node`, to all remote ones. Node 0 only. Never blocks.
  virtual void SendToMembers(std::optional<int32_t> node,
                             const v1::CoordinatorMessage& message) = 0;
  // Sends to node 0. Other nodes only. Never blocks.
  virtual void SendToCoordinator(const v1::MemberMessage& message) = 0;
  // Blocking calls to a member's Peer service.
  virtual absl::StatusOr<StateTensor> ReadState(int32_t node, const v1::ReadStateRequest& request,
                                                size_t elements) = 0;
  virtual absl::Status WriteState(int32_t node, const v1::WriteStateRequest& request) = 0;
  virtual absl::StatusOr<std::vector<v1::LaneTrace>> TraceNode(int32_t node,
                                                               const v1::TraceNodeRequest& request,
                                                               const std::stop_token& stop) = 0;
  virtual absl::StatusOr<ClockAhead> ReadClock(int32_t node) = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_LINKS_H_
