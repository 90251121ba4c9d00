// The passes over memory around Newton-Schulz, for a batch of matrices of one shape:
//
//   Momentum     new momentum, and the norm of u          reads g, buf; writes buf
//   FinishNorms  power-of-two scale and 1 / norm          a few values per matrix
//   CastInput    X = 16-bit(scale * u)                    reads g, buf; writes X
//   Apply        decay, update, master, weight            reads master, O; writes master, weight
//
// All enqueue into a stream and return. Sums of squares are fp64 over fixed blocks, added in a
// fixed order. A matrix whose `active` is 0 keeps its state: it is copied. One whose u is zero or
// not finite has no direction: its weight only decays. Momentum, masters and weights have the bits
// of the CPU device's for the same direction.
#ifndef DMUOND_KERNELS_CUDA_MUON_PASSES_H_
#define DMUOND_KERNELS_CUDA_MUON_PASSES_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

namespace dmuond::kernels::cuda {

// What changes from step to step. Mirrors kernels::UpdateScalars; travels with the launch.
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
};

// Device memory of a batch, one entry per matrix (partial sums: NormPartials(shape) per matrix).
struct PassBuffers {
  double* partials = nullptr;
  float* scale = nullptr;
  float* inverse_norm = nullptr;
  float* inverse_norm_squared = nullptr;
  void* x = nullptr;
  const void* result = nullptr;  // result_scale * O
  float result_scale = 1;
};

// The originals that work on bf16 tensors cast before they take the norm, which is bf16 then too.
[[nodiscard]] inline bool CastsFirst(const PassShape& shape) {
  return shape.norm != PassNorm::kExact && shape.type == WeightType::kBF16;
}

[[nodiscard]] int64_t NormPartials(const PassShape& shape);

cudaError_t LaunchMomentum(cudaStream_t stream, const PassShape& shape,
                           std::span<const PassMatrix> matrices, const PassBuffers& buffers);
cudaError_t LaunchFinishNorms(cudaStream_t stream, const PassShape& shape, int64_t matrices,
                              const PassBuffers& buffers);
cudaError_t LaunchCastInput(cudaStream_t stream, const PassShape& shape,
                            std::span<const PassMatrix> matrices, const PassBuffers& buffers);
cudaError_t LaunchApply(cudaStream_t stream, const PassShape& shape,
                        std::span<const PassMatrix> matrices, const PassBuffers& buffers);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_PASSES_H_
