// What a daemon has counted since it began, beside what its job has (scheduler/job/job_figures.h).
#ifndef DMUOND_SERVER_DAEMON_COUNTERS_H_
#define DMUOND_SERVER_DAEMON_COUNTERS_H_

#include <array>
#include <cstdint>

#include "scheduler/job/dropped.h"

namespace dmuond::server {

struct Counters {
  int64_t lanes_ended = 0;       // by themselves, while they were needed
  int64_t lanes_hung = 0;        // and were killed for it
  int64_t members_gone = 0;      // on node 0: daemons that left the group or were lost
  int64_t coordinator_gone = 0;  // on other nodes: so often the link to node 0 was lost
  // Messages of other daemons, by DropReason.
  std::array<int64_t, scheduler::kDropReasons.size()> dropped{};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_COUNTERS_H_
