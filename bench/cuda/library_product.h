// cuBLASLt's product of the same operands, for comparison: the fastest that it has for them. The
// one that the product runs (kernels/cuda/library_product.h) has one algorithm for every batch.
#ifndef DMUOND_BENCH_CUDA_LIBRARY_PRODUCT_H_
#define DMUOND_BENCH_CUDA_LIBRARY_PRODUCT_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

namespace dmuond::bench {

// D = alpha * A * B' + beta * C for row-major n x k operands (fp16 or bf16), strided batches, fp32
// accumulation. Of the heuristic's first algorithms the fastest is kept.
class LibraryProduct {
 public:
  struct Problem {
    const void* a = nullptr;  // n x k
    const void* b = nullptr;  // n x k
    const void* c = nullptr;
    void* d = nullptr;
    int64_t n = 0;
    int64_t k = 0;
    int64_t ld = 0;
    int64_t batch = 1;
    bool bf16 = false;
    float alpha = 1;
    float beta = 0;
  };
  // nullptr where the library is not there.
  static std::unique_ptr<LibraryProduct> Create(const Problem& problem);
  ~LibraryProduct();
  void Launch(cudaStream_t stream) const;

 private:
  struct State;
  explicit LibraryProduct(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_CUDA_LIBRARY_PRODUCT_H_
