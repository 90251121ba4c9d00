// Optimizer state on its way between trainers and owners: cutting fragments out of units, and units
// into parts. Plain copies between row-major boxes; no locks, no I/O.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_STATE_TRANSFER_H_
#define DMUOND_SERVER_DAEMON_MEMORY_STATE_TRANSFER_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dmuond/v1/trainer.pb.h"
#include "scheduler/plan.h"

namespace dmuond::server {

// One state tensor of one unit or fragment: fp32, its box row-major.
using StateTensor = std::vector<float>;

// Calls visit(first element in a, first element in b, how many) for each run of consecutive
// elements that both boxes have.
void ForRuns(const scheduler::Box& a, const scheduler::Box& b,
             absl::FunctionRef<void(int64_t, int64_t, int64_t)> visit);

// Copies the elements that both boxes have, each tensor row-major in its own box.
void CopyIntersection(const scheduler::Box& from_box, const StateTensor& from,
                      const scheduler::Box& to_box, StateTensor& to);

// The box in parts of at most `elements_max` elements each, or single elements; empty: none.
[[nodiscard]] std::vector<scheduler::Box> SplitBox(const scheduler::Box& box, int64_t elements_max);

// Whether units of this kind keep such a tensor.
[[nodiscard]] bool HasState(scheduler::UnitKind unit, v1::StateKind kind);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_STATE_TRANSFER_H_
