#include "kernels/cuda/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "kernels/cuda/library_product.h"
#include "kernels/cuda/product_f32.h"
#include "kernels/cuda/tiles.h"

namespace dmuond::kernels::cuda {
namespace {

size_t Align(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Sizes {
  int64_t rows;  // as the matrix lies in memory; tall ones are not transposed
  int64_t cols;
  int64_t ld;
  int64_t p_ld;
  size_t x_bytes;        // all matrices of the batch
  size_t square_bytes;   // likewise, p x p
  size_t wide_bytes;     // fp32, p x p: what a library's sums of several terms take
  size_t scratch_bytes;  // of a library
};
bool AddsSeveral(const Product& product) {
  return product.add2 != Slot::kNone || product.diagonal != 0;
}

Sizes SizesOf(const NewtonSchulzProgram& program, int64_t batch, ProductEngine engine) {
  Sizes sizes{};
  sizes.rows = program.tall ? program.q : program.p;
  sizes.cols = program.tall ? program.p : program.q;
  sizes.ld = NewtonSchulz::LeadingDimension(sizes.cols);
  sizes.p_ld = NewtonSchulz::LeadingDimension(program.p);
  const auto element = static_cast<int64_t>(SizeOf(program.dtype));
  sizes.x_bytes = Align(batch * sizes.rows * sizes.ld * element);
  sizes.square_bytes = Align(batch * program.p * sizes.p_ld * element);
  if (NewtonSchulz::TakesNormalised(program, engine)) {
    const bool wide = std::any_of(program.products.begin(), program.products.end(), AddsSeveral);
    sizes.wide_bytes = wide ? Align(batch * program.p * program.p * sizeof(float)) : 0;
    sizes.scratch_bytes = kLibraryScratchBytes;
  }
  return sizes;
}

}  // namespace

class NewtonSchulzBuilder {
 public:
  NewtonSchulzBuilder(const NewtonSchulzProgram& program, int64_t batch,
                      const NewtonSchulzNorms& norms, void* workspace,
                      const NewtonSchulzOptions& options, std::string* error)
      : program_(program), batch_(batch), norms_(norms), options_(options), error_(error) {
    const Sizes sizes = SizesOf(program, batch, options.engine);
    auto* at = static_cast<std::byte*>(workspace);
    for (const Slot slot : {Slot::kX0, Slot::kX1}) {
      View(slot) = {at, sizes.rows, sizes.cols, sizes.ld, sizes.rows * sizes.ld};
      at += sizes.x_bytes;
    }
    for (int i = 0; i < program.symmetric_slots; ++i) {
      views_[static_cast<size_t>(Slot::kS0) + i] = {at, program.p, program.p, sizes.p_ld,
                                                    program.p * sizes.p_ld};
      at += sizes.square_bytes;
    }
    library_ = {reinterpret_cast<float*>(at), at + sizes.wide_bytes};
  }

  std::unique_ptr<NewtonSchulz> Build() {
    std::unique_ptr<NewtonSchulz> result(new NewtonSchulz());
    result->input_ = View(Slot::kX0).data;
    result->result_ = View(program_.output).data;
    result->result_scale_ = static_cast<float>(1 / program_.output_scale);
    result->updates_ = Updates();
    const std::vector<Product>& products = program_.products;
    std::vector<Described> described;
    std::vector<bool> reads_lower;
    for (const Product& product : products) {
      described.push_back(Describe(product));
      reads_lower.push_back(
          ReadsLower(described.back().options.tile, described.back().options.layout));
    }
    const std::vector<bool> stores_lower = NeededInLowerForm(program_, reads_lower);
    for (size_t i = 0; i < products.size(); ++i) {
      const bool updates = result->updates_ && i + 1 == products.size();
      described[i].problem.store_lower = Own() && stores_lower[i];
      NewtonSchulz::LaunchPart launch = Prepare(described[i], updates);
      if (launch == nullptr) return nullptr;
      result->parts_.push_back(std::move(launch));
      if (i == 0 && program_.schatten4) result->parts_.push_back(TakeSchattenNorm(products[i]));
      const bool unscaled =
          i == 0 || (products[i].kind == ProductKind::kApply && products[i].alpha_power > 0);
      if (program_.schatten4 && unscaled && OneFactorForAll()) {
        result->parts_.push_back(Scale(View(products[i].out), i == 0
                                                                  ? norms_.schatten.inverse_squared
                                                                  : norms_.schatten.inverse));
      }
    }
    return result;
  }

 private:
  MatrixView& View(Slot slot) { return views_[static_cast<size_t>(slot)]; }

  // A library's products: X comes normalised, and what the Schatten-4 norm divides is scaled in
  // memory, the Gram matrix and the first X that is made with it.
  [[nodiscard]] bool OneFactorForAll() const {
    return NewtonSchulz::TakesNormalised(program_, options_.engine);
  }

  [[nodiscard]] WeightType Type() const { return static_cast<WeightType>(program_.dtype); }

  [[nodiscard]] NewtonSchulz::LaunchPart TakeSchattenNorm(const Product& gram) {
    return [type = Type(), view = View(gram.out), batch = batch_, scale = program_.gram_scale,
            inverse_norm = OneFactorForAll() ? nullptr : norms_.inverse_norm,
            norms = norms_.schatten](cudaStream_t stream, bool) {
      return LaunchSchattenNorm(stream, type, view, batch, scale, inverse_norm, norms);
    };
  }

  [[nodiscard]] NewtonSchulz::LaunchPart Scale(const MatrixView& view, const float* factors) const {
    return [type = Type(), view, batch = batch_, factors](cudaStream_t stream, bool) {
      return LaunchScaleInPlace(stream, type, view, batch, factors);
    };
  }

  // The program's X0 is input_scale * u / norm; own products take 2^k * u. `schatten_power`: how
  // often the Schatten-4 norm divides, too.
  [[nodiscard]] DeviceScalar Factor(int input_power, int schatten_power, double factor) const {
    if (OneFactorForAll()) return {nullptr, static_cast<float>(factor)};
    switch (schatten_power) {
      case 0:
        break;
      case 1:  // of the input
        return {norms_.schatten.inverse, static_cast<float>(factor * program_.input_scale)};
      case 2:
        return {norms_.schatten.inverse_squared, static_cast<float>(factor)};
      default:
        return {norms_.schatten.inverse_fourth, static_cast<float>(factor)};
    }
    switch (input_power) {
      case 0:
        return {nullptr, static_cast<float>(factor)};
      case 1:
        return {norms_.inverse_norm, static_cast<float>(factor * program_.input_scale)};
      default:
        return {norms_.inverse_norm_squared,
                static_cast<float>(factor * program_.input_scale * program_.input_scale)};
    }
  }

  // Whether gemm.h's kernels compute.
  [[nodiscard]] bool Own() const {
    return options_.engine == ProductEngine::kOwn && program_.dtype != DType::kF32;
  }

  [[nodiscard]] bool Updates() const {
    return options_.update != nullptr && Own() &&
           GemmUpdate::Fits(program_.tall ? program_.p : program_.q);
  }

  struct Described {
    GemmProblem problem;
    GemmOptions options;
  };

  Described Describe(const Product& product) {
    GemmProblem p;
    p.batch = batch_;
    p.d = View(product.out);
    p.alpha = Factor(product.input_power, product.alpha_power, product.alpha);
    GemmLayout layout = GemmLayout::kNT;
    switch (product.kind) {
      case ProductKind::kGram:
        p.a = View(product.a);
        p.b = View(product.a);
        p.symmetric = true;
        layout = program_.tall ? GemmLayout::kTN : GemmLayout::kNT;
        break;
      case ProductKind::kSymmetric:
        p.a = View(product.a);
        p.b = View(product.b);
        if (product.add != Slot::kNone) p.c = View(product.add);
        if (product.add2 != Slot::kNone) p.c2 = View(product.add2);
        p.beta = Factor(product.input_power, product.beta_power, product.beta);
        p.beta2 = Factor(product.input_power, 0, product.gamma);
        p.diagonal = static_cast<float>(product.diagonal);
        p.symmetric = true;
        if (Own()) layout = GemmLayout::kSS;
        break;
      case ProductKind::kApply:
        p.a = View(program_.tall ? product.b : product.a);
        p.b = View(program_.tall ? product.a : product.b);
        if (product.beta != 0) p.c = View(product.b);
        p.beta = Factor(product.input_power, product.beta_power, product.beta);
        layout = program_.tall ? GemmLayout::kNT : GemmLayout::kNN;
        break;
    }
    GemmOptions options;
    options.type = program_.dtype == DType::kF16 ? GemmType::kF16 : GemmType::kBF16;
    options.layout = layout;
    if (Own()) {
      options.tile =
          options_.tuner == nullptr ? TileFor(p, layout) : options_.tuner->Fastest(p, options);
    }
    return {p, options};
  }

  NewtonSchulz::LaunchPart Prepare(const Described& described, bool updates) {
    const GemmProblem& p = described.problem;
    GemmOptions options = described.options;
    if (program_.dtype == DType::kF32) {
      return [p, layout = options.layout](cudaStream_t stream, bool) {
        return LaunchProductF32(stream, p, layout);
      };
    }
    if (options_.engine == ProductEngine::kLibrary) {
      std::shared_ptr<const LibraryProduct> library =
          LibraryProduct::Create(p, options.layout, options.type, library_, error_);
      if (library == nullptr) return nullptr;
      return [library](cudaStream_t stream, bool) { return library->Launch(stream); };
    }
    GemmUpdate update;
    if (updates) {
      update = *options_.update;
      update.scale *= program_.output_scale;
      options.update = &update;
    }
    std::shared_ptr<const Gemm> gemm = Gemm::Create({&p, 1}, options, error_);
    if (gemm == nullptr) return nullptr;
    return [gemm](cudaStream_t stream, bool overlap) { return gemm->Launch(stream, overlap); };
  }

  const NewtonSchulzProgram& program_;
  const int64_t batch_;
  const NewtonSchulzNorms norms_;
  const NewtonSchulzOptions options_;
  std::string* const error_;
  std::array<MatrixView, kSlots> views_;
  LibraryWorkspace library_;
};

size_t NewtonSchulz::WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch,
                                    ProductEngine engine) {
  const Sizes sizes = SizesOf(program, batch, engine);
  return 2 * sizes.x_bytes + program.symmetric_slots * sizes.square_bytes + sizes.wide_bytes +
         sizes.scratch_bytes;
}

std::unique_ptr<NewtonSchulz> NewtonSchulz::Create(const NewtonSchulzProgram& program,
                                                   int64_t batch, const NewtonSchulzNorms& norms,
                                                   void* workspace,
                                                   const NewtonSchulzOptions& options,
                                                   std::string* error) {
  return NewtonSchulzBuilder(program, batch, norms, workspace, options, error).Build();
}

cudaError_t NewtonSchulz::Launch(cudaStream_t stream) const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    // What comes before the first one may be no kernel.
    const cudaError_t result = parts_[i](stream, /*overlap=*/i > 0);
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

}  // namespace dmuond::kernels::cuda
