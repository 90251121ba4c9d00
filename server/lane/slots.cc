#include "server/lane/slots.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {

using scheduler::UnitId;

absl::StatusOr<std::unique_ptr<Slots>> Slots::Create(const LaneJob& job) {
  std::unique_ptr<Slots> slots(new Slots(job));
  const std::vector<scheduler::SlotClass>& classes = job.program.slot_classes;
  slots->class_of_.assign(job.program.staged.size(), -1);
  slots->free_.resize(classes.size());
  for (size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].slots > kSlotsMax) {
      return absl::ResourceExhaustedError(absl::StrCat("a slot class of ", classes[c].slots,
                                                       " slots; the state table has room for ",
                                                       kSlotsMax));
    }
    std::vector<bool> taken(classes[c].slots);
    for (UnitId id : classes[c].units) {
      slots->class_of_[job.staged_index(id)] = static_cast<int32_t>(c);
      const StateView state = slots->Current(id);
      if (!state.exists()) continue;
      if (state.slot >= classes[c].slots || taken[state.slot]) {
        return absl::DataLossError(absl::StrCat("state table: unit ", id.value(), " is in slot ",
                                                state.slot, " of ", classes[c].slots,
                                                ", which is taken or not there"));
      }
      taken[state.slot] = true;
    }
    slots->free_[c].reserve(classes[c].slots);
    for (int32_t s = classes[c].slots - 1; s >= 0; --s) {
      if (!taken[s]) slots->free_[c].push_back(s);
    }
  }
  return slots;
}

absl::StatusOr<int32_t> Slots::TakeFree(UnitId id) {
  std::vector<int32_t>& free = free_[class_of_[job_.staged_index(id)]];
  if (free.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no spare slot for unit ", id.value(), " among ", ClassOf(id).slots));
  }
  const int32_t slot = free.back();
  free.pop_back();
  return slot;
}

void Slots::Flip(UnitId id, int32_t slot, scheduler::StepId step, uint64_t updates) {
  const StateView old = Current(id);
  FlipEntry(Entry(id), slot, step, updates);
  if (old.exists()) free_[class_of_[job_.staged_index(id)]].push_back(old.slot);
}

void Slots::AddNonFinite(google::protobuf::RepeatedField<int32_t>& units) const {
  for (const scheduler::SlotClass& slot_class : job_.program.slot_classes) {
    for (const UnitId id : slot_class.units) {
      if (Entry(id).non_finite.load(std::memory_order_acquire) != 0) units.Add(id.value());
    }
  }
}

float* Slots::Tensor(UnitId id, int32_t slot, int32_t tensor) const {
  const scheduler::SlotClass& c = ClassOf(id);
  return reinterpret_cast<float*>(job_.state->data() + c.offset_bytes + (slot * c.slot_bytes) +
                                  (tensor * c.tensor_bytes));
}

}  // namespace dmuond::server::lane
