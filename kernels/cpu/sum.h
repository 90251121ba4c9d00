// The ordered sum of contributions; see SumTask in kernels/ops.h for the order.
#ifndef DMUOND_KERNELS_CPU_SUM_H_
#define DMUOND_KERNELS_CPU_SUM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Trees have at most 2^16 leaves.
inline constexpr int kSumLevelMax = 16;

// INVALID_ARGUMENT if sources and levels do not describe a tree: their number, alignment or size.
absl::Status CheckTree(const SumTask& task);

// Computes the elements [begin, end) of the task's box, counted in walking order (box_walk.h). Each
// source is read once. Threads: any, disjoint ranges at the same time.
// REQUIRES: CheckTree(task); where squares are asked for, dst contiguous and the range one block.
void SumElements(const SumTask& task, int64_t begin, int64_t end);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_SUM_H_
