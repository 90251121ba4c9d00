// What happens to a product between OpenBLAS and its place in memory: terms added in fp32, rounding
// to the stored type (kept in fp32, so that the next product need not widen), and the mirrored
// store of a lower triangle. Threads: all functions from any.
#ifndef DMUOND_KERNELS_CPU_EPILOGUE_H_
#define DMUOND_KERNELS_CPU_EPILOGUE_H_

#include <cstdint>

#include "kernels/device.h"

namespace dmuond::kernels::cpu {

// y[i] += factor * x[i]. The arrays must not overlap.
void AddScaled(const float* x, float factor, float* y, int64_t n);

// Rounds each element to the nearest value that dtype can hold, to even in the middle.
void RoundInPlace(DType dtype, float* values, int64_t n);

// to[c * stride + r] = from[r * stride + c] for r < rows, c < cols. The ranges must not overlap.
void Transpose(const float* from, float* to, int64_t stride, int64_t rows, int64_t cols);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_EPILOGUE_H_
