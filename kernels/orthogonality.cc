#include "kernels/orthogonality.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/cpu/clones.h"

namespace dmuond::kernels {
namespace {

constexpr int64_t kVectors = 16;

DMUOND_CLONES float Dot(const float* __restrict a, const float* __restrict b, int64_t n) {
  constexpr int64_t kLanes = 16;
  std::array<float, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sums[i % kLanes] += a[i] * b[i];
  float sum = 0;
  for (const float lane : sums) sum += lane;
  return sum;
}

DMUOND_CLONES void Add(float factor, const float* __restrict from, float* __restrict to,
                       int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// Vectors of p elements, one after the other.
std::vector<float> Vectors(int64_t p, int64_t count) {
  std::vector<float> vectors(p * count);
  if (p <= kExactlyOrthogonal) {
    for (int64_t k = 0; k < count; ++k) vectors[k * p + k] = 1;
    return vectors;
  }
  std::minstd_rand random(1);
  for (float& x : vectors) x = random() % 2 == 0 ? 1.0F : -1.0F;
  return vectors;
}

}  // namespace

double OrthogonalityError(const float* o, int64_t rows, int64_t cols) {
  const int64_t p = std::min(rows, cols);
  if (p == 0) return 0;
  const bool exact = p <= kExactlyOrthogonal;
  const int64_t count = exact ? p : kVectors;
  const std::vector<float> z = Vectors(p, count);
  double squares = 0;
  if (rows > cols) {
    std::vector<float> product(cols * count);  // O^T * O * z
    for (int64_t i = 0; i < rows; ++i) {
      const float* const row = o + i * cols;
      for (int64_t k = 0; k < count; ++k) {
        Add(Dot(row, z.data() + k * cols, cols), row, product.data() + k * cols, cols);
      }
    }
    for (int64_t i = 0; i < cols * count; ++i) squares += std::pow(product[i] - z[i], 2);
  } else {
    std::vector<float> product(cols * count);  // O^T * z
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < count; ++k) {
        if (z[k * rows + i] != 0) {
          Add(z[k * rows + i], o + i * cols, product.data() + k * cols, cols);
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < count; ++k) {
        const float of_row = Dot(o + i * cols, product.data() + k * cols, cols);
        squares += std::pow(of_row - z[k * rows + i], 2);
      }
    }
  }
  if (!exact) squares /= static_cast<double>(count);
  return std::sqrt(squares / static_cast<double>(p));
}

}  // namespace dmuond::kernels
