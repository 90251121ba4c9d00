#include "kernels/cpu/products.h"

#include <cblas.h>

#include <algorithm>

#include "kernels/cpu/epilogue.h"

namespace dmuond::kernels::cpu {
namespace {

// Columns of a symmetric result per panel. Wider panels make better sgemm calls; narrower ones let
// threads that share a small matrix end together.
int64_t PanelWidth(int64_t p) { return p < 1536 ? 128 : 256; }
// Columns of its diagonal block that are computed together; what lies above the diagonal in there
// is computed for nothing.
constexpr int64_t kDiagonalBlock = 128;
// Rows that are finished (added to, rounded, mirrored) while they are in the cache.
constexpr int64_t kMirrorRows = 32;
// Width of X that one call of OpenBLAS takes: it packs the p x p factor once for each.
constexpr int64_t kApplyWidth = 1024;
constexpr int64_t kApplyWidthMin = 384;

int Blas(int64_t n) { return static_cast<int>(n); }

int64_t ApplyPanels(int64_t q) {
  const int64_t by_width = (q + kApplyWidth - 1) / kApplyWidth;
  return std::max<int64_t>({1, by_width, std::min<int64_t>(2, q / kApplyWidthMin)});
}

// One panel of a symmetric result: columns [begin, end) from the diagonal down.
struct SymmetricPanel {
  const NewtonSchulzProgram& program;
  const Product& product;
  const ProductSlots& slots;
  int64_t begin;
  int64_t end;

  [[nodiscard]] int64_t p() const { return program.p; }
  [[nodiscard]] int64_t stride() const { return SymmetricStride(program.p); }
  [[nodiscard]] float* out(int64_t row, int64_t col) const {
    return slots[product.out] + row * stride() + col;
  }

  void Multiply() const;
  void Finish() const;

 private:
  void GramBlock(int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) const;
  void Block(int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) const;
  void GramDiagonal() const;
};

// Rows [row_begin, row_end) times columns [col_begin, col_end) of alpha * X * X^T.
void SymmetricPanel::GramBlock(int64_t row_begin, int64_t row_end, int64_t col_begin,
                               int64_t col_end) const {
  const float* x = slots[product.a];
  const auto alpha = static_cast<float>(product.alpha);
  if (program.tall) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, Blas(row_end - row_begin),
                Blas(col_end - col_begin), Blas(program.q), alpha, x + row_begin, Blas(p()),
                x + col_begin, Blas(p()), 0.0F, out(row_begin, col_begin), Blas(stride()));
  } else {
    const int64_t q = program.q;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, Blas(row_end - row_begin),
                Blas(col_end - col_begin), Blas(q), alpha, x + row_begin * q, Blas(q),
                x + col_begin * q, Blas(q), 0.0F, out(row_begin, col_begin), Blas(stride()));
  }
}

void SymmetricPanel::GramDiagonal() const {
  const float* x = slots[product.a];
  const auto alpha = static_cast<float>(product.alpha);
  if (program.tall) {
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, Blas(end - begin), Blas(program.q), alpha,
                x + begin, Blas(p()), 0.0F, out(begin, begin), Blas(stride()));
  } else {
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasNoTrans, Blas(end - begin), Blas(program.q), alpha,
                x + begin * program.q, Blas(program.q), 0.0F, out(begin, begin), Blas(stride()));
  }
}

// The same block of alpha * a * b, both symmetric.
void SymmetricPanel::Block(int64_t row_begin, int64_t row_end, int64_t col_begin,
                           int64_t col_end) const {
  const int64_t ld = stride();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, Blas(row_end - row_begin),
              Blas(col_end - col_begin), Blas(p()), static_cast<float>(product.alpha),
              slots[product.a] + row_begin * ld, Blas(ld), slots[product.b] + col_begin, Blas(ld),
              0.0F, out(row_begin, col_begin), Blas(ld));
}

void SymmetricPanel::Multiply() const {
  if (product.kind == ProductKind::kGram) {
    GramDiagonal();
    if (end < p()) GramBlock(end, p(), begin, end);
    return;
  }
  for (int64_t col = begin; col < end; col += kDiagonalBlock) {
    Block(col, end, col, std::min(end, col + kDiagonalBlock));
  }
  if (end < p()) Block(end, p(), begin, end);
}

void SymmetricPanel::Finish() const {
  const float* add = product.add == Slot::kNone ? nullptr : slots[product.add];
  const float* add2 = product.add2 == Slot::kNone ? nullptr : slots[product.add2];
  for (int64_t first = begin; first < p(); first += kMirrorRows) {
    const int64_t last = std::min(p(), first + kMirrorRows);
    for (int64_t row = first; row < last; ++row) {
      const int64_t length = std::min(end, row + 1) - begin;
      const int64_t offset = row * stride() + begin;
      float* values = out(row, begin);
      if (add != nullptr) {
        AddScaled(add + offset, static_cast<float>(product.beta), values, length);
      }
      if (add2 != nullptr) {
        AddScaled(add2 + offset, static_cast<float>(product.gamma), values, length);
      }
      if (row < end) values[length - 1] += static_cast<float>(product.diagonal);
      RoundInPlace(program.dtype, values, length);
    }
    // Left of the rows' own diagonal square everything is below the diagonal.
    const int64_t full = std::min(end, first) - begin;
    if (full > 0) Transpose(out(first, begin), out(begin, first), stride(), last - first, full);
    for (int64_t row = first; row < std::min(last, end); ++row) {
      for (int64_t col = first; col < row; ++col) *out(col, row) = *out(row, col);
    }
  }
}

void RunApplyPanel(const NewtonSchulzProgram& program, const Product& product,
                   const ProductSlots& slots, int64_t panel) {
  const int64_t p = program.p;
  const int64_t q = program.q;
  const int64_t panels = ApplyPanels(q);
  const int64_t begin = q * panel / panels;
  const int64_t width = q * (panel + 1) / panels - begin;
  const auto alpha = static_cast<float>(product.alpha);
  const auto beta = static_cast<float>(product.beta);
  const float* a = slots[product.a];
  const int64_t ld = SymmetricStride(p);
  // tall: X^T lies in memory, q x p, and (A*X)^T = X^T * A for symmetric A.
  const int64_t offset = program.tall ? begin * p : begin;
  const float* x = slots[product.b] + offset;
  float* out = slots[product.out] + offset;
  if (program.tall) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, Blas(width), Blas(p), Blas(p), alpha, x,
                Blas(p), a, Blas(ld), 0.0F, out, Blas(p));
    AddScaled(x, beta, out, width * p);
    RoundInPlace(program.dtype, out, width * p);
    return;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, Blas(p), Blas(width), Blas(p), alpha, a,
              Blas(ld), x, Blas(q), 0.0F, out, Blas(q));
  for (int64_t row = 0; row < p; ++row) {
    AddScaled(x + row * q, beta, out + row * q, width);
    RoundInPlace(program.dtype, out + row * q, width);
  }
}

}  // namespace

int64_t SymmetricStride(int64_t p) { return (((p + 15) / 16) | 1) * 16; }

int64_t Panels(const NewtonSchulzProgram& program, const Product& product) {
  if (product.kind == ProductKind::kApply) return ApplyPanels(program.q);
  const int64_t width = PanelWidth(program.p);
  return (program.p + width - 1) / width;
}

void RunPanel(const NewtonSchulzProgram& program, const Product& product, const ProductSlots& slots,
              int64_t panel) {
  if (product.kind == ProductKind::kApply) return RunApplyPanel(program, product, slots, panel);
  const int64_t width = PanelWidth(program.p);
  const SymmetricPanel symmetric{program, product, slots, panel * width,
                                 std::min(program.p, (panel + 1) * width)};
  symmetric.Multiply();
  symmetric.Finish();
}

}  // namespace dmuond::kernels::cpu
