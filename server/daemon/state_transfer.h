// Optimizer state on its way between trainers and owners: cutting fragments out of units, and
// putting pushed fragments together to units. Plain copies between row-major boxes; no locks, no
// I/O.
#ifndef DMUOND_SERVER_DAEMON_STATE_TRANSFER_H_
#define DMUOND_SERVER_DAEMON_STATE_TRANSFER_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "dmuond/v1/trainer.pb.h"
#include "scheduler/plan.h"

namespace dmuond::server {

// One state tensor of one unit or fragment: fp32, its box row-major.
using StateTensor = std::vector<float>;

// Copies the elements that both boxes have, each tensor row-major in its own box.
void CopyIntersection(const scheduler::Box& from_box, const StateTensor& from,
                      const scheduler::Box& to_box, StateTensor& to);

// The box in parts of at most `elements_max` elements each, or single elements; empty: none.
[[nodiscard]] std::vector<scheduler::Box> SplitBox(const scheduler::Box& box, int64_t elements_max);

// Whether units of this kind keep such a tensor.
[[nodiscard]] bool HasState(scheduler::UnitKind unit, v1::StateKind kind);

// What trainers have pushed for units that are owned here, until a load commits.
class PendingState {
 public:
  // Adds the part of `box` of one unit. REQUIRES: data has Elements(box) values, box inside the
  // unit's.
  void Add(const scheduler::Unit& unit, v1::StateKind kind, const scheduler::Box& box,
           const StateTensor& data);
  void SetUpdates(scheduler::UnitId unit, double updates) { updates_[unit] = updates; }

  struct Entry {
    StateTensor data;
    std::vector<bool> given;  // by element; replicas give some twice
    int64_t elements_given = 0;
  };
  using Key = std::pair<scheduler::UnitId, v1::StateKind>;
  [[nodiscard]] const std::map<Key, Entry>& entries() const { return entries_; }
  [[nodiscard]] const std::map<scheduler::UnitId, double>& updates() const { return updates_; }
  void Clear() {
    entries_.clear();
    updates_.clear();
  }

 private:
  std::map<Key, Entry> entries_;
  std::map<scheduler::UnitId, double> updates_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_STATE_TRANSFER_H_
