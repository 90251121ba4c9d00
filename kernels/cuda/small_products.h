// Newton-Schulz rounds of small matrices (at most 256 rows or columns) in one launch each: the Gram
// matrix of X, the symmetric products up to the next one with X, and that one. The bits are those
// of the single products of gemm.h.
#ifndef DMUOND_KERNELS_CUDA_SMALL_PRODUCTS_H_
#define DMUOND_KERNELS_CUDA_SMALL_PRODUCTS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/small_plan.h"

namespace dmuond::kernels::cuda {

struct SmallProblem {
  MatrixView x;       // p x q, or q x p if `tall`
  MatrixView result;  // as x if the round applies, else p x p; not x
  bool tall = false;
  DeviceScalar gram_alpha;
  DeviceScalar apply_alpha;  // of the product with X, and of what it adds
  DeviceScalar apply_beta;
  int64_t batch = 1;
};

// Ownership: the matrices are the caller's. Threads: one at a time.
class SmallProducts {
 public:
  // fp16. nullptr and `error` where it cannot be done.
  static std::unique_ptr<SmallProducts> Create(const SmallRound& round, const SmallProblem& problem,
                                               std::string* error);
  ~SmallProducts();
  SmallProducts(const SmallProducts&) = delete;
  SmallProducts& operator=(const SmallProducts&) = delete;

  // `overlap`: as Gemm::Launch().
  cudaError_t Launch(cudaStream_t stream, bool overlap) const;

 private:
  struct State;
  explicit SmallProducts(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_PRODUCTS_H_
