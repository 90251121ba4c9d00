// Matrix products of 16-bit matrices on Hopper (sm_90a), symmetric and rectangular:
//
//   D = alpha * A * B + beta * C + beta2 * C2 + diagonal * I        accumulated in fp32
//
// Symmetric products compute the lower triangle and store each tile and its mirror image, so D is
// symmetric bit for bit. Use:
//
//   GemmProblem p;  p.a = {x, rows, cols, ld, batch_stride}; ...
//   auto gemm = Gemm::Create({p}, options);      // once: tensor maps, tile list in device memory
//   gemm->Launch(stream);                        // any number of times, also into a graph
//
// Ownership: a Gemm owns its tile list; the matrices are the caller's and must outlive it.
// Threads: Create and Launch from one thread at a time. The result of a matrix depends on its own
// operands and shape alone: not on the batch, its neighbours or the number of SMs.
#ifndef DMUOND_KERNELS_CUDA_GEMM_H_
#define DMUOND_KERNELS_CUDA_GEMM_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/cuda/gemm_schedule.h"
#include "kernels/cuda/muon_passes.h"

namespace dmuond::kernels::cuda {

// A strided batch of row-major matrices. Addresses are multiples of 16 bytes, ld and batch_stride
// (in elements) multiples of 8.
struct MatrixView {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;
  int64_t batch_stride = 0;
};

// factor * values[batch index], or factor alone where values == nullptr. `values` is device memory,
// read when the kernel runs.
struct DeviceScalar {
  const float* values = nullptr;
  float factor = 1;
};

// How A (m x k) and B (k x n) lie in memory. "N" as is, "T" transposed.
enum class GemmLayout : uint8_t {
  kNT = 1,  // a: m x k, b: n x k     X * X^T of a wide X; products of symmetric matrices
  kNN = 2,  // a: m x k, b: k x n     Q * X
  kTN = 3,  // a: k x m, b: k x n     U^T * U of a tall U
  // a, b: symmetric, m x m. As kNT, but the wide tiles read no more of them than their lower form
  // (gemm_schedule.h). Symmetric products alone.
  kSS = 4,
};
enum class GemmType : uint8_t { kF16 = 1, kBF16 = 2 };

struct GemmProblem {
  MatrixView a;
  MatrixView b;
  MatrixView c;   // data == nullptr: none. May be a or b
  MatrixView c2;  // a second addend
  MatrixView d;   // overlaps no operand
  int64_t batch = 1;
  bool symmetric = false;    // the product is known to be symmetric
  bool store_lower = false;  // no more of a symmetric D than its lower form
  DeviceScalar alpha;
  DeviceScalar beta;
  DeviceScalar beta2;
  float diagonal = 0;  // symmetric products only
};

// What a schedule needs to know of it.
[[nodiscard]] GemmShape ShapeOf(const GemmProblem& problem, GemmLayout layout);

// 128 rows by so many columns.
enum class GemmTile : uint8_t { k256 = 1, k192, k128, k64 };
inline constexpr GemmTile kGemmTiles[] = {GemmTile::k256, GemmTile::k192, GemmTile::k128,
                                          GemmTile::k64};
[[nodiscard]] int Columns(GemmTile tile);
[[nodiscard]] const char* Name(GemmTile tile);
// Whether an operand of this layout may be there in the lower form alone.
[[nodiscard]] inline bool ReadsLower(GemmTile tile, GemmLayout layout) {
  return layout == GemmLayout::kSS && Columns(tile) > 128;
}

// What becomes of D instead of being stored: LaunchApply() of muon_passes.h in the product's
// epilogue, with the same bits. One entry a matrix of the batch, in device memory.
struct GemmUpdate {
  const PassMatrix* matrices = nullptr;
  const float* inverse_norm = nullptr;  // 0: the matrix has no direction
  double scale = 1;                     // of D, times the learning rate
  WeightType weight = WeightType::kF32;
  double* squares = nullptr;  // not null: the sum of squares of D is added to it
  // Masters and weights lie as D would, without a gap between rows.
  [[nodiscard]] static bool Fits(int64_t cols) { return cols % 8 == 0; }
};

struct GemmOptions {
  GemmType type = GemmType::kF16;
  GemmLayout layout = GemmLayout::kNT;
  GemmTile tile = GemmTile::k256;
  // Read by Create. One problem, which is not symmetric.
  const GemmUpdate* update = nullptr;
};

class Gemm {
 public:
  // nullptr and `error` (naming the operand and its values) where the problem cannot be computed.
  static std::unique_ptr<Gemm> Create(std::span<const GemmProblem> problems,
                                      const GemmOptions& options, std::string* error);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // `overlap`: the prologue runs while the kernel before it in `stream` ends. Only for use after a
  // kernel: in a captured graph the edge from a copy would order nothing.
  cudaError_t Launch(cudaStream_t stream, bool overlap = false) const;

 private:
  struct State;
  explicit Gemm(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_H_
