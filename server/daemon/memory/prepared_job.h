// Makes of a plan's inputs what lanes need to start: the plan, each lane's program, and all memory.
// That takes seconds (a GiB of memory 0.36 s), so a worker does it:
//
//   worker.Post([=] { auto prepared = PrepareJob(planner, device, wire, options, *progress);
//                     … back under the daemon's lock … });
#ifndef DMUOND_SERVER_DAEMON_MEMORY_PREPARED_JOB_H_
#define DMUOND_SERVER_DAEMON_MEMORY_PREPARED_JOB_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/lane_program.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/plan.h"
#include "server/daemon/memory/job_memory.h"
#include "server/daemon/planner.h"
#include "server/daemon/snapshots/node_snapshot.h"

namespace dmuond::server {

struct PrepareOptions {
  int32_t node = 0;
  int32_t lanes = 1;             // on this node
  int64_t job_memory_bytes = 0;  // 0: no limit
  bool host_copies = false;      // snapshots are made
  // The snapshot that the job begins from, where this node has found it: its state must fit the
  // plan.
  std::optional<v1::SnapshotManifest> resume;
};

// How far it has come. Threads: any.
struct PrepareProgress {
  std::atomic<uint64_t> done = 0;      // bytes of memory that are made
  std::atomic<bool> planned = false;   // the plan is made
  std::atomic<bool> unwanted = false;  // nobody waits for it any more
};

struct PreparedJob {
  scheduler::PlannedJob planned;
  std::vector<v1::LaneProgram> programs;  // by lane of the node
  std::unique_ptr<JobMemory> memory;
  std::shared_ptr<const std::vector<HostState>> host;  // null: no snapshots are made
};

// INVALID_ARGUMENT and FAILED_PRECONDITION name what is wrong with the inputs, RESOURCE_EXHAUSTED
// (MEMORY_EXHAUSTED) the wanted bytes and the limit. CANCELLED: it became unwanted. `device` must
// outlive the result.
absl::StatusOr<PreparedJob> PrepareJob(Planner& planner, NodeDevice& device,
                                       const v1::PlanInputs& wire, const PrepareOptions& options,
                                       PrepareProgress& progress);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_PREPARED_JOB_H_
