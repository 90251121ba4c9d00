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
  // Finds the place of the job of this name; without a name, that of the only job, or the first one
  // where no job is here. NOT_FOUND (NO_JOB): no job has this name. INVALID_ARGUMENT
  // (JOB_NOT_NAMED): several jobs are here, and none is named. Waits as Look() does.
  absl::StatusOr<Place*> PlaceOf(const std::string& job);
  absl::StatusOr<v1::GetStatusReply> Status(const v1::GetStatusRequest& request);
  v1::ListJobsReply Jobs();
  // These do what AdminCalls' do, for all jobs at once. They return the first error.
  // SetLogLevel() returns the former level.
  log::Level SetLogLevel(log::Level level);
  [[nodiscard]] absl::Status CheckSnapshots();
  absl::StatusOr<v1::DrainReply> PrepareToLeave(std::chrono::milliseconds timeout);
  absl::StatusOr<v1::DrainReply> WaitUntilPrepared(const Core::Cancelled& cancelled);
  [[nodiscard]] bool Leave();

 private:
  std::deque<Place>& places_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_NODE_CALLS_H_
