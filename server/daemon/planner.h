// Makes each plan once: on the coordinating node both the coordinator and the node's job ask for
// the same plan, and planning a large model takes seconds.
//
// Threads: any, without the daemon's lock. A caller waits if its plan is being made already.
#ifndef DMUOND_SERVER_DAEMON_PLANNER_H_
#define DMUOND_SERVER_DAEMON_PLANNER_H_

#include <atomic>
#include <string>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/planned_job.h"

namespace dmuond::server {

class Planner {
 public:
  // As scheduler::MakePlannedJob(). The last plan is kept, and answers inputs that differ from its
  // own in job, incarnation, launch and restore only.
  absl::StatusOr<scheduler::PlannedJob> Make(const v1::PlanInputs& wire);

  // How long the newest plan took to make; 0: there was none.
  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  std::atomic<double> seconds_{0};
  Mutex mutex_;
  std::string key_ DMUOND_GUARDED_BY(mutex_);  // the bytes of last_'s inputs
  scheduler::PlannedJob last_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PLANNER_H_
