#include "kernels/cuda/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace dmuond::kernels::cuda {
namespace {

// Stored matrices carry powers of two so that small entries are no fp16 subnormals and large ones
// stay far below 65504. R starts with ||R|| <= 1 and later has eigenvalues up to 1.3; Z = bR + cR^2
// stays below 16, Q (the steps' polynomials multiplied, a few thousand at most without any restart)
// and V = RZ + aR below 4 fit as well.
constexpr double kScaleR = 1024;
constexpr double kScaleZ = 256;
constexpr double kScaleQ = 16;
constexpr double kScaleV = 1024;

// Up to here symmetric products are faster with tiles of 128 x 128 (measured: 2 to 3 % of the whole
// iteration at 512, twice).
constexpr int64_t kSmallTileRows = 512;

size_t Align(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Sizes {
  int64_t p;
  int64_t q;
  int64_t p_ld;
  size_t x_bytes;       // all matrices of the batch
  size_t square_bytes;  // likewise, p x p
};
Sizes SizesOf(const NewtonSchulzShape& s) {
  Sizes sizes{};
  sizes.p = std::min(s.rows, s.cols);
  sizes.q = std::max(s.rows, s.cols);
  sizes.p_ld = NewtonSchulz::LeadingDimension(sizes.p);
  sizes.x_bytes = Align(s.batch * s.rows * NewtonSchulz::LeadingDimension(s.cols) * 2);
  sizes.square_bytes = Align(s.batch * sizes.p * sizes.p_ld * 2);
  return sizes;
}
int SquareBuffers(const NewtonSchulzOptions& options) { return options.gram ? 6 : 2; }

}  // namespace

// Writes the list of products. A matrix "S" below is the stored one, scale times the true one.
class NewtonSchulzBuilder {
 public:
  NewtonSchulzBuilder(const NewtonSchulzShape& shape, const NewtonSchulzOptions& options,
                      const NewtonSchulzNorms& norms, void* workspace, std::string* error)
      : shape_(shape),
        options_(options),
        norms_(norms),
        sizes_(SizesOf(shape)),
        tall_(shape.rows > shape.cols),
        error_(error),
        result_(new NewtonSchulz()) {
    auto* at = static_cast<std::byte*>(workspace);
    for (MatrixView& x : x_) {
      const int64_t ld = NewtonSchulz::LeadingDimension(shape.cols);
      x = {at, shape.rows, shape.cols, ld, shape.rows * ld};
      at += sizes_.x_bytes;
    }
    for (int i = 0; i < SquareBuffers(options); ++i) {
      square_[i] = {at, sizes_.p, sizes_.p, sizes_.p_ld, sizes_.p * sizes_.p_ld};
      at += sizes_.square_bytes;
    }
    scale_x_ = std::exp2(std::round(0.5 * std::log2(static_cast<double>(sizes_.q))));
  }

  std::unique_ptr<NewtonSchulz> Build() {
    result_->input_ = x_[0].data;
    if (options_.gram) {
      BuildGram();
    } else {
      BuildStandard();
    }
    if (failed_) return nullptr;
    result_->result_ = x_[current_].data;
    result_->result_scale_ = static_cast<float>(scale_x_);
    return std::move(result_);
  }

 private:
  void BuildGram() {
    MatrixView r = square_[0];
    MatrixView v = square_[1];
    MatrixView z = square_[2];
    MatrixView z_before = square_[3];
    MatrixView q = square_[4];
    MatrixView q_before = square_[5];
    GramMatrix(r, kScaleR);
    const int steps = static_cast<int>(options_.coefficients.size());
    const auto restarts_before = [&](int i) {
      return std::find(options_.restarts.begin(), options_.restarts.end(), i) !=
             options_.restarts.end();
    };
    int since_restart = 0;  // steps folded into Q
    double a_first = 0;     // Q = Z + a_first * I after the first of them: not stored
    for (int i = 0; i < steps; ++i) {
      const auto [a, b, c] = options_.coefficients[i];
      if (i > 0 && restarts_before(i)) {
        ApplyQ(q, z, since_restart, a_first);
        GramMatrix(r, kScaleR);
        since_restart = 0;
      }
      std::swap(z, z_before);
      Square(r, r, {r, b * kScaleZ / kScaleR}, {}, c * kScaleZ / (kScaleR * kScaleR), 0, z);
      if (since_restart == 0) {
        a_first = a;
      } else if (since_restart == 1) {
        // (Z' + a'I) Z + a (Z' + a'I) with the identity in fp32 only.
        Square(z_before, z, {z, a_first * kScaleQ / kScaleZ}, {z_before, a * kScaleQ / kScaleZ},
               kScaleQ / (kScaleZ * kScaleZ), a * a_first * kScaleQ, q);
      } else {
        std::swap(q, q_before);
        Square(q_before, z, {q_before, a}, {}, 1 / kScaleZ, 0, q);
      }
      ++since_restart;
      if (i + 1 < steps && !restarts_before(i + 1)) {
        Square(r, z, {r, a * kScaleV / kScaleR}, {}, kScaleV / (kScaleR * kScaleZ), 0, v);
        Square(z, v, {v, a * kScaleR / kScaleV}, {}, kScaleR / (kScaleZ * kScaleV), 0, r);
      }
    }
    ApplyQ(q, z, since_restart, a_first);
  }

  // A = X X', B = bA + cAA, X = aX + BX.
  void BuildStandard() {
    const MatrixView a_matrix = square_[0];
    const MatrixView b_matrix = square_[1];
    for (const auto& [a, b, c] : options_.coefficients) {
      GramMatrix(a_matrix, 1);
      Square(a_matrix, a_matrix, {a_matrix, b}, {}, c, 0, b_matrix);
      TimesX(b_matrix, 1, a);
    }
  }

  struct Addend {
    MatrixView matrix;
    double factor = 0;
  };

  // R = scale * X X', the true X
  void GramMatrix(const MatrixView& r, double scale) {
    GemmProblem p;
    p.a = x_[current_];
    p.b = x_[current_];
    p.d = r;
    p.symmetric = true;
    if (normalised_) {
      p.alpha.factor = static_cast<float>(scale / (scale_x_ * scale_x_));
    } else {
      p.alpha = {norms_.inverse_norm_squared, static_cast<float>(scale)};
    }
    Add(p, tall_ ? GemmLayout::kTN : GemmLayout::kNT);
  }

  void Square(const MatrixView& a, const MatrixView& b, const Addend& c, const Addend& c2,
              double alpha, double diagonal, const MatrixView& d) {
    GemmProblem p;
    p.a = a;
    p.b = b;
    p.c = c.matrix;
    p.beta.factor = static_cast<float>(c.factor);
    p.c2 = c2.matrix;
    p.beta2.factor = static_cast<float>(c2.factor);
    p.diagonal = static_cast<float>(diagonal);
    p.alpha.factor = static_cast<float>(alpha);
    p.d = d;
    p.symmetric = true;
    Add(p, GemmLayout::kNT);
  }

  // X <- QX, Q as it is after `folded` steps: Z + a I after one.
  void ApplyQ(const MatrixView& q, const MatrixView& z, int folded, double a_first) {
    if (folded == 1) {
      TimesX(z, 1 / kScaleZ, a_first);
    } else {
      TimesX(q, 1 / kScaleQ, 0);
    }
  }

  // X <- (factor * S) X + addend * X, stored with scale_x_ from then on. S symmetric.
  void TimesX(const MatrixView& s, double factor, double addend) {
    const MatrixView& from = x_[current_];
    GemmProblem p;
    p.a = tall_ ? from : s;
    p.b = tall_ ? s : from;
    p.d = x_[1 - current_];
    if (addend != 0) p.c = from;
    if (normalised_) {
      p.alpha.factor = static_cast<float>(factor);
      p.beta.factor = static_cast<float>(addend);
    } else {
      p.alpha = {norms_.inverse_norm, static_cast<float>(factor * scale_x_)};
      p.beta = {norms_.inverse_norm, static_cast<float>(addend * scale_x_)};
    }
    Add(p, tall_ ? GemmLayout::kNT : GemmLayout::kNN);
    current_ = 1 - current_;
    normalised_ = true;
  }

  void Add(GemmProblem& problem, GemmLayout layout) {
    if (failed_) return;
    problem.batch = shape_.batch;
    GemmOptions options;
    options.type = options_.type;
    options.layout = layout;
    options.tile_n = TileFor(problem);
    auto gemm = Gemm::Create({&problem, 1}, options, error_);
    failed_ = gemm == nullptr;
    result_->products_.push_back(std::move(gemm));
  }

  // Bits do not depend on the tile (each element is summed in the order of k), so it may follow
  // the batch: small tiles where large ones leave most of the chip idle.
  int TileFor(const GemmProblem& problem) const {
    if (problem.symmetric && problem.d.rows <= kSmallTileRows) return 128;
    const int64_t rows = (problem.d.rows + 127) / 128;
    const int64_t cols = (problem.d.cols + 255) / 256;
    const int64_t tiles = rows * cols * shape_.batch / (problem.symmetric ? 2 : 1);
    return tiles < 100 ? 128 : 256;
  }

  const NewtonSchulzShape shape_;
  const NewtonSchulzOptions& options_;
  const NewtonSchulzNorms norms_;
  const Sizes sizes_;
  const bool tall_;
  std::string* const error_;
  std::unique_ptr<NewtonSchulz> result_;
  std::array<MatrixView, 2> x_;
  std::array<MatrixView, 6> square_;
  int current_ = 0;          // which of x_ holds X
  bool normalised_ = false;  // X has been through a product and is scale_x_ times the true one
  double scale_x_ = 1;
  bool failed_ = false;
};

size_t NewtonSchulz::WorkspaceBytes(const NewtonSchulzShape& shape,
                                    const NewtonSchulzOptions& options) {
  const Sizes sizes = SizesOf(shape);
  return 2 * sizes.x_bytes + SquareBuffers(options) * sizes.square_bytes;
}

std::unique_ptr<NewtonSchulz> NewtonSchulz::Create(const NewtonSchulzShape& shape,
                                                   const NewtonSchulzOptions& options,
                                                   const NewtonSchulzNorms& norms, void* workspace,
                                                   std::string* error) {
  return NewtonSchulzBuilder(shape, options, norms, workspace, error).Build();
}

cudaError_t NewtonSchulz::Launch(cudaStream_t stream) const {
  for (size_t i = 0; i < products_.size(); ++i) {
    // What comes before the first one may be no kernel.
    const cudaError_t result = products_[i]->Launch(stream, /*overlap=*/i > 0);
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace dmuond::kernels::cuda
