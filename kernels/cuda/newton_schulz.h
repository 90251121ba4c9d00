// The products of a Newton-Schulz program (kernels/newton_schulz.h) for a batch of matrices of one
// shape that lie in device memory, prepared once and launched any number of times (also into a CUDA
// graph). fp16 and bf16 run on tensor cores, by the own kernels or by cuBLASLt; fp32 on plain
// arithmetic.
#ifndef DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_
#define DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/schatten_norm.h"
#include "kernels/cuda/tile_tuner.h"
#include "kernels/newton_schulz.h"

namespace dmuond::kernels::cuda {

// Per matrix, in device memory, written before the launch: X holds scale * u for a power of two
// `scale`; `inverse_norm` = 1 / ||X||_F (0 where X is zero) and its square.
struct NewtonSchulzNorms {
  const float* inverse_norm = nullptr;
  const float* inverse_norm_squared = nullptr;
  SchattenNorms schatten;  // for programs that take this norm, written by the launch
};

struct NewtonSchulzOptions {
  // Whose products: the own kernels' (sm_90 alone) or the library's. Results differ in bits.
  ProductEngine engine = ProductEngine::kOwn;
  // Chooses tiles by running the products, on random matrices in the workspace; null: by rule.
  TileTuner* tuner = nullptr;
  // Not null: the last product applies O to masters and weights, where it can (see updates()).
  // `scale` is that of O itself. Read by Create.
  const GemmUpdate* update = nullptr;
};

class NewtonSchulz {
 public:
  // Columns of X and of the result in memory: cols rounded up for the copy engine.
  static int64_t LeadingDimension(int64_t cols) { return (cols + 7) / 8 * 8; }
  static size_t WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch,
                               ProductEngine engine);
  // Whether X is to be input_scale * u / norm, as the program says: one factor for a whole batch is
  // all that a library takes. Otherwise see NewtonSchulzNorms.
  static bool TakesNormalised(const NewtonSchulzProgram& program, ProductEngine engine) {
    return engine == ProductEngine::kLibrary && program.dtype != DType::kF32;
  }

  // `workspace`: WorkspaceBytes, aligned to 256 bytes; the caller's, outlives this.
  static std::unique_ptr<NewtonSchulz> Create(const NewtonSchulzProgram& program, int64_t batch,
                                              const NewtonSchulzNorms& norms, void* workspace,
                                              const NewtonSchulzOptions& options,
                                              std::string* error);

  // Where the caller puts X: rows x LeadingDimension(cols) elements a matrix, one after another.
  // Destroyed by the launch.
  [[nodiscard]] void* input() const { return input_; }
  // Whether the launch is the whole update; result() is not written then.
  [[nodiscard]] bool updates() const { return updates_; }
  // result_scale() * O, laid out as the input.
  [[nodiscard]] const void* result() const { return result_; }
  [[nodiscard]] float result_scale() const { return result_scale_; }

  cudaError_t Launch(cudaStream_t stream) const;

 private:
  friend class NewtonSchulzBuilder;
  NewtonSchulz() = default;
  // (stream, whether the prologue may overlap the kernel before it)
  using LaunchPart = std::function<cudaError_t(cudaStream_t, bool)>;
  std::vector<LaunchPart> parts_;  // products, and what comes between them
  void* input_ = nullptr;
  void* result_ = nullptr;
  float result_scale_ = 1;
  bool updates_ = false;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_
