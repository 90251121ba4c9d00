// The program alone, run in fp64: whatever the device rounds, the list of products must be the
// polynomial.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "kernels/newton_schulz.h"
#include "kernels/presets.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels {
namespace {

using reference::Combine;
using reference::Matrix;
using reference::Multiply;
using reference::Transpose;

// Runs a program on X0 = u * input_scale / ||u|| without any rounding. Checks on the way that every
// operand has been written and that no product writes into its own operand.
class Interpreter {
 public:
  explicit Interpreter(const NewtonSchulzProgram& program) : program_(program) {}

  Matrix Run(const Matrix& u) {
    const Matrix x = program_.tall ? Transpose(u) : u;
    slots_[Slot::kX0] = Combine(program_.input_scale / reference::FrobeniusNorm(u), x, 0, x);
    double schatten = 1;
    for (size_t i = 0; i < program_.products.size(); ++i) {
      Product product = program_.products[i];
      product.alpha *= std::pow(schatten, -product.alpha_power);
      product.beta *= std::pow(schatten, -product.beta_power);
      Step(product);
      if (i == 0 && program_.schatten4) {
        schatten = std::sqrt(program_.gram_scale * reference::FrobeniusNorm(Get(product.out)));
      }
    }
    const Matrix& out = Get(program_.output);
    const Matrix scaled = Combine(program_.output_scale, out, 0, out);
    return program_.tall ? Transpose(scaled) : scaled;
  }
  [[nodiscard]] double largest_entry() const { return largest_entry_; }
  [[nodiscard]] double smallest_largest_entry() const { return smallest_largest_entry_; }

 private:
  const Matrix& Get(Slot slot) {
    EXPECT_TRUE(slots_.contains(slot)) << "slot " << static_cast<int>(slot) << " was not written";
    return slots_[slot];
  }

  void Step(const Product& p) {
    for (const Slot operand : {p.a, p.b, p.add, p.add2}) EXPECT_NE(operand, p.out);
    Matrix out;
    if (p.kind == ProductKind::kGram) {
      const Matrix product = Multiply(Get(p.a), Transpose(Get(p.a)));
      out = Combine(p.alpha, product, 0, product);
    } else if (p.kind == ProductKind::kApply) {
      out = Combine(p.alpha, Multiply(Get(p.a), Get(p.b)), p.beta, Get(p.b));
    } else {
      out = Multiply(Get(p.a), Get(p.b));
      out = Combine(p.alpha, out, 0, out);
      if (p.add != Slot::kNone) out = Combine(1, out, p.beta, Get(p.add));
      if (p.add2 != Slot::kNone) out = Combine(1, out, p.gamma, Get(p.add2));
      for (int64_t i = 0; i < out.rows; ++i) out.at(i, i) += p.diagonal;
    }
    double largest = 0;
    for (const double x : out.values) largest = std::max(largest, std::abs(x));
    largest_entry_ = std::max(largest_entry_, largest);
    smallest_largest_entry_ = std::min(smallest_largest_entry_, largest);
    slots_[p.out] = std::move(out);
  }

  const NewtonSchulzProgram& program_;
  std::map<Slot, Matrix> slots_;
  double largest_entry_ = 0;
  double smallest_largest_entry_ = HUGE_VAL;
};

struct Case {
  NewtonSchulzForm form;
  std::vector<int> restarts;
  Coefficients coefficients;
};

std::vector<Case> Cases() {
  const Coefficients polar = PolarExpressCoefficients(1.05);
  const Coefficients you = {{4.0848, -6.8946, 2.9270},  // by You Jiacheng
                            {3.9505, -6.3029, 2.6377},
                            {3.7418, -5.5913, 2.3037},
                            {2.8769, -3.1427, 1.2046},
                            {2.8366, -3.0525, 1.2012}};
  return {{NewtonSchulzForm::kStandard, {}, JordanCoefficients(5)},
          {NewtonSchulzForm::kStandard, {}, polar},
          {NewtonSchulzForm::kStandard, {}, JordanCoefficients(1)},
          {NewtonSchulzForm::kGram, {2}, polar},
          {NewtonSchulzForm::kGram, {3}, polar},
          {NewtonSchulzForm::kGram, {3}, you},
          {NewtonSchulzForm::kGram, {1, 2, 3, 4}, polar},
          {NewtonSchulzForm::kGram, {2, 4}, JordanCoefficients(6)},
          {NewtonSchulzForm::kGram, {}, JordanCoefficients(5)},
          {NewtonSchulzForm::kGram, {}, JordanCoefficients(1)},
          {NewtonSchulzForm::kGram, {1}, JordanCoefficients(2)}};
}

TEST(NewtonSchulzProgram, IsThePolynomialInEveryFormShapeAndDtype) {
  reference::Random random(7);
  for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{
           {24, 24}, {24, 40}, {40, 24}, {1, 30}, {30, 1}, {1, 1}, {9, 200}}) {
    const Matrix u = reference::Gaussian(rows, cols, random);
    for (const Case& c : Cases()) {
      for (const NormRule norm : {NormRule::kExact, NormRule::kSchatten4}) {
        const bool schatten4 = norm == NormRule::kSchatten4;
        const Matrix expected = reference::NewtonSchulz(c.coefficients, u, schatten4);
        for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          const auto program = BuildNewtonSchulz({.form = c.form,
                                                  .coefficients = c.coefficients,
                                                  .restarts = c.restarts,
                                                  .dtype = dtype,
                                                  .norm = norm},
                                                 rows, cols);
          ASSERT_TRUE(program.ok()) << program.status();
          EXPECT_EQ(program->tall, rows > cols);
          EXPECT_EQ(program->schatten4, schatten4);
          EXPECT_LT(reference::RelativeDifference(Interpreter(*program).Run(u), expected), 1e-11)
              << rows << "x" << cols << " steps " << c.coefficients.size();
        }
      }
    }
  }
}

TEST(NewtonSchulzProgram, HalfPrecisionStoresKeepFarFromBothEndsOfTheRange) {
  reference::Random random(8);
  const auto preset = *FindPreset("dmuon");
  NewtonSchulzConfig schatten4 = preset.newton_schulz;
  schatten4.norm = NormRule::kSchatten4;
  for (const auto& u :
       {reference::Gaussian(96, 160, random), reference::WithSpectrum(96, 160, {1.0}, random),
        reference::WithSpectrum(96, 160, std::vector<double>(96, 1.0), random)}) {
    for (const NewtonSchulzConfig& config : {preset.newton_schulz, schatten4}) {
      const auto program = BuildNewtonSchulz(config, 96, 160);
      ASSERT_TRUE(program.ok());
      Interpreter interpreter(*program);
      interpreter.Run(u);
      EXPECT_LT(interpreter.largest_entry(), 65504.0 / 8);
      // Numbers down to 2^-14 have full precision: at least 2^13 below the largest.
      EXPECT_GT(interpreter.smallest_largest_entry(), 0.5);
    }
  }
}

TEST(NewtonSchulzProgram, NobodyMultipliesMoreThanIsStored) {
  for (const Case& c : Cases()) {
    for (const int cols : {24, 40}) {
      const auto program = *BuildNewtonSchulz(
          {.form = c.form, .coefficients = c.coefficients, .restarts = c.restarts}, 24, cols);
      const std::vector<Product>& products = program.products;
      // A device whose symmetric products read the lower form: all, none, and every other one.
      for (const size_t every : {1, 1000, 2}) {
        std::vector<bool> reads_lower;
        for (size_t i = 0; i < products.size(); ++i) {
          reads_lower.push_back(products[i].kind == ProductKind::kSymmetric && i % every == 0);
        }
        const std::vector<bool> needed = NeededInLowerForm(program, reads_lower);
        ASSERT_EQ(needed.size(), products.size());
        std::map<Slot, bool> lower_alone;
        for (size_t i = 0; i < products.size(); ++i) {
          for (const Slot operand : {products[i].a, products[i].b}) {
            EXPECT_TRUE(!lower_alone[operand] || reads_lower[i]) << "product " << i;
          }
          lower_alone[products[i].out] = needed[i];
          EXPECT_FALSE(needed[i] && products[i].kind == ProductKind::kApply);
        }
        // What only symmetric products multiply is not stored in full for nothing.
        if (every == 1 && program.products.size() > 3) {
          EXPECT_NE(std::count(needed.begin(), needed.end(), true), 0);
        }
      }
    }
  }
}

TEST(NewtonSchulzProgram, TellsWhereTheNormOfTheInputEnters) {
  const auto program = *BuildNewtonSchulz(FindPreset("dmuon")->newton_schulz, 32, 64);
  // A device that casts without dividing by the norm: here of norm 3.
  NewtonSchulzProgram scaled = program;
  for (Product& product : scaled.products) {
    const double factor = std::pow(3.0, -product.input_power);
    product.alpha *= factor;
    product.beta *= factor;
  }
  scaled.input_scale *= 3;
  reference::Random random(9);
  const Matrix u = reference::Gaussian(32, 64, random);
  EXPECT_LT(reference::RelativeDifference(Interpreter(scaled).Run(u), Interpreter(program).Run(u)),
            1e-12);
}

TEST(NewtonSchulzProgram, CostsWhatTheFormulasSay) {
  // docs/maths.md section 3: Gram, one restart, symmetric kernels: (6 alpha + 14) p^3.
  const auto gram = *BuildNewtonSchulz(FindPreset("dmuon")->newton_schulz, 64, 128);
  const auto standard = *BuildNewtonSchulz(FindPreset("torch")->newton_schulz, 64, 128);
  const auto flops = [](const NewtonSchulzProgram& program) {
    double sum = 0;  // in p^3; alpha = 2
    for (const Product& product : program.products) {
      sum += product.kind == ProductKind::kSymmetric ? 1
             : product.kind == ProductKind::kGram    ? 2
                                                     : 4;
    }
    return sum;
  };
  EXPECT_EQ(flops(gram), 6 * 2 + 14);
  EXPECT_EQ(flops(standard), 15 * 2 + 5);
}

TEST(NewtonSchulzProgram, SquareMatricesOfDmuonAreInStandardForm) {
  const auto kinds = [](const NewtonSchulzConfig& config, int64_t rows, int64_t cols) {
    std::vector<ProductKind> kinds;
    const NewtonSchulzProgram program = *BuildNewtonSchulz(config, rows, cols);
    for (const Product& product : program.products) kinds.push_back(product.kind);
    return kinds;
  };
  const NewtonSchulzConfig gram = FindPreset("dmuon")->newton_schulz;
  NewtonSchulzConfig standard = gram;
  standard.form = NewtonSchulzForm::kStandard;
  EXPECT_EQ(kinds(gram, 64, 64), kinds(standard, 64, 64));
  EXPECT_NE(kinds(gram, 64, 65), kinds(standard, 64, 65));
  NewtonSchulzConfig own_restarts = gram;
  own_restarts.restarts_near_square.clear();
  EXPECT_NE(kinds(own_restarts, 64, 64), kinds(standard, 64, 64));
}

TEST(NewtonSchulzProgram, NonsenseIsRefused) {
  const auto code = [](const NewtonSchulzConfig& config, int64_t rows = 8, int64_t cols = 8) {
    return BuildNewtonSchulz(config, rows, cols).status().code();
  };
  const Coefficients jordan = JordanCoefficients(5);
  const auto bad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code({.coefficients = {}}), bad);
  EXPECT_EQ(code({.coefficients = jordan}, 0, 8), bad);
  EXPECT_EQ(code({.coefficients = {{NAN, 0, 0}}}), bad);
  EXPECT_EQ(code({.coefficients = {{1e9, 0, 0}}}), bad);
  EXPECT_EQ(code({.coefficients = JordanCoefficients(60), .restarts = {60}}), bad);
  EXPECT_EQ(code({.coefficients = jordan, .restarts = {0}}), bad);
  EXPECT_EQ(code({.coefficients = jordan, .restarts = {3, 2}}), bad);
  EXPECT_EQ(code({.coefficients = std::vector<std::array<double, 3>>(9, {9.0, 1.0, 1.0})}), bad);
  EXPECT_EQ(code({.coefficients = jordan, .restarts = {4}}), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace dmuond::kernels
