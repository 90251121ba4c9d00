// Makes plans, each once: on the coordinating node both the coordinator and the node's own part of
// the job ask for the same one, and planning a large model takes seconds.
//
// Threads: any. Who asks for a plan that is being made waits for it; nobody asks under the daemon's
// lock.
#ifndef DMUOND_SERVER_DAEMON_PLANNER_H_
#define DMUOND_SERVER_DAEMON_PLANNER_H_

#include <string>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "kernels/mutex.h"
#include "scheduler/job/planned_job.h"

namespace dmuond::server {

class Planner {
 public:
  // As scheduler::MakePlannedJob(). The last plan is kept: job, incarnation, launch and
  // restore_step do not matter to it.
  absl::StatusOr<scheduler::PlannedJob> Make(const v1::PlanInputs& wire);

 private:
  Mutex mutex_;
  std::string key_ DMUOND_GUARDED_BY(mutex_);  // of `last_`: its inputs' bytes
  scheduler::PlannedJob last_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PLANNER_H_
