// Symmetric products of 193 to 256 rows, each in a pair of CTAs: GemmTile::kWhole. The bits are
// those of the other tiles.
#ifndef DMUOND_KERNELS_CUDA_WHOLE_PRODUCT_H_
#define DMUOND_KERNELS_CUDA_WHOLE_PRODUCT_H_

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// Ownership: the matrices are the caller's. Threads: one at a time.
class WholeProduct {
 public:
  // nullptr and `error` where it cannot be done. A and B are as GemmLayout::kNT says.
  static std::unique_ptr<WholeProduct> Create(const GemmProblem& problem, GemmType type,
                                              std::string* error);
  ~WholeProduct();
  WholeProduct(const WholeProduct&) = delete;
  WholeProduct& operator=(const WholeProduct&) = delete;

  // `overlap`: as Gemm::Launch().
  cudaError_t Launch(cudaStream_t stream, bool overlap) const;

 private:
  struct State;
  explicit WholeProduct(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_WHOLE_PRODUCT_H_
