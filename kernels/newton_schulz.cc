#include "kernels/newton_schulz.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace dmuond::kernels {
namespace {

// Singular values of a normalised X lie in [0, 1]; rounding may carry one a little beyond.
constexpr double kSigmaMax = 1.01;
constexpr int kSamples = 4096;
// Stored fp16 entries stay below 2^12, a factor of sixteen under the largest number: room for what
// rounding adds to the bound.
constexpr int kTopExponent = 12;
constexpr int kInputExponentMax = 15;
// Beyond this the polynomials do not contract anything.
constexpr double kBoundMax = 1e6;

// A matrix of the program as a function of the singular values of the input, sampled: what its
// eigenvalues (or singular values) can be.
using Spectrum = std::vector<double>;

double Bound(const Spectrum& spectrum) {
  double bound = 0;
  for (const double value : spectrum) bound = std::max(bound, std::abs(value));
  return bound;
}

// A stored matrix: its place, its exponent and its spectrum.
struct Stored {
  Slot slot = Slot::kNone;
  int exponent = 0;
  Spectrum spectrum;
  int norm_power = 0;  // of the Schatten-4 norm that the matrix has not been divided by yet
};

class Builder {
 public:
  Builder(const NewtonSchulzConfig& config, NewtonSchulzProgram& program)
      : config_(config), program_(program) {}

  absl::Status Build() {
    x_.slot = Slot::kX0;
    x_.exponent = InputExponent();
    for (int i = 0; i <= kSamples; ++i) x_.spectrum.push_back(kSigmaMax * i / kSamples);
    program_.schatten4 = config_.norm == NormRule::kSchatten4;
    x_.norm_power = program_.schatten4 ? 1 : 0;
    program_.input_scale = std::ldexp(1.0, x_.exponent);
    absl::Status status = config_.form == NewtonSchulzForm::kStandard ? Standard() : Gram();
    program_.output = x_.slot;
    program_.output_scale = std::ldexp(1.0, -x_.exponent);
    return status;
  }

 private:
  absl::Status Standard() {
    for (const auto& [a, b, c] : config_.coefficients) {
      Stored gram = StoreGram();
      Stored sum = StoreSquare(gram, b, c);
      ApplyToX(sum, a);
      Free(gram);
      Free(sum);
      RETURN_IF_ERROR(CheckBounded());
    }
    return absl::OkStatus();
  }

  absl::Status Gram() {
    const int steps = static_cast<int>(config_.coefficients.size());
    Stored r = StoreGram();
    Stored q;
    double shift = 0;  // Q = q + shift * I, until a product has taken it in
    for (int i = 0; i < steps; ++i) {
      const auto [a, b, c] = config_.coefficients[i];
      if (Restarts(i)) {
        ApplyToX(q, shift);
        Free(std::exchange(q, Stored{}));
        Free(r);
        r = StoreGram();
      }
      Stored z = StoreSquare(r, b, c);
      const bool first = q.slot == Slot::kNone;
      if (first) {
        q = z;
        shift = a;
      } else {
        // (q + shift * I) * (z + a * I), only q and z being matrices in memory.
        Stored next = shift == 0 ? StoreProduct(q, z, {{a, &q}}, 0)
                                 : StoreProduct(q, z, {{shift, &z}, {a, &q}}, a * shift);
        Free(q);
        q = std::move(next);
        shift = 0;
      }
      if (i + 1 < steps && !Restarts(i + 1)) {
        Stored v = StoreProduct(r, z, {{a, &r}}, 0);
        Free(r);
        r = StoreProduct(z, v, {{a, &v}}, 0);
        Free(v);
      }
      if (!first) Free(z);
      if (Bound(q.spectrum) > kBoundMax || Bound(r.spectrum) > kBoundMax) return Diverges();
    }
    ApplyToX(q, shift);
    return CheckBounded();
  }

  [[nodiscard]] bool Restarts(int step) const {
    const bool near_square =
        4 * program_.q <= 5 * program_.p && !config_.restarts_near_square.empty();
    if (near_square && program_.p == program_.q) return step > 0;
    const std::vector<int>& restarts =
        near_square ? config_.restarts_near_square : config_.restarts;
    return std::find(restarts.begin(), restarts.end(), step) != restarts.end();
  }

  absl::Status CheckBounded() const {
    return Bound(x_.spectrum) <= kBoundMax ? absl::OkStatus() : Diverges();
  }
  static absl::Status Diverges() {
    return absl::InvalidArgumentError(
        "Newton-Schulz coefficients diverge for singular values in [0, 1]");
  }

  // Root mean square one: the largest possible entry is then sqrt(p*q).
  [[nodiscard]] int InputExponent() const {
    if (program_.dtype != DType::kF16) return 0;
    const double elements = static_cast<double>(program_.p) * static_cast<double>(program_.q);
    return std::min(kInputExponentMax, static_cast<int>(std::lround(std::log2(elements) / 2)));
  }

  [[nodiscard]] int ExponentFor(const Spectrum& spectrum) const {
    if (program_.dtype != DType::kF16) return 0;
    const double bound = Bound(spectrum);
    return bound > 0 ? kTopExponent - static_cast<int>(std::ceil(std::log2(bound))) : 0;
  }

  Stored NewSymmetric(Spectrum spectrum) {
    const auto free = std::find(used_.begin(), used_.end(), false);
    const auto index = static_cast<int>(free - used_.begin());  // < 4: the programs need no more
    *free = true;
    program_.symmetric_slots = std::max(program_.symmetric_slots, index + 1);
    const int exponent = ExponentFor(spectrum);
    return {static_cast<Slot>(static_cast<int>(Slot::kS0) + index), exponent, std::move(spectrum)};
  }

  void Free(const Stored& stored) {
    if (stored.slot == Slot::kNone) return;
    used_[static_cast<int>(stored.slot) - static_cast<int>(Slot::kS0)] = false;
  }

  Stored StoreGram() {
    Spectrum squares = x_.spectrum;
    for (double& value : squares) value *= value;
    Stored out = NewSymmetric(std::move(squares));
    out.norm_power = 2 * x_.norm_power;
    if (x_is_input_) program_.gram_scale = std::ldexp(1.0, -out.exponent);
    program_.products.push_back({.kind = ProductKind::kGram,
                                 .out = out.slot,
                                 .a = x_.slot,
                                 .alpha = std::ldexp(1.0, out.exponent - 2 * x_.exponent),
                                 .input_power = x_is_input_ ? 2 : 0});
    return out;
  }

  // b * m + c * m * m.
  Stored StoreSquare(const Stored& m, double b, double c) {
    Spectrum spectrum = m.spectrum;
    for (double& value : spectrum) value = b * value + c * value * value;
    Stored out = NewSymmetric(std::move(spectrum));
    program_.products.push_back({.kind = ProductKind::kSymmetric,
                                 .out = out.slot,
                                 .a = m.slot,
                                 .b = m.slot,
                                 .add = m.slot,
                                 .alpha = std::ldexp(c, out.exponent - 2 * m.exponent),
                                 .beta = std::ldexp(b, out.exponent - m.exponent),
                                 .alpha_power = 2 * m.norm_power,
                                 .beta_power = m.norm_power});
    return out;
  }

  struct Term {
    double factor;
    const Stored* matrix;
  };
  // left * right + terms (one or two) + diagonal * I. A second term has been divided by all norms.
  Stored StoreProduct(const Stored& left, const Stored& right, const std::vector<Term>& terms,
                      double diagonal) {
    Spectrum spectrum(left.spectrum.size());
    for (size_t i = 0; i < spectrum.size(); ++i) {
      spectrum[i] = left.spectrum[i] * right.spectrum[i] + diagonal;
      for (const Term& term : terms) spectrum[i] += term.factor * term.matrix->spectrum[i];
    }
    Stored out = NewSymmetric(std::move(spectrum));
    Product product{.kind = ProductKind::kSymmetric,
                    .out = out.slot,
                    .a = left.slot,
                    .b = right.slot,
                    .alpha = std::ldexp(1.0, out.exponent - left.exponent - right.exponent),
                    .diagonal = std::ldexp(diagonal, out.exponent),
                    .alpha_power = left.norm_power + right.norm_power,
                    .beta_power = terms[0].matrix->norm_power};
    product.add = terms[0].matrix->slot;
    product.beta = std::ldexp(terms[0].factor, out.exponent - terms[0].matrix->exponent);
    if (terms.size() > 1) {
      product.add2 = terms[1].matrix->slot;
      product.gamma = std::ldexp(terms[1].factor, out.exponent - terms[1].matrix->exponent);
    }
    program_.products.push_back(product);
    return out;
  }

  // X <- (m + shift * I) * X.
  void ApplyToX(const Stored& m, double shift) {
    Stored out;
    out.slot = x_.slot == Slot::kX0 ? Slot::kX1 : Slot::kX0;
    out.spectrum = x_.spectrum;
    for (size_t i = 0; i < out.spectrum.size(); ++i) out.spectrum[i] *= m.spectrum[i] + shift;
    out.exponent = ExponentFor(out.spectrum);
    program_.products.push_back({.kind = ProductKind::kApply,
                                 .out = out.slot,
                                 .a = m.slot,
                                 .b = x_.slot,
                                 .alpha = std::ldexp(1.0, out.exponent - m.exponent - x_.exponent),
                                 .beta = std::ldexp(shift, out.exponent - x_.exponent),
                                 .input_power = x_is_input_ ? 1 : 0,
                                 .alpha_power = x_.norm_power,
                                 .beta_power = x_.norm_power});
    x_ = std::move(out);
    x_is_input_ = false;
  }

  const NewtonSchulzConfig& config_;
  NewtonSchulzProgram& program_;
  Stored x_;
  bool x_is_input_ = true;
  std::array<bool, 4> used_{};
};

absl::Status Check(const NewtonSchulzConfig& config, int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a matrix of ", rows, " x ", cols, " cannot be orthogonalised"));
  }
  if (config.coefficients.empty()) {
    return absl::InvalidArgumentError("Newton-Schulz has no coefficients");
  }
  for (const auto& step : config.coefficients) {
    if (!std::all_of(step.begin(), step.end(), [](double x) { return std::isfinite(x); })) {
      return absl::InvalidArgumentError("a Newton-Schulz coefficient is not finite");
    }
  }
  const int steps = static_cast<int>(config.coefficients.size());
  for (size_t i = 0; i < config.restarts.size(); ++i) {
    const int previous = i == 0 ? 0 : config.restarts[i - 1];
    if (config.restarts[i] <= previous || config.restarts[i] >= steps) {
      return absl::InvalidArgumentError(absl::StrCat(
          "ns_restarts=", absl::StrJoin(config.restarts, ","), ": restarts come before steps 1 to ",
          steps - 1, " of the ", steps, " (the first is step 0), in increasing order"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<NewtonSchulzProgram> BuildNewtonSchulz(const NewtonSchulzConfig& config,
                                                      int64_t rows, int64_t cols) {
  RETURN_IF_ERROR(Check(config, rows, cols));
  NewtonSchulzProgram program;
  program.p = std::min(rows, cols);
  program.q = std::max(rows, cols);
  program.tall = rows > cols;
  program.dtype = config.dtype;
  RETURN_IF_ERROR(Builder(config, program).Build());
  return program;
}

std::vector<bool> NeededInLowerForm(const NewtonSchulzProgram& program,
                                    const std::vector<bool>& reads_lower) {
  const std::vector<Product>& products = program.products;
  std::vector<bool> needed(products.size());
  for (size_t i = 0; i < products.size(); ++i) {
    needed[i] = products[i].kind != ProductKind::kApply;
    for (size_t j = i + 1; j < products.size(); ++j) {
      const bool multiplies = products[j].a == products[i].out || products[j].b == products[i].out;
      if (multiplies && !reads_lower[j]) needed[i] = false;
      if (products[j].out == products[i].out) break;
    }
  }
  return needed;
}

absl::StatusOr<const NewtonSchulzProgram*> NewtonSchulzPrograms::Find(
    int64_t rows, int64_t cols, const NewtonSchulzConfig& config) {
  for (const Known& known : known_) {
    if (known.rows == rows && known.cols == cols && known.config == config) {
      return known.program.get();
    }
  }
  ASSIGN_OR_RETURN(NewtonSchulzProgram program, BuildNewtonSchulz(config, rows, cols));
  known_.push_back(
      {rows, cols, config, std::make_unique<const NewtonSchulzProgram>(std::move(program))});
  return known_.back().program.get();
}

}  // namespace dmuond::kernels
