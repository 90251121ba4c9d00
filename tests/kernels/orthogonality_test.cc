#include "kernels/orthogonality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/kernels/spectra.h"

namespace dmuond::kernels {
namespace {

// With these singular values, and others zero, directions at random.
double ErrorOf(int64_t rows, int64_t cols, const std::vector<double>& values) {
  spectra::Random random(7);
  const std::vector<float> o = spectra::Rotated("", rows, cols, values, random).ToFloat();
  return OrthogonalityError(o.data(), rows, cols);
}

double Expected(int64_t rows, int64_t cols, std::vector<double> values) {
  values.resize(std::min(rows, cols));
  double squares = 0;
  for (const double value : values) squares += std::pow(value * value - 1, 2);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST(OrthogonalityTest, IsExactForFewRowsOrColumns) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 9}, {9, 1}, {64, 100}, {100, 64}}) {
    const int64_t p = std::min(rows, cols);
    std::vector<double> values;
    for (int64_t i = 0; i < p; ++i) values.push_back(0.6 + 0.7 * static_cast<double>(i) / p);
    EXPECT_NEAR(ErrorOf(rows, cols, values), Expected(rows, cols, values), 1e-4);
    EXPECT_NEAR(ErrorOf(rows, cols, std::vector<double>(p, 1.0)), 0, 1e-4);
  }
}

TEST(OrthogonalityTest, IsNearWhereManyDirectionsAreOff) {
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{256, 256}, {200, 500}, {500, 200}}) {
    const int64_t p = std::min(rows, cols);
    std::vector<double> values;
    for (int64_t i = 0; i < p; ++i) values.push_back(0.7 + 0.5 * static_cast<double>(i) / p);
    const double expected = Expected(rows, cols, values);
    EXPECT_NEAR(ErrorOf(rows, cols, values), expected, 0.1 * expected);
    const std::vector<double> half(p / 2, 1.0);
    EXPECT_NEAR(ErrorOf(rows, cols, half), std::sqrt(0.5), 0.05);
  }
}

TEST(OrthogonalityTest, OfAZeroMatrixIsOne) {
  const std::vector<float> zero(300 * 100);
  EXPECT_EQ(OrthogonalityError(zero.data(), 300, 100), 1);
  EXPECT_EQ(OrthogonalityError(zero.data(), 10, 3000), 1);
}

}  // namespace
}  // namespace dmuond::kernels
