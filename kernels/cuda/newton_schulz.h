// Newton-Schulz for a batch of matrices of one shape that lie in device memory, as a list of
// products prepared once and launched any number of times (also into a CUDA graph).
// Formulas: docs/maths.md, section 3; scaling: docs/kernels.md.
#ifndef DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_
#define DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

struct NewtonSchulzShape {
  int64_t rows = 0;  // as the weight lies in memory; tall ones are not transposed
  int64_t cols = 0;
  int64_t batch = 1;
};

struct NewtonSchulzOptions {
  bool gram = true;  // Gram form; else standard
  GemmType type = GemmType::kF16;
  std::vector<std::array<double, 3>> coefficients;  // (a, b, c) per step
  std::vector<int> restarts;                        // Gram form
};

// Per matrix, in device memory, written before the launch: X holds scale * u for a power of two
// `scale`; `inverse_norm` = 1 / ||X||_F (0 where X is zero) and its square.
struct NewtonSchulzNorms {
  const float* inverse_norm = nullptr;
  const float* inverse_norm_squared = nullptr;
};

class NewtonSchulz {
 public:
  // Columns of X and of the result in memory: cols rounded up for the copy engine.
  static int64_t LeadingDimension(int64_t cols) { return (cols + 7) / 8 * 8; }
  static size_t WorkspaceBytes(const NewtonSchulzShape& shape, const NewtonSchulzOptions& options);

  // `workspace`: WorkspaceBytes, aligned to 256 bytes; the caller's, outlives this.
  static std::unique_ptr<NewtonSchulz> Create(const NewtonSchulzShape& shape,
                                              const NewtonSchulzOptions& options,
                                              const NewtonSchulzNorms& norms, void* workspace,
                                              std::string* error);

  // Where the caller puts X: rows x LeadingDimension(cols) elements a matrix, one after another.
  // Destroyed by the launch.
  [[nodiscard]] void* input() const { return input_; }
  // result_scale() * O, laid out as the input.
  [[nodiscard]] const void* result() const { return result_; }
  [[nodiscard]] float result_scale() const { return result_scale_; }

  cudaError_t Launch(cudaStream_t stream) const;

 private:
  friend class NewtonSchulzBuilder;
  NewtonSchulz() = default;
  std::vector<std::unique_ptr<Gemm>> products_;
  void* input_ = nullptr;
  void* result_ = nullptr;
  float result_scale_ = 1;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_NEWTON_SCHULZ_H_
