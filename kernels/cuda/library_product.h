// Products by cuBLASLt, for every architecture from sm_80: the reference beside the own kernels
// (gemm.h), and what runs where those do not. The library comes with the CUDA toolkit and is loaded
// at run time.
//
// One algorithm per product's shape and types, whatever the batch: the first of the library's
// heuristic for a batch of eight that also takes one and kLibraryBatchMax matrices. Its workspace
// has room for a counter of tiles, not for a split along k.
#ifndef DMUOND_KERNELS_CUDA_LIBRARY_PRODUCT_H_
#define DMUOND_KERNELS_CUDA_LIBRARY_PRODUCT_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

inline constexpr int kLibraryBatchMax = 1024;
inline constexpr size_t kLibraryScratchBytes = 4096;

// Device memory that products of one stream share.
struct LibraryWorkspace {
  float* wide = nullptr;    // LibraryProduct::WideElements
  void* scratch = nullptr;  // kLibraryScratchBytes
};

// UNAVAILABLE, naming the file and what to do, where the library cannot be loaded.
[[nodiscard]] absl::Status CheckLibrary();
// "13.1.0"; empty where there is none.
[[nodiscard]] std::string LibraryVersion();

// D of a GemmProblem (gemm.h) whose factors are constants: `values` of alpha, beta, beta2 are
// nullptr. A second addend and a diagonal are added in fp32 and rounded once, and results that are
// symmetric only up to rounding are mirrored, as the own kernels do.
class LibraryProduct {
 public:
  // nullptr and `error` where the library has no algorithm.
  static std::unique_ptr<LibraryProduct> Create(const GemmProblem& problem, GemmLayout layout,
                                                GemmType type, const LibraryWorkspace& workspace,
                                                std::string* error);
  // fp32 memory that a product of this kind works in.
  static int64_t WideElements(const GemmProblem& problem);
  ~LibraryProduct();
  LibraryProduct(const LibraryProduct&) = delete;
  LibraryProduct& operator=(const LibraryProduct&) = delete;

  cudaError_t Launch(cudaStream_t stream) const;

 private:
  struct State;
  explicit LibraryProduct(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_LIBRARY_PRODUCT_H_
