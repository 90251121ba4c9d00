// Layouts of well-known models, as trainers would register them. `dmuonctl plan --model` and
// benchmarks plan with these.
#ifndef DMUOND_SCHEDULER_MODEL_LAYOUT_H_
#define DMUOND_SCHEDULER_MODEL_LAYOUT_H_

#include <cstdint>

#include "scheduler/layout.h"
#include "scheduler/model_shapes.h"

namespace dmuond::scheduler {

// One trainer per lane. Every trainer holds every tensor (data parallel), except those named
// "experts.": kExpertRanks trainers divide these among them (expert parallel), and so does each
// further group of as many; where there are fewer trainers, all divide them. Gradients and weights
// are bf16; the last layer is ready first.
inline constexpr int32_t kExpertRanks = 64;
[[nodiscard]] Layout LayoutOf(const ModelShapes& model, int32_t nodes, int32_t lanes_per_node);

// What trainer `rank` of `world_size`, one per lane, registers under FSDP2 alone: of every tensor
// the rows that torch.chunk gives it, which are short or none for the last ranks where the rows do
// not divide. Gradients and weights in bf16, back to back in one arena each.
[[nodiscard]] Registration ShardedRegistration(const ModelShapes& model, int32_t rank,
                                               int32_t world_size, int32_t lanes_per_node);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_MODEL_LAYOUT_H_
