// fp16 by the processor's own conversions, where it has them: the bits of cast.h (which rounds to
// nearest even, too, and quiets NaN) at a fifth of the instructions. Threads: any.
#ifndef DMUOND_KERNELS_CPU_F16C_H_
#define DMUOND_KERNELS_CPU_F16C_H_

#include <cstdint>

namespace dmuond::kernels::cpu {

[[nodiscard]] bool HasF16C();

// REQUIRES: HasF16C(). The arrays must not overlap.
void WidenF16C(const uint16_t* src, float* dst, int64_t n);
void NarrowF16C(const float* src, uint16_t* dst, int64_t n);
// out[i] = (a[i] + b[i]) + (c[i] + d[i]).
void AddFourF16C(const uint16_t* a, const uint16_t* b, const uint16_t* c, const uint16_t* d,
                 float* out, int64_t n);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_F16C_H_
