// Calls of operators for a comparison of all copies of what the job holds.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CHECK_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_CHECK_CALLS_H_

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class CheckCalls {
 public:
  explicit CheckCalls(Core& core) : core_(core) {}

  // Asks node 0 for a check, and waits for what comes of it.
  absl::StatusOr<v1::CheckJobReply> CheckJob(const v1::CheckJobRequest& request,
                                             const Core::Cancelled& cancelled);

 private:
  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CHECK_CALLS_H_
