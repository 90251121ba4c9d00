// Sums of squares in fp64, in a fixed order of addition.
#ifndef DMUOND_KERNELS_CPU_NORMS_H_
#define DMUOND_KERNELS_CPU_NORMS_H_

#include <cstdint>

namespace dmuond::kernels::cpu {

// Sum of data[i]^2 over [0, elements): element i goes into the (i mod 16)th of sixteen running
// sums, which are then added as one binary tree. Threads: any.
[[nodiscard]] double SumOfSquares(const float* data, int64_t elements);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_NORMS_H_
