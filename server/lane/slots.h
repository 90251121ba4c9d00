// Knows which slot of the state memory holds which owned unit's state, and which slots are free.
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_SLOTS_H_
#define DMUOND_SERVER_LANE_SLOTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "google/protobuf/repeated_field.h"
#include "scheduler/types.h"
#include "server/lane/lane_job.h"
#include "server/shared/state_table.h"

namespace dmuond::server::lane {

// Tensors of a slot. Matrix: momentum, master. Piece: exp_avg, exp_avg_sq, master.
class Slots {
 public:
  // Reads the state table: slots that it names are taken, all others are free. `job` must outlive
  // the object. DATA_LOSS when the table names a slot twice, or one that does not exist.
  static absl::StatusOr<std::unique_ptr<Slots>> Create(const LaneJob& job);

  [[nodiscard]] StateView Current(scheduler::UnitId id) const { return ReadEntry(Entry(id)); }
  // Takes a free slot for the unit's next state. RESOURCE_EXHAUSTED: the plan's spare slots are all
  // taken, which is our own bug.
  absl::StatusOr<int32_t> TakeFree(scheduler::UnitId id);
  // Makes a taken slot the unit's state; the old one becomes free.
  void Flip(scheduler::UnitId id, int32_t slot, scheduler::StepId step, uint64_t updates);
  // Notes, before the flip, the step whose update has made the unit's weights infinite or NaN; 0:
  // they are finite.
  void SetNonFinite(scheduler::UnitId id, scheduler::StepId step) {
    Entry(id).non_finite.store(static_cast<uint64_t>(step.value()), std::memory_order_release);
  }
  // Adds the owned units whose weights are infinite or NaN, in the order of the plan's classes.
  void AddNonFinite(google::protobuf::RepeatedField<int32_t>& units) const;

  [[nodiscard]] int32_t tensors(scheduler::UnitId id) const { return ClassOf(id).tensors; }
  [[nodiscard]] float* Tensor(scheduler::UnitId id, int32_t slot, int32_t tensor) const;
  // The last tensor of a slot.
  [[nodiscard]] float* Master(scheduler::UnitId id, int32_t slot) const {
    return Tensor(id, slot, tensors(id) - 1);
  }

 private:
  explicit Slots(const LaneJob& job) : job_(job) {}
  [[nodiscard]] StateEntry& Entry(scheduler::UnitId id) const {
    return reinterpret_cast<StateEntry*>(job_.table->data())[id.value()];
  }
  [[nodiscard]] const scheduler::SlotClass& ClassOf(scheduler::UnitId id) const {
    return job_.program.slot_classes[class_of_[job_.staged_index(id)]];
  }

  const LaneJob& job_;
  std::vector<int32_t> class_of_;           // per staged unit
  std::vector<std::vector<int32_t>> free_;  // per class
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_SLOTS_H_
