// The job's memory on this node, from the plan's order to its end: performs what NodeJob orders.
// What takes seconds (making it, giving it back) is done by a thread of its own.
//
// Threads: the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_NODE_MEMORY_H_
#define DMUOND_SERVER_DAEMON_MEMORY_NODE_MEMORY_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/lane_program.pb.h"
#include "scheduler/job/node_actions.h"
#include "scheduler/plan.h"
#include "server/daemon/memory/job_memory.h"
#include "server/daemon/memory/pending_state.h"
#include "server/daemon/memory/prepared_job.h"
#include "server/daemon/planner.h"
#include "server/daemon/work_thread.h"

namespace dmuond::server {

class NodeMemory {
 public:
  struct Options {
    int32_t node = 0;
    int32_t lanes = 1;
    int64_t job_memory_bytes = 0;  // 0: no limit
    bool host_copies = false;      // snapshots are made
  };
  using Done = std::function<void(absl::StatusOr<scheduler::PlannedJob>, bool host_copies)>;
  // `device` and `planner` outlive it. `enter` takes the daemon's lock and runs what it is given.
  NodeMemory(Options options, NodeDevice& device, Planner& planner,
             std::function<void(const std::function<void()>&)> enter);

  // `done` is called under the lock, unless Drop() comes first.
  void Prepare(const scheduler::node::Prepare& order, Done done);
  // How far Prepare() has come; null: nothing is being prepared.
  [[nodiscard]] const PrepareProgress* preparing() const { return preparing_.get(); }
  // Wakes trainers that wait for weights, and gives all memory back, also that which is being made.
  void Drop();
  void Poison();
  void MarkRollback(uint32_t epoch, uint64_t awaited);
  // The state in the lanes' memory counts no more.
  void VoidState(int32_t lanes);
  // Has the worker free `memory`, so that nobody waits: gigabytes take seconds.
  void LetGo(std::shared_ptr<void> memory);

  // Null: the job has no memory. It is shared with callers that allocate in it without the lock.
  [[nodiscard]] const std::shared_ptr<JobMemory>& memory() const { return memory_; }
  [[nodiscard]] const std::vector<v1::LaneProgram>& programs() const { return programs_; }
  // Per lane; null: no snapshots are made.
  [[nodiscard]] const std::shared_ptr<const std::vector<HostState>>& host() const { return host_; }
  // State that trainers have pushed for units of this node.
  [[nodiscard]] const std::shared_ptr<PendingState>& pending() const { return pending_; }
  void ForgetPending();

  // Null when the daemon has left.
  [[nodiscard]] WorkThread* worker() { return worker_.get(); }
  [[nodiscard]] std::unique_ptr<WorkThread> TakeWorker() { return std::move(worker_); }

 private:
  const Options options_;
  NodeDevice& device_;
  Planner& planner_;
  const std::function<void(const std::function<void()>&)> enter_;
  std::shared_ptr<PrepareProgress> preparing_;
  std::shared_ptr<JobMemory> memory_;
  std::vector<v1::LaneProgram> programs_;  // by lane
  std::shared_ptr<const std::vector<HostState>> host_;
  std::shared_ptr<PendingState> pending_ = std::make_shared<PendingState>();
  std::unique_ptr<WorkThread> worker_ = std::make_unique<WorkThread>();
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_NODE_MEMORY_H_
