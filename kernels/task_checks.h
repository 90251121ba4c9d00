// What every device checks of its tasks before it writes anything: boxes and summation trees.
// INVALID_ARGUMENT names the two values that disagree. Threads: any.
#ifndef DMUOND_KERNELS_TASK_CHECKS_H_
#define DMUOND_KERNELS_TASK_CHECKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/ops.h"

namespace dmuond::kernels {

// Trees have at most 2^16 leaves.
inline constexpr int kSumLevelMax = 16;

[[nodiscard]] int64_t Elements(const StridedBox& box);
// `role`: what the box is, for the message.
absl::Status CheckBox(const StridedBox& box, const char* role);
absl::Status CheckSameShape(const StridedBox& dst, const StridedBox& src);
// A copy's two boxes.
absl::Status CheckCopy(const StridedBox& dst, const StridedBox& src);
// Also whether sources and levels describe a tree: their number, alignment and size.
absl::Status CheckSum(const SumTask& task);

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_TASK_CHECKS_H_
