#include "kernels/cpu/f16c.h"

#include "kernels/cpu/cast.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dmuond::kernels::cpu {

#if defined(__x86_64__)

namespace {

constexpr int64_t kVector = 8;

[[gnu::target("avx,f16c")]] inline __m256 Load(const uint16_t* src) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}

}  // namespace

bool HasF16C() {
  // Every processor with AVX2 has F16C, for which clang 14's builtin has no word.
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

[[gnu::target("avx,f16c")]] void WidenF16C(const uint16_t* src, float* dst, int64_t n) {
  // Four quarters in lockstep: see four_streams.h.
  const int64_t quarter = n / (4 * kVector) * kVector;
  for (int64_t i = 0; i < quarter; i += kVector) {
    for (int64_t at = i; at < 4 * quarter; at += quarter) {
      _mm256_storeu_ps(dst + at, Load(src + at));
    }
  }
  for (int64_t i = 4 * quarter; i < n; ++i) dst[i] = FromF16(src[i]);
}

[[gnu::target("avx,f16c")]] void NarrowF16C(const float* src, uint16_t* dst, int64_t n) {
  const int64_t quarter = n / (4 * kVector) * kVector;
  for (int64_t i = 0; i < quarter; i += kVector) {
    for (int64_t at = i; at < 4 * quarter; at += quarter) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + at), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + at), half);
    }
  }
  for (int64_t i = 4 * quarter; i < n; ++i) dst[i] = ToF16(src[i]);
}

[[gnu::target("avx,f16c")]] void AddFourF16C(const uint16_t* a, const uint16_t* b,
                                             const uint16_t* c, const uint16_t* d, float* out,
                                             int64_t n) {
  int64_t i = 0;
  for (; i + kVector <= n; i += kVector) {
    const __m256 left = _mm256_add_ps(Load(a + i), Load(b + i));
    const __m256 right = _mm256_add_ps(Load(c + i), Load(d + i));
    _mm256_storeu_ps(out + i, _mm256_add_ps(left, right));
  }
  for (; i < n; ++i) out[i] = (FromF16(a[i]) + FromF16(b[i])) + (FromF16(c[i]) + FromF16(d[i]));
}

#else

bool HasF16C() { return false; }
void WidenF16C(const uint16_t*, float*, int64_t) {}
void NarrowF16C(const float*, uint16_t*, int64_t) {}
void AddFourF16C(const uint16_t*, const uint16_t*, const uint16_t*, const uint16_t*, float*,
                 int64_t) {}

#endif

}  // namespace dmuond::kernels::cpu
