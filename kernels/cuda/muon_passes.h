// The passes over memory around Newton-Schulz, for a batch of matrices of one shape:
//
//   Estimate     power-of-two scale of u from a sample    reads little of g and buf
//   Momentum     new momentum, X = 16-bit(scale * u) and   reads g, buf; writes buf, X
//                the sums of squares of u
//   FinishNorms  exact norm; was the scale good enough?   a few values per matrix
//   Recast       X again, of matrices whose scale was     reads g, buf; writes X; as a rule nothing
//                not good, or of all
//   Apply        decay, update, master, weight            reads master, O; writes master, weight
//   TellSquares  sum of squares of the update             a few values per matrix
//
// All enqueue into a stream and return. Sums of squares are fp64 over fixed stretches, added in a
// fixed order. A matrix whose `active` is 0 keeps its state: it is copied. One whose u is zero or
// not finite has no direction: its weight only decays. Momentum, masters and weights have the bits
// of the CPU device's for the same direction. No result depends on the batch.
#ifndef DMUOND_KERNELS_CUDA_MUON_PASSES_H_
#define DMUOND_KERNELS_CUDA_MUON_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace dmuond::kernels::cuda {

// What changes from step to step. Mirrors kernels::UpdateScalars.
struct PassScalars {
  double learning_rate;
  double momentum;
  double weight_decay;
  double gradient_factor;
  double beta1;
  double beta2;
  double eps;
  double bias_correction1;
  double bias_correction2;
  uint32_t active;
};

// Element types; the numbers of kernels::DType.
enum class WeightType : uint8_t { kF32 = 1, kBF16 = 2, kF16 = 3 };
// How the norm of u is taken: see docs/maths.md, presets.
enum class PassNorm : uint8_t { kExact = 1, kPlusEps = 2, kClampedEps = 3 };

struct PassMatrix {
  const float* gradient;
  const float* momentum_in;
  float* momentum_out;
  const float* master_in;
  float* master_out;
  void* weight_out;  // nullptr: none
  PassScalars scalars;
  double* update_squares = nullptr;  // as kernels::MuonMatrix's
};

struct PassShape {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t x_ld = 0;  // of X and O; rows * x_ld apart
  bool ema = false;
  bool nesterov = true;
  WeightType type = WeightType::kF16;  // of X and O
  PassNorm norm = PassNorm::kExact;
  double eps = 0;
  WeightType weight = WeightType::kF32;
  double update_scale = 1;  // scale(rows, cols) of docs/maths.md
  // 0: X = scale * u, a power of two; the norm goes into the products. Else X = normalise * u /
  // norm, which takes a Recast of every matrix.
  double normalise = 0;
};

// Device memory of a batch, one entry per matrix (partial sums: NormPartials(shape) per matrix).
struct PassBuffers {
  const PassMatrix* matrices = nullptr;
  int64_t count = 0;
  double* partials = nullptr;
  float* scale = nullptr;
  float* inverse_norm = nullptr;
  float* inverse_norm_squared = nullptr;
  uint32_t* recast = nullptr;            // whether X has to be cast again
  uint32_t* schatten_arrived = nullptr;  // not null: set to 0 by FinishNorms (schatten_norm.h)
  double* squares = nullptr;             // sums of those of `result`; FinishNorms sets them to 0
  void* x = nullptr;
  const void* result = nullptr;  // result_scale * O
  float result_scale = 1;
};

// The originals that work on bf16 tensors cast before they take the norm, which is bf16 then too.
[[nodiscard]] inline bool CastsFirst(const PassShape& shape) {
  return shape.norm != PassNorm::kExact && shape.type == WeightType::kBF16;
}

[[nodiscard]] int64_t NormPartials(const PassShape& shape);

// Nothing where X is to be normalised.
cudaError_t LaunchEstimate(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers);
cudaError_t LaunchMomentum(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers);
cudaError_t LaunchFinishNorms(cudaStream_t stream, const PassShape& shape,
                              const PassBuffers& buffers);
// X of the matrices that FinishNorms marked: all of them where X is to be normalised.
cudaError_t LaunchRecast(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers);
cudaError_t LaunchApply(cudaStream_t stream, const PassShape& shape, const PassBuffers& buffers);
// Sets update_squares of the matrices that want them.
cudaError_t LaunchTellSquares(cudaStream_t stream, const PassShape& shape,
                              const PassBuffers& buffers);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_PASSES_H_
