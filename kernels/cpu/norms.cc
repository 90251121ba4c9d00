#include "kernels/cpu/norms.h"

#include <array>

#include "kernels/cpu/clones.h"

namespace dmuond::kernels::cpu {
namespace {
constexpr int kSums = 16;
}  // namespace

DMUOND_CLONES double SumOfSquares(const float* data, int64_t elements) {
  std::array<double, kSums> sums{};
  int64_t i = 0;
  for (; i + kSums <= elements; i += kSums) {
    for (int j = 0; j < kSums; ++j) {
      const double x = data[i + j];
      sums[j] += x * x;  // exact product: 24 + 24 bits
    }
  }
  for (int j = 0; i < elements; ++i, ++j) {
    const double x = data[i];
    sums[j] += x * x;
  }
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

}  // namespace dmuond::kernels::cpu
