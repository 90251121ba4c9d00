#include "tests/kernels/reference.h"

#include <cblas.h>

#include <cmath>

namespace dmuond::reference {

Matrix Multiply(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.cols);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(a.rows),
              static_cast<int>(b.cols), static_cast<int>(a.cols), 1.0, a.values.data(),
              static_cast<int>(a.cols), b.values.data(), static_cast<int>(b.cols), 0.0,
              out.values.data(), static_cast<int>(b.cols));
  return out;
}

Matrix Transpose(const Matrix& a) {
  Matrix out(a.cols, a.rows);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) out.at(c, r) = a.at(r, c);
  }
  return out;
}

Matrix Combine(double f, const Matrix& a, double g, const Matrix& b) {
  Matrix out(a.rows, a.cols);
  for (size_t i = 0; i < a.values.size(); ++i) out.values[i] = f * a.values[i] + g * b.values[i];
  return out;
}

double FrobeniusNorm(const Matrix& a) {
  // Scaled by the largest entry: gradients of 1e-200 and 1e200 have norms too.
  double largest = 0;
  for (const double x : a.values) largest = std::max(largest, std::abs(x));
  if (largest == 0) return 0;
  double sum = 0;
  for (const double x : a.values) sum += (x / largest) * (x / largest);
  return largest * std::sqrt(sum);
}

double RelativeDifference(const Matrix& a, const Matrix& b) {
  const double norm = FrobeniusNorm(b);
  const double difference = FrobeniusNorm(Combine(1, a, -1, b));
  return norm == 0 ? difference : difference / norm;
}

double LargestSingularValue(const Matrix& a) {
  const Matrix gram = a.rows <= a.cols ? Multiply(a, Transpose(a)) : Multiply(Transpose(a), a);
  Random random(1);
  Matrix v = Gaussian(gram.rows, 1, random);
  double norm = 0;
  for (int i = 0; i < 300; ++i) {
    v = Multiply(gram, v);
    norm = FrobeniusNorm(v);
    if (norm == 0) return 0;
    for (double& x : v.values) x /= norm;
  }
  return std::sqrt(norm);
}

Matrix NewtonSchulz(const std::vector<std::array<double, 3>>& steps, const Matrix& u,
                    bool schatten4) {
  const double norm = FrobeniusNorm(u);
  if (norm == 0) return u;
  const bool tall = u.rows > u.cols;
  Matrix x = tall ? Transpose(u) : u;
  for (double& value : x.values) value /= norm;
  if (schatten4) {
    const double schatten = std::sqrt(FrobeniusNorm(Multiply(x, Transpose(x))));
    for (double& value : x.values) value /= schatten;
  }
  for (const auto& [a, b, c] : steps) {
    const Matrix gram = Multiply(x, Transpose(x));
    const Matrix polynomial = Combine(b, gram, c, Multiply(gram, gram));
    x = Combine(a, x, 1, Multiply(polynomial, x));
  }
  return tall ? Transpose(x) : x;
}

void MuonStep(const MuonRules& rules, double learning_rate, double momentum, double weight_decay,
              const Matrix& gradient, MuonState& state) {
  Matrix look_ahead;
  if (rules.ema) {
    state.momentum = Combine(momentum, state.momentum, 1 - momentum, gradient);
    look_ahead = Combine(1 - momentum, gradient, momentum, state.momentum);
  } else {
    state.momentum = Combine(momentum, state.momentum, 1, gradient);
    look_ahead = Combine(1, gradient, momentum, state.momentum);
  }
  const Matrix direction =
      NewtonSchulz(rules.steps, rules.nesterov ? look_ahead : state.momentum, rules.schatten4);
  state.weight = Combine(1 - learning_rate * weight_decay, state.weight,
                         -learning_rate * rules.scale(gradient.rows, gradient.cols), direction);
}

void AdamWStep(double learning_rate, double beta1, double beta2, double eps, double weight_decay,
               int64_t t, double gradient, AdamWState& state) {
  state.weight *= 1 - learning_rate * weight_decay;
  state.m = beta1 * state.m + (1 - beta1) * gradient;
  state.v = beta2 * state.v + (1 - beta2) * gradient * gradient;
  const double m_hat = state.m / (1 - std::pow(beta1, static_cast<double>(t)));
  const double v_hat = state.v / (1 - std::pow(beta2, static_cast<double>(t)));
  state.weight -= learning_rate * m_hat / (std::sqrt(v_hat) + eps);
}

Matrix Gaussian(int64_t rows, int64_t cols, Random& random) {
  std::normal_distribution<double> normal;
  Matrix out(rows, cols);
  for (double& value : out.values) value = normal(random);
  return out;
}

namespace {

// Columns made orthonormal by Gram-Schmidt, twice for accuracy.
Matrix OrthonormalColumns(int64_t rows, int64_t cols, Random& random) {
  Matrix q = Transpose(Gaussian(rows, cols, random));  // its rows are the columns to be
  for (int64_t i = 0; i < cols; ++i) {
    double* row = &q.at(i, 0);
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) {
        const double* other = &q.at(j, 0);
        const double dot = cblas_ddot(static_cast<int>(rows), row, 1, other, 1);
        cblas_daxpy(static_cast<int>(rows), -dot, other, 1, row, 1);
      }
    }
    const double norm = cblas_dnrm2(static_cast<int>(rows), row, 1);
    cblas_dscal(static_cast<int>(rows), 1 / norm, row, 1);
  }
  return Transpose(q);
}

}  // namespace

Matrix WithSpectrum(int64_t rows, int64_t cols, const std::vector<double>& sigma, Random& random) {
  const auto rank = static_cast<int64_t>(sigma.size());
  Matrix left = OrthonormalColumns(rows, rank, random);
  const Matrix right = OrthonormalColumns(cols, rank, random);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < rank; ++i) left.at(r, i) *= sigma[static_cast<size_t>(i)];
  }
  return Multiply(left, Transpose(right));
}

}  // namespace dmuond::reference
