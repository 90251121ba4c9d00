// Newton-Schulz on the CPU device against an fp64 run of the same polynomial: docs/maths.md
// section 4.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "kernels/presets.h"
#include "tests/kernels/cpu_muon_helpers.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels::cpu {
namespace {

using reference::Gaussian;
using reference::Matrix;
using reference::WithSpectrum;

struct Named {
  std::string name;
  Matrix matrix;
};

NewtonSchulzConfig Config(const char* preset, DType dtype) {
  NewtonSchulzConfig config = FindPreset(preset)->newton_schulz;
  config.dtype = dtype;
  config.norm = NormRule::kExact;
  return config;
}

double Error(TestLane& lane, const NewtonSchulzConfig& config, const Matrix& u) {
  // What the device is given: u in fp32.
  const Matrix given(u.rows, u.cols, u.ToFloat());
  const Matrix result = lane.Orthogonalise(config, given);
  for (const double x : result.values) {
    if (!std::isfinite(x)) return HUGE_VAL;
  }
  return reference::RelativeDifference(result, reference::NewtonSchulz(config.coefficients, given));
}

std::vector<double> Spectrum(int64_t n, const std::function<double(int64_t)>& sigma) {
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(sigma(i));
  return values;
}

std::vector<Named> FullRank(int64_t rows, int64_t cols, reference::Random& random) {
  const int64_t p = std::min(rows, cols);
  std::uniform_real_distribution<double> uniform(0.01, 1.0);
  std::student_t_distribution<double> heavy(1.5);
  std::vector<Named> all;
  all.push_back({"gaussian", Gaussian(rows, cols, random)});
  all.push_back(
      {"uniform",
       WithSpectrum(rows, cols, Spectrum(p, [&](int64_t) { return uniform(random); }), random)});
  all.push_back(
      {"power law",
       WithSpectrum(rows, cols,
                    Spectrum(p, [](int64_t i) { return 1.0 / static_cast<double>(i + 1); }),
                    random)});
  all.push_back({"exponential", WithSpectrum(rows, cols,
                                             Spectrum(p,
                                                      [&](int64_t i) {
                                                        return std::exp(-20.0 *
                                                                        static_cast<double>(i) /
                                                                        static_cast<double>(p));
                                                      }),
                                             random)});
  all.push_back(
      {"heavy-tailed",
       WithSpectrum(rows, cols, Spectrum(p, [&](int64_t) { return std::abs(heavy(random)); }),
                    random)});
  all.push_back({"half zero",
                 WithSpectrum(rows, cols, Spectrum(p / 2, [&](int64_t) { return uniform(random); }),
                              random)});
  return all;
}

std::vector<std::pair<int64_t, int64_t>> Shapes() {
  return {{256, 256}, {256, 512}, {511, 513}, {384, 128}, {130, 1040}};
}

TEST(NewtonSchulzCpu, HalfPrecisionGramFollowsThePolynomialOnEverySpectrum) {
  TestLane lane(2);
  reference::Random random(1);
  const NewtonSchulzConfig config = Config("dmuon", DType::kF16);
  for (const auto& [rows, cols] : Shapes()) {
    for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
      // One restart where the matrix is wide, two where it is nearly square.
      const bool wide = 4 * std::max(rows, cols) > 5 * std::min(rows, cols);
      const double bound = !wide ? 0.03 : name == "half zero" ? 0.11 : 0.04;
      EXPECT_LT(Error(lane, config, matrix), name == "gaussian" ? 5e-3 : bound)
          << name << " " << rows << "x" << cols;
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(config, matrix)),
                wide ? 1.25 : 1.15)
          << name << " " << rows << "x" << cols;
    }
  }
}

TEST(NewtonSchulzCpu, TwoRestartsFollowItClosely) {
  TestLane lane(2);
  reference::Random random(1);
  NewtonSchulzConfig config = Config("dmuon", DType::kF16);
  config.restarts = {2, 4};
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{256, 512}, {384, 128}}) {
    for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
      EXPECT_LT(Error(lane, config, matrix), name == "gaussian" ? 5e-3 : 0.03)
          << name << " " << rows << "x" << cols;
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(config, matrix)), 1.13)
          << name << " " << rows << "x" << cols;
    }
  }
}

// Rounding X to fp16 leaves noise in directions that the matrix does not have; the polynomial has
// slope 800 there. Of rank r the noise is 1/sqrt(r) of the whole: at rank 1 a sixth from the cast
// alone, whatever is done afterwards.
TEST(NewtonSchulzCpu, HalfPrecisionGramOfFewDirectionsIsAsGoodAsItsCast) {
  TestLane lane(2);
  reference::Random random(2);
  const NewtonSchulzConfig config = Config("dmuon", DType::kF16);
  for (const int64_t rank : {1, 2, 4, 10}) {
    for (const auto& [rows, cols] : Shapes()) {
      const auto flat = Spectrum(rank, [](int64_t) { return 1.0; });
      const auto falling = Spectrum(rank, [](int64_t i) { return std::pow(0.5, i); });
      const double bound = rank == 1 ? 0.3 : rank == 2 ? 0.15 : 0.11;
      for (const auto& spectrum : {flat, falling}) {
        const Matrix u = WithSpectrum(rows, cols, spectrum, random);
        EXPECT_LT(Error(lane, config, u), bound) << "rank " << rank << " " << rows << "x" << cols;
        EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(config, u)), 1.15);
      }
    }
  }
}

// What rounding loses in a direction is multiplied by all slopes since the last restart: with a
// restart too late the small matrices of this test overflow (docs/maths.md section 3).
TEST(NewtonSchulzCpu, HalfPrecisionGramStaysBoundedOnWideSpectra) {
  TestLane lane(2);
  reference::Random random(7);
  std::uniform_real_distribution<double> exponent(-9, 0);
  const NewtonSchulzConfig config = FindPreset("dmuon")->newton_schulz;
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {32, 2}, {2, 2}, {3, 40}, {8, 8}, {32, 32}, {64, 16}}) {
    for (int trial = 0; trial < 300; ++trial) {
      const auto sigma = [&](int64_t i) { return i == 0 ? 1 : std::pow(10.0, exponent(random)); };
      const Matrix u = WithSpectrum(rows, cols, Spectrum(std::min(rows, cols), sigma), random);
      const double largest = reference::LargestSingularValue(lane.Orthogonalise(config, u));
      ASSERT_TRUE(largest < 1.5) << rows << "x" << cols << " trial " << trial << ": " << largest;
    }
  }
}

TEST(NewtonSchulzCpu, SinglePrecisionIsTheReferenceUpToItsRounding) {
  TestLane lane(2);
  reference::Random random(3);
  for (const auto& [rows, cols] : Shapes()) {
    for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
      EXPECT_LT(Error(lane, Config("torch", DType::kF32), matrix), 5e-5) << name << " " << rows;
      EXPECT_LT(Error(lane, Config("dmuon", DType::kF32), matrix), name == "gaussian" ? 2e-5 : 1e-3)
          << name << " " << rows << "x" << cols;
    }
    const Matrix low = WithSpectrum(rows, cols, {1.0, 0.5, 0.25}, random);
    EXPECT_LT(Error(lane, Config("dmuon", DType::kF32), low), 1e-3);
  }
}

TEST(NewtonSchulzCpu, BF16StandardStaysWithinItsTolerance) {
  TestLane lane(2);
  reference::Random random(4);
  for (const auto& [rows, cols] : Shapes()) {
    EXPECT_LT(Error(lane, FindPreset("torch")->newton_schulz, Gaussian(rows, cols, random)), 0.03);
  }
}

TEST(NewtonSchulzCpu, ThinMatricesAndLongOnes) {
  TestLane lane(3);
  reference::Random random(5);
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                           {1, 7},
                                                                           {9, 1},
                                                                           {1, 5000},
                                                                           {3000, 1},
                                                                           {2, 3},
                                                                           {16, 1024},
                                                                           {33, 31},
                                                                           {257, 255}}) {
    const Matrix u = Gaussian(rows, cols, random);
    // One direction, as above, where a side is one.
    EXPECT_LT(Error(lane, Config("dmuon", DType::kF16), u), 0.035) << rows << "x" << cols;
    EXPECT_LT(Error(lane, Config("dmuon", DType::kF32), u), 2e-4) << rows << "x" << cols;
    EXPECT_LT(Error(lane, Config("torch", DType::kF32), u), 5e-5) << rows << "x" << cols;
  }
}

TEST(NewtonSchulzCpu, ScaleOfTheGradientDoesNotMatterToDmuon) {
  TestLane lane(1);
  reference::Random random(6);
  const NewtonSchulzConfig config = FindPreset("dmuon")->newton_schulz;
  const Matrix u = Gaussian(96, 200, random);
  const Matrix unit = Combine(1 / reference::FrobeniusNorm(u), u, 0, u);
  const Matrix expected = lane.Orthogonalise(config, unit);
  for (const double norm : {1e-20, 1e-36, 1e20, 1e36}) {
    const Matrix result = lane.Orthogonalise(config, Combine(norm, unit, 0, unit));
    EXPECT_LT(reference::RelativeDifference(result, expected), 1e-2) << norm;
  }
}

TEST(NewtonSchulzCpu, ZeroGivesZeroAndExtremesStayFinite) {
  TestLane lane(2);
  for (const char* preset : kPresetNames) {
    const NewtonSchulzConfig config = FindPreset(preset)->newton_schulz;
    EXPECT_EQ(reference::FrobeniusNorm(lane.Orthogonalise(config, Matrix(40, 30))), 0.0) << preset;
    for (const double value : {1e-45, 1e-38, 1e-7, 1.0, 65504.0, 3.4e38}) {
      Matrix u(40, 30);
      for (size_t i = 0; i < u.values.size(); ++i) u.values[i] = i % 3 == 0 ? value : -value;
      for (const double x : lane.Orthogonalise(config, u).values) {
        ASSERT_TRUE(std::isfinite(x)) << preset << " " << value;
      }
      Matrix single(40, 30);
      single.at(3, 4) = value;
      for (const double x : lane.Orthogonalise(config, single).values) {
        ASSERT_TRUE(std::isfinite(x)) << preset << " " << value;
      }
    }
  }
}

}  // namespace
}  // namespace dmuond::kernels::cpu
