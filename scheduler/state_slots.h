// Places for optimizer state in a lane's memory, and which units are updated together.
#ifndef DMUOND_SCHEDULER_STATE_SLOTS_H_
#define DMUOND_SCHEDULER_STATE_SLOTS_H_

#include <cstdint>
#include <vector>

#include "scheduler/lane_program.h"

namespace dmuond::scheduler {

[[nodiscard]] constexpr int64_t AlignUp(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
[[nodiscard]] int64_t TensorBytes(int64_t elements);               // fp32, aligned
[[nodiscard]] int64_t SlotBytes(UnitKind kind, int64_t elements);  // all tensors of a unit

// Joins the sizes of one lane's pieces into slot classes. A smaller size joins the class of the
// next larger one where the spare slot that this saves is larger than the room that it wastes.
// Returns for each size the index of the size whose slots it uses. REQUIRES: `sizes` are distinct
// and descend.
struct PieceSize {
  int64_t elements = 0;
  int32_t count = 0;
};
[[nodiscard]] std::vector<int32_t> JoinSizes(const std::vector<PieceSize>& sizes);

// Pieces of one bucket up to this size are updated together, with a spare slot each; larger ones
// share one spare per class and are updated one after the other.
inline constexpr int64_t kSmallPieceMax = kPieceCut;

// The classes of a lane's batches, from offset 0 on; `state_bytes` is their end.
[[nodiscard]] std::vector<SlotClass> MakeSlotClasses(const std::vector<Unit>& units,
                                                     const std::vector<Batch>& batches,
                                                     int64_t& state_bytes);

// Batches of pieces, in order of `pieces` (unit ids of one lane, by bucket).
[[nodiscard]] std::vector<Batch> BatchPieces(const std::vector<Unit>& units,
                                             const std::vector<UnitId>& pieces);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STATE_SLOTS_H_
