// What the kernels should compute, once more, in fp64 and from the formulas (docs/maths.md) alone:
// none of the code under test is used here. Slow and plain on purpose.
#ifndef DMUOND_TESTS_KERNELS_REFERENCE_H_
#define DMUOND_TESTS_KERNELS_REFERENCE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace dmuond::reference {

struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;  // row-major

  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  Matrix(int64_t r, int64_t c, const std::vector<float>& from)
      : rows(r), cols(c), values(from.begin(), from.end()) {}
  double& at(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  [[nodiscard]] double at(int64_t r, int64_t c) const {
    return values[static_cast<size_t>(r * cols + c)];
  }
  [[nodiscard]] std::vector<float> ToFloat() const { return {values.begin(), values.end()}; }
};

[[nodiscard]] Matrix Multiply(const Matrix& a, const Matrix& b);
[[nodiscard]] Matrix Transpose(const Matrix& a);
// f * a + g * b.
[[nodiscard]] Matrix Combine(double f, const Matrix& a, double g, const Matrix& b);
[[nodiscard]] double FrobeniusNorm(const Matrix& a);
// ||a - b|| / ||b||; ||a|| if b is zero.
[[nodiscard]] double RelativeDifference(const Matrix& a, const Matrix& b);
// The largest singular value, by power iteration.
[[nodiscard]] double LargestSingularValue(const Matrix& a);

// ---- Newton-Schulz, the textbook way: X <- a X + b (X X^T) X + c (X X^T)^2 X ----
// `steps` on X = u / ||u||, with the Frobenius norm or, `schatten4`, the Schatten-4 norm; a zero
// matrix stays zero.
[[nodiscard]] Matrix NewtonSchulz(const std::vector<std::array<double, 3>>& steps, const Matrix& u,
                                  bool schatten4 = false);

// ---- One Muon update, docs/maths.md section 1 ----
struct MuonRules {
  bool ema = false;  // else sum
  bool nesterov = true;
  std::vector<std::array<double, 3>> steps;
  bool schatten4 = false;  // else the Frobenius norm
  std::function<double(int64_t rows, int64_t cols)> scale;
};
struct MuonState {
  Matrix weight;
  Matrix momentum;
};
void MuonStep(const MuonRules& rules, double learning_rate, double momentum, double weight_decay,
              const Matrix& gradient, MuonState& state);

// ---- One AdamW update of one element, t counted from 1 ----
struct AdamWState {
  double weight = 0;
  double m = 0;
  double v = 0;
};
void AdamWStep(double learning_rate, double beta1, double beta2, double eps, double weight_decay,
               int64_t t, double gradient, AdamWState& state);

// ---- Test matrices ----
using Random = std::mt19937_64;
[[nodiscard]] Matrix Gaussian(int64_t rows, int64_t cols, Random& random);
// U * diag(sigma) * V^T with random orthonormal U and V; sigma.size() <= min(rows, cols).
[[nodiscard]] Matrix WithSpectrum(int64_t rows, int64_t cols, const std::vector<double>& sigma,
                                  Random& random);

}  // namespace dmuond::reference

#endif  // DMUOND_TESTS_KERNELS_REFERENCE_H_
