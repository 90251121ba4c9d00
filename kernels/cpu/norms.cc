#include "kernels/cpu/norms.h"

#include <array>
#include <cstring>

#include "kernels/cpu/clones.h"

namespace dmuond::kernels::cpu {
namespace {

// Four quarters of the data with eight running sums each: what four reads at a time need.
constexpr int64_t kStreams = 4;
constexpr int64_t kLanes = 8;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Doubles = double __attribute__((vector_size(kLanes * sizeof(double))));

}  // namespace

DMUOND_CLONES double SumOfSquares(const float* data, int64_t elements) {
  std::array<Doubles, kStreams> sums{};
  const int64_t quarter = elements / (kStreams * kLanes) * kLanes;
  for (int64_t i = 0; i < quarter; i += kLanes) {
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      Floats narrow;
      std::memcpy(&narrow, data + stream * quarter + i, sizeof(narrow));
      const Doubles wide = __builtin_convertvector(narrow, Doubles);
      sums[stream] += wide * wide;  // exact products: 24 + 24 bits
    }
  }
  for (int64_t i = kStreams * quarter, at = 0; i < elements; ++i, ++at) {
    const double x = data[i];
    sums[at / kLanes][at % kLanes] += x * x;
  }
  Doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

}  // namespace dmuond::kernels::cpu
