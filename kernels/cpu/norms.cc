#include "kernels/cpu/norms.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/clones.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace dmuond::kernels::cpu {
namespace {

// Four quarters of a chunk with eight running sums each: what four reads at a time need.
constexpr int64_t kStreams = 4;
constexpr int64_t kLanes = 8;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Doubles = double __attribute__((vector_size(kLanes * sizeof(double))));

DMUOND_CLONES void AddSquares(const float* data, int64_t elements, double* running) {
  Doubles sums[kStreams];
  std::memcpy(sums, running, sizeof(sums));
  const int64_t quarter = elements / (kStreams * kLanes) * kLanes;
  for (int64_t i = 0; i < quarter; i += kLanes) {
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      Floats narrow;
      std::memcpy(&narrow, data + stream * quarter + i, sizeof(narrow));
      const Doubles wide = __builtin_convertvector(narrow, Doubles);
      sums[stream] += wide * wide;  // exact products: 24 + 24 bits
    }
  }
  std::memcpy(running, sums, sizeof(sums));
  for (int64_t i = kStreams * quarter, at = 0; i < elements; ++i, ++at) {
    const double x = data[i];
    running[at] += x * x;
  }
}

#if defined(__x86_64__)
using Words = float __attribute__((vector_size(16)));

// A line at a time from each quarter: eight products, then the next eight, as above.
DMUOND_CLONES void StreamWithSquares(const float* chunk, float factor, float* dst,
                                     const Ahead& ahead, double* running) {
  constexpr int64_t kLine = 2 * kLanes;
  constexpr int64_t kQuarter = SquareSum::kChunk / kStreams;
  Doubles sums[kStreams];
  std::memcpy(sums, running, sizeof(sums));
  for (int64_t i = 0; i < kQuarter; i += kLine) {
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      const float* from = chunk + stream * kQuarter + i;
      float* to = dst + stream * kQuarter + i;
      for (const std::byte* source : ahead.sources) {
        const int64_t at = (stream * kQuarter + i) * ahead.element_bytes;
        _mm_prefetch(reinterpret_cast<const char*>(source + at), _MM_HINT_T0);
      }
      for (int64_t half = 0; half < kLine; half += kLanes) {
        Floats narrow;
        std::memcpy(&narrow, from + half, sizeof(narrow));
        narrow *= factor;
        Words words[2];
        std::memcpy(words, &narrow, sizeof(words));
        _mm_stream_ps(to + half, words[0]);
        _mm_stream_ps(to + half + 4, words[1]);
        const Doubles wide = __builtin_convertvector(narrow, Doubles);
        sums[stream] += wide * wide;
      }
    }
  }
  std::memcpy(running, sums, sizeof(sums));
}
#else
void StreamWithSquares(const float* chunk, float factor, float* dst, const Ahead& /*ahead*/,
                       double* running) {
  for (int64_t i = 0; i < SquareSum::kChunk; ++i) dst[i] = chunk[i] * factor;
  AddSquares(dst, SquareSum::kChunk, running);
}
#endif

}  // namespace

void SquareSum::AddStreaming(const float* chunk, float factor, float* dst, const Ahead& ahead) {
  StreamWithSquares(chunk, factor, dst, ahead, sums_.data());
}

void SquareSum::Add(const float* chunk, int64_t elements) {
  AddSquares(chunk, elements, sums_.data());
}

double SquareSum::Total() const {
  std::array<double, kLanes> sum;
  for (int64_t i = 0; i < kLanes; ++i) {
    sum[i] = (sums_[i] + sums_[kLanes + i]) + (sums_[2 * kLanes + i] + sums_[3 * kLanes + i]);
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

double SumOfSquares(const float* data, int64_t elements) {
  SquareSum sum;
  for (int64_t i = 0; i < elements; i += SquareSum::kChunk) {
    sum.Add(data + i, std::min(SquareSum::kChunk, elements - i));
  }
  return sum.Total();
}

}  // namespace dmuond::kernels::cpu
