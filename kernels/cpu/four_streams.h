// A loop over an array as four quarters in lockstep. One sequential read keeps only a part of a
// core's memory bandwidth busy (10 of 17 GB/s where this was measured); four at a time use all of
// it.
#ifndef DMUOND_KERNELS_CPU_FOUR_STREAMS_H_
#define DMUOND_KERNELS_CPU_FOUR_STREAMS_H_

#include <cstdint>

namespace dmuond::kernels::cpu {

// Calls step(i) once for each i in [0, n), sixteen neighbours at a time, so that the compiler makes
// vectors of them. To be inlined into functions with DMUOND_CLONES.
template <typename Step>
[[gnu::always_inline]] inline void ForFourStreams(int64_t n, Step step) {
  constexpr int64_t kVector = 16;
  const int64_t quarter = n / (4 * kVector) * kVector;
  for (int64_t i = 0; i < quarter; i += kVector) {
    for (int64_t j = i; j < i + kVector; ++j) step(j);
    for (int64_t j = i; j < i + kVector; ++j) step(j + quarter);
    for (int64_t j = i; j < i + kVector; ++j) step(j + 2 * quarter);
    for (int64_t j = i; j < i + kVector; ++j) step(j + 3 * quarter);
  }
  for (int64_t i = 4 * quarter; i < n; ++i) step(i);
}

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_FOUR_STREAMS_H_
