// Calls of operators about the node and all of its jobs, and which job the others are about.
//
// Threads: any; those that wait say so.
#ifndef DMUOND_SERVER_DAEMON_CALLS_NODE_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_NODE_CALLS_H_

#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "server/common/log.h"
#include "server/daemon/core.h"
#include "server/daemon/place.h"

namespace dmuond::server {

class NodeCalls {
 public:
  explicit NodeCalls(std::deque<Place>& places) : places_(places) {}

  // A picture of each place. Waits for locks for a second at most, and takes older ones then.
  [[nodiscard]] std::vector<Core::Seen> Look();
  // Where the job of this name is. Without a name: where the only one is, or might be. NOT_FOUND
  // (NO_JOB): none has this name. INVALID_ARGUMENT (JOB_NOT_NAMED): there are several. Waits as
  // Look() does.
  absl::StatusOr<Place*> PlaceOf(const std::string& job);
  absl::StatusOr<v1::GetStatusReply> Status(const v1::GetStatusRequest& request);
  v1::ListJobsReply Jobs();
  // As AdminCalls', of all jobs at once. The error is the first.
  log::Level SetLogLevel(log::Level level);
  absl::StatusOr<v1::DrainReply> PrepareToLeave(std::chrono::milliseconds timeout);
  absl::StatusOr<v1::DrainReply> WaitUntilPrepared(const Core::Cancelled& cancelled);
  [[nodiscard]] bool Leave();

 private:
  std::deque<Place>& places_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_NODE_CALLS_H_
