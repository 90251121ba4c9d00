// The state table: memory that the daemon holds and its lane maps. It has one entry for each unit
// of the plan (index: UnitId), which says in which slot of its class the unit's state lies. A lane
// writes an update into a free slot and then flips the entry, so that a lane that dies leaves no
// half update behind.
//
// `current`: bits 0-19 slot + 1 (0: no state yet), bits 20-27 flips, counted modulo 256, bits 28-63
// the last step applied. `updates_by_parity[flips & 1]` counts the updates applied to the unit
// (AdamW's t); the other one is written before the flip makes it current.
//
// `non_finite`: the step whose update has made the unit's weights infinite or NaN; 0: they are
// finite. It is written before the flip, and this lane, or its successor, reports it with its next
// vote.
//
// Threads: one writer, the lane; any reader in any process.
#ifndef DMUOND_SERVER_SHARED_STATE_TABLE_H_
#define DMUOND_SERVER_SHARED_STATE_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "scheduler/types.h"

namespace dmuond::server::lane {

struct StateEntry {
  std::atomic<uint64_t> current;
  std::atomic<uint64_t> updates_by_parity[2];
  std::atomic<uint64_t> non_finite;
};
static_assert(sizeof(StateEntry) == 32);

inline constexpr int32_t kSlotsMax = (1 << 20) - 1;  // of one class

constexpr size_t StateTableBytes(size_t units) { return units * sizeof(StateEntry); }

// What an entry says.
struct StateView {
  int32_t slot = -1;  // of the unit's slot class; -1: no state
  uint8_t flips = 0;
  scheduler::StepId step;  // last applied
  uint64_t updates = 0;
  [[nodiscard]] bool exists() const { return slot >= 0; }
};

[[nodiscard]] inline StateView ReadEntry(const StateEntry& entry) {
  const uint64_t word = entry.current.load(std::memory_order_acquire);
  StateView view;
  view.slot = static_cast<int32_t>(word & kSlotsMax) - 1;
  view.flips = static_cast<uint8_t>((word >> 20) & 0xff);
  view.step = scheduler::StepId(static_cast<int64_t>(word >> 28));
  view.updates = entry.updates_by_parity[view.flips & 1].load(std::memory_order_acquire);
  return view;
}

// Makes `slot` current. Everything in it must be complete.
inline void FlipEntry(StateEntry& entry, int32_t slot, scheduler::StepId step, uint64_t updates) {
  const auto flips = static_cast<uint8_t>(ReadEntry(entry).flips + 1);
  entry.updates_by_parity[flips & 1].store(updates, std::memory_order_release);
  const uint64_t word = (static_cast<uint64_t>(step.value()) << 28) | (uint64_t{flips} << 20) |
                        static_cast<uint64_t>(slot + 1);
  entry.current.store(word, std::memory_order_release);
}

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_SHARED_STATE_TABLE_H_
