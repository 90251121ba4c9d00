// A picture of the node at one moment, for those who look at it and must not wait for the core's
// lock while they do: status calls and pages.
//
//   const Core::Seen seen = core.Look();
//   seen.view->status.epoch();
//
// Threads: any, without a lock. It never changes; it lasts, with the job's plan, for as long as
// somebody holds it.
#ifndef DMUOND_SERVER_DAEMON_NODE_VIEW_H_
#define DMUOND_SERVER_DAEMON_NODE_VIEW_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/time/time.h"
#include "dmuond/v1/admin.pb.h"
#include "scheduler/job/job_ends.h"
#include "scheduler/job/job_figures.h"
#include "scheduler/job/planned_job.h"
#include "server/daemon/core.h"
#include "server/daemon/counters.h"
#include "server/daemon/state_mutex.h"

namespace dmuond::server {

struct NodeView {
  std::chrono::steady_clock::time_point taken;
  // Without uptime_s and picture_age_ms, which are of who asks, and without what is counted in the
  // plan: a picture is taken under the lock, and a plan may have a hundred thousand units.
  v1::GetStatusReply status;
  // The job's; null where none runs, or it has no plan yet.
  scheduler::PlannedJob planned;
  scheduler::JobFigures figures;  // the job's
  scheduler::JobEnds ends;        // of the jobs before it, too
  bool snapshots = false;         // there is a directory for them
  Counters counters;
  StateMutex::Held lock_held;
  double planned_in_s = 0;  // how long the newest plan took
  // When the group's other daemons were heard of last, as PeerLinks::Heard().
  std::map<int32_t, std::chrono::steady_clock::time_point> heard;
  std::optional<absl::Time> certificates_expire;  // as PeerLinks::CertificatesExpire()
};

// Of this moment.
[[nodiscard]] NodeView ViewOf(Core& core) DMUOND_REQUIRES(core.mutex);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_NODE_VIEW_H_
