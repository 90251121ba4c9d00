#include "kernels/cpu/muon.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/momentum.h"
#include "kernels/cpu/norms.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/weights.h"

namespace dmuond::kernels::cpu {
namespace {

constexpr int64_t kLineFloats = 16;
// Elementwise passes are cut here; the norm adds its parts in this order.
constexpr int64_t kPart = kNormBlock;
// Applying and narrowing share what the first-level cache holds.
constexpr int64_t kApplyChunk = 2048;

int64_t RoundUp(int64_t n) { return (n + kLineFloats - 1) / kLineFloats * kLineFloats; }

struct Layout {
  explicit Layout(const NewtonSchulzProgram& program)
      : elements(program.p * program.q),
        parts((elements + kPart - 1) / kPart),
        x_floats(RoundUp(elements)),
        s_floats(program.p * SymmetricStride(program.p)),
        symmetric_slots(program.symmetric_slots) {}

  [[nodiscard]] int64_t sums_offset() const { return 2 * x_floats + symmetric_slots * s_floats; }
  [[nodiscard]] int64_t floats() const { return sums_offset() + RoundUp(2 * parts); }

  int64_t elements;
  int64_t parts;
  int64_t x_floats;
  int64_t s_floats;
  int64_t symmetric_slots;
};

// True where the original casts to bf16 before it takes the norm.
bool CastsFirst(const NewtonSchulzConfig& config) {
  return (config.norm == NormRule::kPlusEps || config.norm == NormRule::kClampedEps) &&
         config.dtype == DType::kBF16;
}

class MatrixUpdate {
 public:
  MatrixUpdate(const MuonConfig& config, const NewtonSchulzProgram& program,
               const MuonMatrix& matrix, std::byte* workspace, RunParts run)
      : config_(config), program_(program), matrix_(matrix), run_(run), layout_(program) {
    auto* floats = reinterpret_cast<float*>(workspace);
    slots_.data[0] = floats;
    slots_.data[1] = floats + layout_.x_floats;
    for (int64_t i = 0; i < layout_.symmetric_slots; ++i) {
      slots_.data[2 + i] = floats + 2 * layout_.x_floats + i * layout_.s_floats;
    }
    sums_ = reinterpret_cast<double*>(floats + layout_.sums_offset());
  }

  void Run(DType weight_dtype) {
    MomentumPass();
    const double norm = Norm();
    if (norm > 0 && std::isfinite(norm)) {
      Normalise(norm);
      Multiply();
      ApplyPass(weight_dtype, slots_[program_.output]);
    } else {
      // A zero matrix has no direction; the weight only decays.
      ApplyPass(weight_dtype, nullptr);
    }
  }

  // Without a gradient: the state moves to its new slot as it is.
  void PassThrough(DType weight_dtype) {
    if (matrix_.update_squares != nullptr) *matrix_.update_squares = 0;
    ForParts([&](int64_t begin, int64_t length, int64_t) {
      const size_t bytes = static_cast<size_t>(length) * sizeof(float);
      std::memcpy(matrix_.momentum_out + begin, matrix_.momentum_in + begin, bytes);
      std::memcpy(matrix_.master_out + begin, matrix_.master_in + begin, bytes);
      StoreWeight(weight_dtype, begin, length);
    });
  }

 private:
  void Multiply() {
    double schatten = 1;
    for (size_t i = 0; i < program_.products.size(); ++i) {
      Product product = program_.products[i];
      product.alpha *= std::pow(schatten, -product.alpha_power);
      product.beta *= std::pow(schatten, -product.beta_power);
      run_(Panels(program_, product),
           [&](int64_t panel) { RunPanel(program_, product, slots_, panel); });
      if (i == 0 && program_.schatten4) {
        schatten = std::sqrt(program_.gram_scale * NormOf(slots_[product.out]));
      }
    }
  }

  // The Frobenius norm of a symmetric slot. There are no more parts than of the elements.
  double NormOf(const float* symmetric) {
    const int64_t p = program_.p;
    const int64_t rows = (kPart + p - 1) / p;
    const int64_t parts = (p + rows - 1) / rows;
    run_(parts, [&](int64_t index) {
      double sum = 0;
      for (int64_t row = index * rows; row < std::min(p, (index + 1) * rows); ++row) {
        sum += SumOfSquares(symmetric + row * SymmetricStride(p), p);
      }
      sums_[index] = sum;
    });
    return std::sqrt(std::accumulate(sums_, sums_ + parts, 0.0));
  }

  // Calls part(begin, length, index) for each part of the elements.
  template <typename Function>
  void ForParts(Function&& part) {
    run_(layout_.parts, [&](int64_t index) {
      const int64_t begin = index * kPart;
      part(begin, std::min(kPart, layout_.elements - begin), index);
    });
  }

  void MomentumPass() {
    float* u = slots_[Slot::kX0];
    const bool casts_first = CastsFirst(config_.newton_schulz);
    ForParts([&](int64_t begin, int64_t length, int64_t index) {
      UpdateMomentum(config_, *matrix_.scalars, matrix_.gradient + begin,
                     matrix_.momentum_in + begin, matrix_.momentum_out + begin, u + begin, length);
      if (casts_first) RoundInPlace(program_.dtype, u + begin, length);
      sums_[index] = SumOfSquares(u + begin, length);
    });
  }

  [[nodiscard]] double Norm() const { return std::sqrt(SumOfParts()); }
  [[nodiscard]] double SumOfParts() const {
    return std::accumulate(sums_, sums_ + layout_.parts, 0.0);
  }

  void Normalise(double norm) {
    const NewtonSchulzConfig& config = config_.newton_schulz;
    float* x = slots_[Slot::kX0];
    if (CastsFirst(config)) {
      // As the originals do on bf16 tensors: the norm and its sum with eps are bf16 too.
      const float rounded = RoundToBF16(static_cast<float>(norm));
      const auto eps = static_cast<float>(config.eps);
      const float divisor = config.norm == NormRule::kPlusEps ? RoundToBF16(rounded + eps)
                                                              : RoundToBF16(std::max(rounded, eps));
      ForParts([&](int64_t begin, int64_t length, int64_t) {
        DivideAndRound(program_.dtype, divisor, x + begin, length);
      });
      return;
    }
    double divisor = norm;
    if (config.norm == NormRule::kPlusEps) divisor = norm + config.eps;
    if (config.norm == NormRule::kClampedEps) divisor = std::max(norm, config.eps);
    ForParts([&](int64_t begin, int64_t length, int64_t) {
      ScaleAndRound(program_.dtype, program_.input_scale / divisor, x + begin, length);
    });
  }

  void ApplyPass(DType weight_dtype, const float* direction) {
    const UpdateScalars& scalars = *matrix_.scalars;
    const auto decay = static_cast<float>(1.0 - scalars.learning_rate * scalars.weight_decay);
    const int64_t rows = program_.tall ? program_.q : program_.p;
    const int64_t cols = program_.tall ? program_.p : program_.q;
    const double scale = UpdateScale(config_.scale, rows, cols);
    const auto step = static_cast<float>(scalars.learning_rate * scale * program_.output_scale);
    ForParts([&](int64_t begin, int64_t length, int64_t index) {
      double squares = 0;
      for (int64_t i = begin; i < begin + length; i += kApplyChunk) {
        const int64_t n = std::min(kApplyChunk, begin + length - i);
        float* master = matrix_.master_out + i;
        if (direction == nullptr) {
          ApplyDirection(decay, 0.0F, matrix_.master_in + i, matrix_.master_in + i, master, n);
        } else {
          ApplyDirection(decay, step, direction + i, matrix_.master_in + i, master, n);
          if (matrix_.update_squares != nullptr) squares += SumOfSquares(direction + i, n);
        }
        StoreWeight(weight_dtype, i, n);
      }
      sums_[index] = squares;
    });
    if (matrix_.update_squares != nullptr) {
      *matrix_.update_squares = std::pow(scale * program_.output_scale, 2) * SumOfParts();
    }
  }

  void StoreWeight(DType dtype, int64_t begin, int64_t length) {
    StoreWeights(dtype, matrix_.master_out, matrix_.weight_out, begin, length, matrix_.non_finite);
  }

  const MuonConfig& config_;
  const NewtonSchulzProgram& program_;
  const MuonMatrix& matrix_;
  RunParts run_;
  Layout layout_;
  ProductSlots slots_;
  double* sums_ = nullptr;
};

}  // namespace

size_t WorkspaceBytesPerMatrix(const NewtonSchulzProgram& program) {
  return static_cast<size_t>(Layout(program).floats()) * sizeof(float);
}

void UpdateMatrix(const MuonConfig& config, const NewtonSchulzProgram& program, DType weight_dtype,
                  const MuonMatrix& matrix, std::byte* workspace, RunParts run) {
  MatrixUpdate update(config, program, matrix, workspace, run);
  if (matrix.scalars->active != 0) return update.Run(weight_dtype);
  update.PassThrough(weight_dtype);
}

}  // namespace dmuond::kernels::cpu
