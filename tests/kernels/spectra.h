// Matrices whose singular values are hard for Newton-Schulz, for the tests of every device: the
// same on the CPU and on GPUs, without a library.
//
//   spectra::Random random(1);
//   for (const spectra::Shaped& u : spectra::Hard(64, 200, random)) …
//   for (const spectra::Shaped& u : spectra::DemoGradients(random)) …
//
// Each is a diagonal of singular values between two random rotations.
#ifndef DMUOND_TESTS_KERNELS_SPECTRA_H_
#define DMUOND_TESTS_KERNELS_SPECTRA_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace dmuond::spectra {

using Random = std::mt19937_64;

struct Shaped {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;  // row-major

  [[nodiscard]] std::vector<float> ToFloat() const { return {values.begin(), values.end()}; }
};

// Multiplies by a random orthogonal matrix along one side, whose elements lie `stride` apart and
// number `size`; the other side has `others` elements, `other_stride` apart. The matrix is a
// product of layers of plane rotations by random angles, each layer over a random pairing of all
// indices: exact to fp64's rounding, and after 2 * log2(size) layers each element depends on all.
inline void RotateSide(std::vector<double>& values, int64_t size, int64_t stride, int64_t others,
                       int64_t other_stride, Random& random) {
  std::uniform_real_distribution<double> angle(0, 2 * std::numbers::pi);
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t reach = 1; reach < size * size; reach *= 2) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t pair = 0; pair + 1 < order.size(); pair += 2) {
      const double turn = angle(random);
      const double c = std::cos(turn);
      const double s = std::sin(turn);
      double* a = values.data() + order[pair] * stride;
      double* b = values.data() + order[pair + 1] * stride;
      for (int64_t i = 0; i < others; ++i, a += other_stride, b += other_stride) {
        const double old = *a;
        *a = c * old - s * *b;
        *b = s * old + c * *b;
      }
    }
  }
}

// `sigma` has at most min(rows, cols) values; the others are zero.
inline Shaped Rotated(std::string name, int64_t rows, int64_t cols,
                      const std::vector<double>& sigma, Random& random) {
  Shaped u{std::move(name), rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
  for (size_t i = 0; i < sigma.size(); ++i) u.values[i * static_cast<size_t>(cols + 1)] = sigma[i];
  RotateSide(u.values, rows, cols, cols, 1, random);
  RotateSide(u.values, cols, 1, rows, cols, random);
  return u;
}

// Evenly on a logarithmic scale from 1 to 1e-9.
inline std::vector<double> LogSpaced(int64_t p) {
  std::vector<double> sigma;
  for (int64_t i = 0; i < p; ++i) {
    sigma.push_back(std::pow(
        10, -9.0 * static_cast<double>(i) / static_cast<double>(std::max<int64_t>(1, p - 1))));
  }
  return sigma;
}

// Two directions far above all others, as of a few frequent tokens.
inline std::vector<double> TwoSpikes(int64_t p) {
  std::vector<double> sigma(static_cast<size_t>(p), 1e-3);
  sigma[0] = 1;
  if (p > 1) sigma[1] = 0.7;
  return sigma;
}

// |t| of Student's distribution with 1.5 degrees of freedom: no variance.
inline std::vector<double> HeavyTailed(int64_t p, Random& random) {
  std::student_t_distribution<double> heavy(1.5);
  std::vector<double> sigma;
  for (int64_t i = 0; i < p; ++i) sigma.push_back(std::abs(heavy(random)));
  return sigma;
}

// From 1 to exp(-20).
inline std::vector<double> Exponential(int64_t p) {
  std::vector<double> sigma;
  for (int64_t i = 0; i < p; ++i) {
    sigma.push_back(std::exp(-20.0 * static_cast<double>(i) / static_cast<double>(p)));
  }
  return sigma;
}

inline std::vector<double> PowerLaw(int64_t p) {
  std::vector<double> sigma;
  for (int64_t i = 0; i < p; ++i) sigma.push_back(1.0 / static_cast<double>(i + 1));
  return sigma;
}

inline std::vector<double> Uniform(int64_t p, Random& random) {
  std::uniform_real_distribution<double> uniform(0.01, 1.0);
  std::vector<double> sigma;
  for (int64_t i = 0; i < p; ++i) sigma.push_back(uniform(random));
  return sigma;
}

inline std::vector<Shaped> Hard(int64_t rows, int64_t cols, Random& random) {
  const int64_t p = std::min(rows, cols);
  std::vector<Shaped> all;
  all.push_back(Rotated("uniform", rows, cols, Uniform(p, random), random));
  all.push_back(Rotated("power law", rows, cols, PowerLaw(p), random));
  all.push_back(Rotated("exponential", rows, cols, Exponential(p), random));
  all.push_back(Rotated("log-spaced to 1e-9", rows, cols, LogSpaced(p), random));
  all.push_back(Rotated("two spikes", rows, cols, TwoSpikes(p), random));
  all.push_back(Rotated("heavy-tailed", rows, cols, HeavyTailed(p, random), random));
  if (p == 1) return all;  // half of it is nothing
  all.push_back(Rotated("half zero", rows, cols, Uniform(p / 2, random), random));
  return all;
}

struct Recorded {
  const char* name;
  int64_t rows;
  int64_t cols;
  std::vector<double> sigma;
};

// Singular values of gradients of the demo's model (client/python/src/dmuond/demo/model.py).
inline const std::vector<Recorded>& RecordedGradients() {
  static const std::vector<Recorded> recorded = {
#include "tests/kernels/demo_gradients.inc"
  };
  return recorded;
}

// The same of what Newton-Schulz is given in a run of that model under Muon: a look-ahead of
// momentum 0.95.
inline const std::vector<Recorded>& RecordedMomenta() {
  static const std::vector<Recorded> recorded = {
#include "tests/kernels/demo_momenta.inc"
  };
  return recorded;
}

// The gradients, rotated at random: which is what a random rotation of the gradient itself would
// be.
inline std::vector<Shaped> DemoGradients(Random& random) {
  std::vector<Shaped> all;
  for (const Recorded& one : RecordedGradients()) {
    all.push_back(Rotated(one.name, one.rows, one.cols, one.sigma, random));
  }
  return all;
}

}  // namespace dmuond::spectra

#endif  // DMUOND_TESTS_KERNELS_SPECTRA_H_
