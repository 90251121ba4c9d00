// Calls of operators about one job, and of the daemon itself when it ends.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_ADMIN_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_ADMIN_CALLS_H_

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "server/common/log.h"
#include "server/daemon/core.h"

namespace dmuond::server {

// NOT_FOUND, reason NO_JOB: `holders` are the jobs that are here; empty names are none.
[[nodiscard]] absl::Status NoJob(const std::string& name, std::vector<std::string> holders);

// NOT_FOUND, reason NO_PLAN: no job with a plan runs here.
[[nodiscard]] absl::Status NoPlan();

class AdminCalls {
 public:
  explicit AdminCalls(Core& core) : core_(core) {}

  // Returns the status that a picture shows, with what is of the moment: its age and the uptime.
  [[nodiscard]] v1::GetStatusReply StatusIn(const Core::Seen& seen) const;
  // These wait for the lock for a second at most, and answer from an older picture then.
  v1::GetStatusReply Status() { return StatusIn(core_.Look()); }
  absl::StatusOr<v1::GetPlanReply> Plan();
  absl::StatusOr<v1::GetRoutingReply> Routing();
  // Sets the level for this process and the job's lanes, present and future.
  void SetLogLevel(log::Level level);
  // Ends the job of this name on all nodes. Returns when nothing of it is left here.
  absl::StatusOr<v1::EndJobReply> EndJobNamed(const v1::EndJobRequest& request,
                                              const Core::Cancelled& cancelled);
  // As NodeJob::AcceptLanes(), of the job of this name.
  absl::StatusOr<v1::AcceptLanesReply> AcceptLanes(const std::string& name);

  // FAILED_PRECONDITION (SNAPSHOTS_FAIL) where the job's newest snapshot failed and nobody leaves
  // yet: what a departure would save may be lost.
  [[nodiscard]] absl::Status CheckSnapshots();
  // A planned departure, in two halves; between them the links to other daemons are given up.
  // The first refuses new sessions, has the step in flight finished, the job halted and its state
  // saved, within `timeout`. An error names what failed, and what is lost by that.
  absl::StatusOr<v1::DrainReply> PrepareToLeave(std::chrono::milliseconds timeout);
  // Waits for PrepareToLeave(), and answers as it did. For the operator who has asked to drain.
  absl::StatusOr<v1::DrainReply> WaitUntilPrepared(const Core::Cancelled& cancelled);
  // The second aborts what remains, and ends the lanes. Threads of disks and memory have until
  // `deadline` to see that nobody wants what they do any more. False: one hangs in the snapshot
  // directory and goes on to use the core, which must not be destroyed.
  [[nodiscard]] bool Leave(Core::Deadline deadline);

 private:
  // Tells the job which snapshot is its newest. Gives up the lock.
  void LookForSnapshot(Core::Deadline deadline) DMUOND_REQUIRES(core_.mutex);

  Core& core_;
  std::optional<absl::StatusOr<v1::DrainReply>> prepared_ DMUOND_GUARDED_BY(core_.mutex);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_ADMIN_CALLS_H_
