// What a step is compared with, measured in the same run: bare matrix products and bare copies.
#ifndef DMUOND_BENCH_STEP_BASELINES_H_
#define DMUOND_BENCH_STEP_BASELINES_H_

#include <cstdint>
#include <vector>

#include "bench/common/model.h"

namespace dmuond::bench {

// Seconds that the products of the default preset's Newton-Schulz take for `matrices`, called
// directly through OpenBLAS, whole matrices on `threads` threads. Gram matrices by syrk, which
// computes one triangle; symmetric results as `work` says; other products by gemm. Least of
// `repeats`.
enum class ProductWork : uint8_t {
  kWhole,        // by one gemm, as a caller would
  kLowerBlocks,  // one triangle by a gemm for each block of columns, as a lane does
};
[[nodiscard]] double ProductSeconds(const std::vector<Matrices>& matrices, int threads, int repeats,
                                    ProductWork work);

// Bytes per second of memcpy from one shared mapping to another, by threads that wait for work as a
// lane's do. Least time of `repeats`, all pages touched before: what fits into the last-level cache
// is there, while a lane finds it as the rest of a step has left it.
[[nodiscard]] double MemcpyBytesPerSecond(int64_t bytes, int threads, int repeats);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_STEP_BASELINES_H_
