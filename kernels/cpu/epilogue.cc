#include "kernels/cpu/epilogue.h"

#include <cstring>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/clones.h"

namespace dmuond::kernels::cpu {
namespace {

DMUOND_CLONES void RoundBF16(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = RoundToBF16(values[i]);
}
DMUOND_CLONES void RoundF16(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = RoundToF16(values[i]);
}

using Float4 = float __attribute__((vector_size(16)));

void Transpose4x4(const float* from, float* to, int64_t stride) {
  Float4 r0;
  Float4 r1;
  Float4 r2;
  Float4 r3;
  std::memcpy(&r0, from, sizeof(r0));
  std::memcpy(&r1, from + stride, sizeof(r1));
  std::memcpy(&r2, from + 2 * stride, sizeof(r2));
  std::memcpy(&r3, from + 3 * stride, sizeof(r3));
  const Float4 low01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
  const Float4 high01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
  const Float4 low23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
  const Float4 high23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
  const Float4 c0 = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  const Float4 c1 = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  const Float4 c2 = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  const Float4 c3 = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
  std::memcpy(to, &c0, sizeof(c0));
  std::memcpy(to + stride, &c1, sizeof(c1));
  std::memcpy(to + 2 * stride, &c2, sizeof(c2));
  std::memcpy(to + 3 * stride, &c3, sizeof(c3));
}

}  // namespace

DMUOND_CLONES void AddScaled(const float* __restrict x, float factor, float* __restrict y,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

void RoundInPlace(DType dtype, float* values, int64_t n) {
  switch (dtype) {
    case DType::kF32:
      return;
    case DType::kBF16:
      return RoundBF16(values, n);
    case DType::kF16:
      return RoundF16(values, n);
  }
}

void Transpose(const float* from, float* to, int64_t stride, int64_t rows, int64_t cols) {
  const int64_t rows4 = rows & ~int64_t{3};
  const int64_t cols4 = cols & ~int64_t{3};
  for (int64_t c = 0; c < cols4; c += 4) {
    for (int64_t r = 0; r < rows4; r += 4) {
      Transpose4x4(from + r * stride + c, to + c * stride + r, stride);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < rows4 ? cols4 : 0; c < cols; ++c) {
      to[c * stride + r] = from[r * stride + c];
    }
  }
}

}  // namespace dmuond::kernels::cpu
