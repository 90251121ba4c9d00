// State that trainers have pushed for units of this node. It is kept until its load has committed
// and the lanes have published it. It lies in memory that lanes can map, so that a commit copies
// nothing.
//
//   absl::Status kept = pending.Add(attempt, unit, kind, box, values);     // part by part
//   for (const PendingState::Tensor& tensor : pending.Tensors(attempt)) …  // the load commits
//   auto old = pending.DropThrough(attempt);                               // it is published
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_PENDING_STATE_H_
#define DMUOND_SERVER_DAEMON_MEMORY_PENDING_STATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/plan.h"

namespace dmuond::server {

class PendingState {
 public:
  // Adds the part `box` of one tensor of a unit. It is ignored if its attempt was dropped.
  // REQUIRES: `values` are those of the box, row-major, and the box is inside the unit's.
  // RESOURCE_EXHAUSTED: there is no memory for the unit.
  absl::Status Add(uint64_t attempt, const scheduler::Unit& unit, v1::StateKind kind,
                   const scheduler::Box& box, std::span<const float> values);
  // The unit's number of updates, an fp64 value.
  absl::Status SetUpdates(uint64_t attempt, scheduler::UnitId unit, double updates);

  struct Tensor {
    scheduler::UnitId unit;
    v1::StateKind kind;
    int fd = -1;         // stays this object's, until the attempt is dropped
    bool whole = false;  // every element was given; else the tensor must stay as it is
  };
  // In the order of units.
  std::vector<Tensor> Tensors(uint64_t attempt);

  // Drops the attempts up to this one. The memory is freed with the returned object: free it where
  // nobody waits, since gigabytes take seconds. Null: there was none.
  [[nodiscard]] std::shared_ptr<void> DropThrough(uint64_t attempt);

 private:
  struct Entry {
    wire::UniqueFd fd;
    std::unique_ptr<kernels::Mapping> memory;
    std::vector<bool> given;  // by element; replicas give some twice
    int64_t elements_given = 0;
  };
  using Entries = std::map<std::pair<scheduler::UnitId, v1::StateKind>, Entry>;

  absl::StatusOr<Entry> Make(size_t bytes);

  kernels::cpu::CpuMemoryHolder holder_;
  Mutex mutex_;
  uint64_t dropped_through_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Entries> attempts_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_PENDING_STATE_H_
