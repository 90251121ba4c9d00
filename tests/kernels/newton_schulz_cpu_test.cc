// Newton-Schulz on the CPU device against an fp64 run of the same polynomial: docs/maths.md
// section 4.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/presets.h"
#include "tests/kernels/cpu_muon_helpers.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/spectra.h"

namespace dmuond::kernels::cpu {
namespace {

using reference::Gaussian;
using reference::Matrix;
using reference::WithSpectrum;

struct Named {
  std::string name;
  Matrix matrix;
};

NewtonSchulzConfig WithSchatten4(const char* preset) {
  NewtonSchulzConfig config = FindPreset(preset)->newton_schulz;
  config.norm = NormRule::kSchatten4;
  return config;
}

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
  const Matrix expected =
      reference::NewtonSchulz(config.coefficients, given, config.norm == NormRule::kSchatten4);
  return reference::RelativeDifference(result, expected);
}

std::vector<double> Spectrum(int64_t n, const std::function<double(int64_t)>& sigma) {
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(sigma(i));
  return values;
}

Named Given(spectra::Shaped u) {
  Matrix matrix(u.rows, u.cols);
  matrix.values = std::move(u.values);
  return {std::move(u.name), std::move(matrix)};
}

std::vector<Named> FullRank(int64_t rows, int64_t cols, reference::Random& random) {
  std::vector<Named> all;
  all.push_back({"gaussian", Gaussian(rows, cols, random)});
  for (spectra::Shaped& u : spectra::Hard(rows, cols, random)) all.push_back(Given(std::move(u)));
  return all;
}

std::vector<Named> RealGradients() {
  reference::Random random(9);
  std::vector<Named> all;
  for (spectra::Shaped& u : spectra::DemoGradients(random)) all.push_back(Given(std::move(u)));
  return all;
}

using Shapes = std::vector<std::pair<int64_t, int64_t>>;

Shapes LargeShapes() { return {{256, 256}, {256, 512}, {511, 513}, {384, 128}, {130, 1040}}; }

// The first singular value is 1, the others are log-uniform over nine decades.
Matrix NineDecades(int64_t rows, int64_t cols, reference::Random& random) {
  std::uniform_real_distribution<double> exponent(-9, 0);
  const auto sigma = [&](int64_t i) { return i == 0 ? 1 : std::pow(10.0, exponent(random)); };
  return WithSpectrum(rows, cols, Spectrum(std::min(rows, cols), sigma), random);
}

// A line of the table in docs/maths.md, section 4: the numbers are the page's.
struct Bounds {
  double gaussian;
  double uniform_or_power_law;
  double exponential_or_heavy_tailed;
  double half_zero;
  double nine_decades;
  double two_spikes;
  double rank_4_to_10;
  double rank_2;
  double rank_1;
  double sigma_max;

  [[nodiscard]] double Of(const std::string& spectrum) const {
    if (spectrum == "gaussian") return gaussian;
    if (spectrum == "uniform" || spectrum == "power law") return uniform_or_power_law;
    if (spectrum == "half zero") return half_zero;
    if (spectrum == "two spikes") return two_spikes;
    if (spectrum == "log-spaced to 1e-9") return nine_decades;
    return exponential_or_heavy_tailed;
  }
  [[nodiscard]] double OfRank(int64_t rank) const {
    return rank == 1 ? rank_1 : rank == 2 ? rank_2 : rank_4_to_10;
  }
};

constexpr Bounds kOneRow = {0.026, 0.026, 0.026, 0.026, 0.026, 0.026, 0, 0, 0, 1.05};
constexpr Bounds kSquareTo15 = {0.16, 0.10, 0.28, 0.31, 0.29, 0.12, 0.12, 0.18, 0.31, 1.15};
constexpr Bounds kSquareTo63 = {0.012, 0.013, 0.11, 0.05, 0.16, 0.07, 0.12, 0.18, 0.24, 1.15};
constexpr Bounds kSquareFrom64 = {0.005, 0.006, 0.034, 0.025, 0.06, 0.035, 0.12, 0.17, 0.22, 1.15};
constexpr Bounds kWideTo15 = {0.12, 0.13, 0.60, 0.61, 0.61, 0.12, 0.12, 0.26, 0.63, 1.7};
constexpr Bounds kWideTo63 = {0.023, 0.033, 0.19, 0.21, 0.25, 0.07, 0.12, 0.18, 0.41, 1.45};
constexpr Bounds kWideFrom64 = {0.008, 0.046, 0.065, 0.14, 0.10, 0.04, 0.12, 0.18, 0.30, 1.3};

// With the Schatten-4 norm, which lifts what fp16's rounding leaves in empty directions as well.
constexpr Bounds Schatten4(Bounds bounds, double exponential, double half_zero, double two_spikes) {
  bounds.exponential_or_heavy_tailed = exponential;
  bounds.half_zero = half_zero;
  bounds.two_spikes = two_spikes;
  bounds.rank_4_to_10 = 0.17;
  return bounds;
}

struct Line {
  std::string name;
  Bounds bounds;
  Bounds schatten4;
  int trials;
  Shapes shapes;
};

std::vector<Line> NearlySquare() {
  return {
      {"OneRow", kOneRow, kOneRow, 50, {{1, 1}, {1, 2}, {7, 1}, {1, 96}, {1, 5000}}},
      {"SquareTo15",
       kSquareTo15,
       Schatten4(kSquareTo15, 0.28, 0.31, 0.12),
       50,
       {{2, 2}, {3, 3}, {4, 5}, {8, 8}, {10, 8}}},
      {"SquareTo63",
       kSquareTo63,
       Schatten4(kSquareTo63, 0.11, 0.065, 0.07),
       4,
       {{16, 16}, {16, 20}, {33, 31}, {48, 48}}},
      {"SquareFrom64",
       kSquareFrom64,
       Schatten4(kSquareFrom64, 0.04, 0.045, 0.035),
       1,
       {{64, 64}, {80, 64}, {256, 256}, {511, 513}}},
  };
}

std::vector<Line> Wide() {
  return {
      {"WideTo15",
       kWideTo15,
       Schatten4(kWideTo15, 0.60, 0.61, 0.40),
       50,
       {{2, 3}, {2, 32}, {40, 3}, {4, 16}, {8, 12}}},
      {"WideTo63",
       kWideTo63,
       Schatten4(kWideTo63, 0.19, 0.21, 0.12),
       4,
       {{16, 24}, {1024, 16}, {32, 48}, {48, 64}}},
      {"WideFrom64",
       kWideFrom64,
       Schatten4(kWideFrom64, 0.065, 0.14, 0.045),
       1,
       {{64, 81}, {64, 200}, {256, 512}, {384, 128}, {130, 1040}}},
  };
}

class HalfPrecisionGram : public testing::TestWithParam<Line> {
 protected:
  // Matrices with more elements are left out: the reference takes long.
  void ExpectWithin(const NewtonSchulzConfig& config, const Bounds& bounds,
                    int64_t elements_max = INT64_MAX) {
    TestLane lane(2);
    reference::Random random(1);
    const auto expect = [&](const Matrix& u, double bound, const std::string& name) {
      const std::string what = absl::StrCat(name, " ", u.rows, "x", u.cols);
      EXPECT_LT(Error(lane, config, u), bound) << what;
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(config, u)), bounds.sigma_max)
          << what;
    };
    for (const auto& [rows, cols] : GetParam().shapes) {
      if (rows * cols > elements_max) continue;
      for (int trial = 0; trial < GetParam().trials; ++trial) {
        for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
          expect(matrix, bounds.Of(name), name);
        }
        expect(NineDecades(rows, cols, random), bounds.nine_decades, "nine decades");
        // Rounding X to fp16 leaves noise in directions that the matrix does not have; the
        // polynomial has slope 800 there. Of rank r the noise is 1/sqrt(r) of the whole: at rank 1
        // a sixth from the cast alone, whatever is done afterwards.
        for (const int64_t rank : {1, 2, 4, 10}) {
          if (rank >= std::min(rows, cols)) continue;
          const auto flat = Spectrum(rank, [](int64_t) { return 1.0; });
          const auto falling = Spectrum(rank, [](int64_t i) { return std::pow(0.5, i); });
          for (const auto& spectrum : {flat, falling}) {
            expect(WithSpectrum(rows, cols, spectrum, random), bounds.OfRank(rank),
                   absl::StrCat("rank ", rank));
          }
        }
      }
    }
  }
};

class WideWithTwoRestarts : public HalfPrecisionGram {};

TEST_P(HalfPrecisionGram, StaysWithinTheBoundsOfItsShape) {
  ExpectWithin(FindPreset("dmuon")->newton_schulz, GetParam().bounds);
}

TEST_P(HalfPrecisionGram, StaysWithinThemWithTheSchatten4Norm) {
  ExpectWithin(WithSchatten4("dmuon"), GetParam().schatten4, 1 << 16);
}

TEST_P(WideWithTwoRestarts, HasTheBoundsOfNearlySquareMatrices) {
  NewtonSchulzConfig config = FindPreset("dmuon")->newton_schulz;
  config.restarts = {2, 4};
  const int64_t p = std::min(GetParam().shapes[0].first, GetParam().shapes[0].second);
  ExpectWithin(config, p < 16 ? kSquareTo15 : p < 64 ? kSquareTo63 : kSquareFrom64);
}

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(NearlySquare, HalfPrecisionGram, testing::ValuesIn(NearlySquare()), kName);
INSTANTIATE_TEST_SUITE_P(Wide, HalfPrecisionGram, testing::ValuesIn(Wide()), kName);
INSTANTIATE_TEST_SUITE_P(Wide, WideWithTwoRestarts, testing::ValuesIn(Wide()), kName);

// What rounding loses in a direction is multiplied by all slopes since the last restart: with a
// restart too late the small matrices of this test overflow (docs/maths.md section 3).
TEST(NewtonSchulzCpu, HalfPrecisionGramStaysBoundedOnNineDecades) {
  TestLane lane(2);
  reference::Random random(7);
  const NewtonSchulzConfig config = FindPreset("dmuon")->newton_schulz;
  for (const auto& [rows, cols] : Shapes{{32, 2}, {2, 2}, {3, 40}, {8, 8}, {32, 32}, {64, 16}}) {
    for (int trial = 0; trial < 300; ++trial) {
      const Matrix u = NineDecades(rows, cols, random);
      const double largest = reference::LargestSingularValue(lane.Orthogonalise(config, u));
      ASSERT_TRUE(largest < 1.7) << rows << "x" << cols << " trial " << trial << ": " << largest;
    }
  }
}

// Their singular values fall by seven to ten decades, and most are below 1e-3 of the first.
TEST(NewtonSchulzCpu, RealGradientsStayWithinTheirBounds) {
  TestLane lane(2);
  for (const auto& [name, u] : RealGradients()) {
    const double sigma_max = u.rows == u.cols ? kSquareFrom64.sigma_max : kWideFrom64.sigma_max;
    for (const NormRule norm : {NormRule::kExact, NormRule::kSchatten4}) {
      NewtonSchulzConfig dmuon = FindPreset("dmuon")->newton_schulz;
      NewtonSchulzConfig torch = FindPreset("torch")->newton_schulz;
      if (norm == NormRule::kSchatten4) dmuon.norm = torch.norm = norm;
      EXPECT_LT(Error(lane, dmuon, u), 0.10) << name;
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(dmuon, u)), sigma_max) << name;
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(torch, u)), 1.25) << name;
      for (const char* preset : {"torch", "dmuon"}) {
        NewtonSchulzConfig exact = Config(preset, DType::kF32);
        exact.norm = norm;
        EXPECT_LT(Error(lane, exact, u), 1e-3) << preset << " " << name;
      }
    }
  }
}

// By how much the Schatten-4 norm brings the result closer to the matrix's own polar factor: the
// polynomial has less to lift. The mean; it loses next to nothing on any.
double MeanGainOfSchatten4(const char* preset, const std::vector<spectra::Recorded>& all) {
  TestLane lane(2);
  double sum = 0;
  for (const auto& [name, rows, cols, sigma] : all) {
    spectra::Random random(5);
    spectra::Random same(5);
    const Matrix u = Given(spectra::Rotated(name, rows, cols, sigma, random)).matrix;
    const std::vector<double> ones(sigma.size(), 1.0);
    const Matrix polar = Given(spectra::Rotated(name, rows, cols, ones, same)).matrix;
    const auto error = [&](const NewtonSchulzConfig& config) {
      return reference::RelativeDifference(lane.Orthogonalise(config, u), polar);
    };
    const double gain = 1 - error(WithSchatten4(preset)) / error(FindPreset(preset)->newton_schulz);
    EXPECT_GT(gain, -0.005) << preset << " " << name;
    sum += gain;
  }
  return sum / static_cast<double>(all.size());
}

TEST(NewtonSchulzCpu, Schatten4NormBringsRealMatricesCloserToTheirPolarFactors) {
  for (const char* preset : {"dmuon", "torch"}) {
    const double momenta = MeanGainOfSchatten4(preset, spectra::RecordedMomenta());
    const double gradients = MeanGainOfSchatten4(preset, spectra::RecordedGradients());
    std::printf("# %s, gain of the Schatten-4 norm: momenta %.3f, gradients %.3f\n", preset,
                momenta, gradients);
    EXPECT_GT(momenta, 0.04) << preset;
    EXPECT_GT(gradients, 0.004) << preset;
  }
}

TEST(NewtonSchulzCpu, SinglePrecisionIsTheReferenceUpToItsRounding) {
  TestLane lane(2);
  reference::Random random(3);
  Shapes shapes = LargeShapes();
  for (const auto& [rows, cols] : Shapes{{1, 1},
                                         {1, 7},
                                         {9, 1},
                                         {1, 5000},
                                         {3000, 1},
                                         {2, 3},
                                         {3, 3},
                                         {16, 1024},
                                         {33, 31},
                                         {32, 48}}) {
    shapes.emplace_back(rows, cols);
  }
  for (const auto& [rows, cols] : shapes) {
    const double gaussian = std::min(rows, cols) < 16 ? 4e-5 : 2e-5;
    for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
      EXPECT_LT(Error(lane, Config("torch", DType::kF32), matrix), 5e-5) << name << " " << rows;
      EXPECT_LT(Error(lane, Config("dmuon", DType::kF32), matrix),
                name == "gaussian" ? gaussian : 1e-3)
          << name << " " << rows << "x" << cols;
    }
    if (std::min(rows, cols) < 3) continue;
    const Matrix low = WithSpectrum(rows, cols, {1.0, 0.5, 0.25}, random);
    EXPECT_LT(Error(lane, Config("torch", DType::kF32), low), 1e-3);
    EXPECT_LT(Error(lane, Config("dmuon", DType::kF32), low), 1e-3);
  }
}

TEST(NewtonSchulzCpu, BF16StandardStaysWithinItsTolerance) {
  TestLane lane(2);
  reference::Random random(4);
  const NewtonSchulzConfig config = FindPreset("torch")->newton_schulz;
  Shapes shapes = LargeShapes();
  for (const auto& shape : Shapes{{64, 64}, {64, 200}, {96, 65}}) shapes.push_back(shape);
  for (const auto& [rows, cols] : shapes) {
    EXPECT_LT(Error(lane, config, Gaussian(rows, cols, random)), 0.03) << rows << "x" << cols;
  }
  for (const auto& [rows, cols] : Shapes{{1, 7}, {2, 2}, {3, 40}, {8, 8}, {32, 48}, {64, 64}}) {
    for (const auto& [name, matrix] : FullRank(rows, cols, random)) {
      EXPECT_LT(reference::LargestSingularValue(lane.Orthogonalise(config, matrix)), 1.25)
          << name << " " << rows << "x" << cols;
    }
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

// The originals sum squares in fp32 and give zero from 1e18 on.
TEST(NewtonSchulzCpu, LargeEntriesGiveTheDirectionOfSmallOnes) {
  TestLane lane(1);
  reference::Random random(3);
  const Matrix u = Gaussian(64, 96, random);  // of norm 78
  for (const char* preset : kPresetNames) {
    const NewtonSchulzConfig config = FindPreset(preset)->newton_schulz;
    const bool bf16 = config.dtype == DType::kBF16;
    for (const double size : {1e18, 1e30, 1e36, 3e37}) {
      const Matrix large = Combine(size, u, 0, u);
      if (bf16 && size > 1e37) {  // ‖u‖ is infinite in bf16
        EXPECT_EQ(reference::FrobeniusNorm(lane.Orthogonalise(config, large)), 0.0) << preset;
      } else {
        EXPECT_LT(Error(lane, config, large), bf16 ? 0.03 : 0.008) << preset << " " << size;
      }
    }
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
