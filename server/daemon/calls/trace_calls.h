// Calls of operators for what lanes do in the next steps: of this node, and of all nodes on one
// clock.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_TRACE_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_TRACE_CALLS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class TraceCalls {
 public:
  explicit TraceCalls(Core& core) : core_(core) {}

  // Gathers what this node's lanes do in the next steps, and the others' where that is wanted.
  absl::StatusOr<v1::TraceStepsReply> TraceSteps(const v1::TraceStepsRequest& request,
                                                 const Core::Cancelled& cancelled);
  // Gathers the same of this node alone, for another node.
  absl::StatusOr<std::vector<v1::LaneTrace>> TraceForPeer(const v1::TraceNodeRequest& request,
                                                          const Core::Cancelled& cancelled);

 private:
  // Waits for this node's lanes to tell of their steps. It does not look at job and place.
  absl::StatusOr<std::vector<v1::LaneTrace>> Trace(const v1::TraceNodeRequest& request,
                                                   const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_TRACE_CALLS_H_
