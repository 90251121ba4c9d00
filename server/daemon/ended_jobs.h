// Removes the snapshots of jobs that have ended, --snapshots_of_ended_jobs after the newest of them
// was made. Node 0 does it, for the group, with snapshots of its own group alone: the newest whole
// one of a job says whose they are, and all that is newer than it has to say the same. A job has
// ended when no place of the group has it, and no trainer has just asked for one. While a node or a
// place does not know what goes on, because the group forms, nothing is removed; nor is anything of
// a job with a manifest that cannot be read.
//
// The work has a thread of its own, among those of the first place's snapshots: no save waits.
//
// Threads: Tick() is called by one.
#ifndef DMUOND_SERVER_DAEMON_ENDED_JOBS_H_
#define DMUOND_SERVER_DAEMON_ENDED_JOBS_H_

#include <atomic>
#include <chrono>
#include <deque>
#include <string>

#include "server/daemon/calls/place_finder.h"
#include "server/daemon/place.h"
#include "server/storage/storage.h"

namespace dmuond::server {

class EndedJobs {
 public:
  // Both outlive it.
  EndedJobs(std::deque<Place>& places, PlaceFinder& finder);
  // Looks into the directory now and then. Call it every 100 ms.
  void Tick();

 private:
  void Sweep(storage::Storage& storage);
  [[nodiscard]] bool HasEnded(const std::string& job);

  std::deque<Place>& places_;
  PlaceFinder& finder_;
  const std::chrono::milliseconds kept_;  // 0: for ever
  std::chrono::steady_clock::time_point next_look_{};
  std::atomic<bool> looks_ = false;  // the thread has not come to its end
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_ENDED_JOBS_H_
