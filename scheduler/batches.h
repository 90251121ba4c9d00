// Which units of a lane are updated together, and in which order.
#ifndef DMUOND_SCHEDULER_BATCHES_H_
#define DMUOND_SCHEDULER_BATCHES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "scheduler/lane_program.h"

namespace dmuond::scheduler {

enum class BatchOrder : uint8_t {
  kWeights,  // most weights first: what is copied behind the last update is as little as can be
  kBuckets,  // those whose last bucket is ready earlier, as rails take weights bucket by bucket
};

// Sets Unit::batch of all units of one lane. `split(matrix, n)` returns the sizes of the batches
// for n matrices like the given one. Units that are neighbours in bucket order share a batch.
// Batches of pieces come first: copying their weights to the trainers takes longer than updating
// them, and goes on beside the matrices, which come in `order`.
void AssignBatches(const Layout& layout, BatchOrder order,
                   const std::function<std::vector<int32_t>(const Unit&, int32_t)>& split,
                   const std::vector<UnitId>& lane_units, std::vector<Unit>& units);

// The batches of a lane, read back from Unit::batch. `lane_units` ascending.
[[nodiscard]] std::vector<Batch> CollectBatches(const Layout& layout,
                                                const std::vector<UnitId>& lane_units,
                                                const std::vector<Unit>& units);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_BATCHES_H_
