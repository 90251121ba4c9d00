// The ordered sum of contributions; see SumTask in kernels/ops.h for the order.
#ifndef DMUOND_KERNELS_CPU_SUM_H_
#define DMUOND_KERNELS_CPU_SUM_H_

#include <cstdint>

#include "kernels/ops.h"
#include "kernels/task_checks.h"

namespace dmuond::kernels::cpu {

// Computes the elements [begin, end) of the task's box, counted in walking order (box_walk.h). Each
// source is read once. Threads: any, disjoint ranges at the same time.
// REQUIRES: CheckSum(task); where squares are asked for, dst contiguous and the range one block.
void SumElements(const SumTask& task, int64_t begin, int64_t end);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_SUM_H_
