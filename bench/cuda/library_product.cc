#include "bench/cuda/library_product.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/cublaslt.h"

namespace dmuond::bench {
namespace {

using kernels::cuda::CublasLt;

constexpr size_t kWorkspaceBytes = 64 << 20;

}  // namespace

struct LibraryProduct::State {
  const CublasLt& library;
  Problem problem;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t d = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  void* workspace = nullptr;

  cublasStatus_t Run(const cublasLtMatmulAlgo_t& algo, cudaStream_t stream) const {
    const Problem& p = problem;
    // Column-major: D' = B' * A seen from the library.
    return library.matmul(library.handle, desc, &p.alpha, p.b, b, p.a, a, &p.beta,
                          p.c == nullptr ? p.d : p.c, d, p.d, d, &algo, workspace, kWorkspaceBytes,
                          stream);
  }
};

LibraryProduct::LibraryProduct(std::unique_ptr<State> state) : state_(std::move(state)) {}
LibraryProduct::~LibraryProduct() {
  if (state_ != nullptr) cudaFree(state_->workspace);
}

std::unique_ptr<LibraryProduct> LibraryProduct::Create(const Problem& problem) {
  const absl::StatusOr<const CublasLt*> library = CublasLt::Get();
  if (!library.ok()) return nullptr;
  const CublasLt& l = **library;
  auto s = std::make_unique<State>(l, problem);
  const cudaDataType_t type = problem.bf16 ? CUDA_R_16BF : CUDA_R_16F;
  l.desc_create(&s->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  l.desc_set(s->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  l.layout_create(&s->a, type, problem.k, problem.n, problem.ld);
  l.layout_create(&s->b, type, problem.k, problem.n, problem.ld);
  l.layout_create(&s->d, type, problem.n, problem.n, problem.ld);
  const int batch = static_cast<int>(problem.batch);
  const int64_t stride = problem.n * problem.ld;
  for (auto* layout : {s->a, s->b, s->d}) {
    l.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch));
    l.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride));
  }
  if (cudaMalloc(&s->workspace, kWorkspaceBytes) != cudaSuccess) return nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  l.preference_create(&preference);
  const size_t bytes = kWorkspaceBytes;
  l.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes));
  std::vector<cublasLtMatmulHeuristicResult_t> found(8);
  int count = 0;
  l.heuristic(l.handle, s->desc, s->b, s->a, s->d, s->d, preference, 8, found.data(), &count);
  float best = 1e30F;
  cudaEvent_t start;
  cudaEvent_t stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  for (int i = 0; i < count; ++i) {
    if (s->Run(found[i].algo, nullptr) != CUBLAS_STATUS_SUCCESS) continue;
    cudaEventRecord(start);
    for (int r = 0; r < 10; ++r) s->Run(found[i].algo, nullptr);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    if (ms < best) {
      best = ms;
      s->algorithm = found[i].algo;
    }
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  if (best > 1e29F) return nullptr;
  return std::unique_ptr<LibraryProduct>(new LibraryProduct(std::move(s)));
}

void LibraryProduct::Launch(cudaStream_t stream) const { state_->Run(state_->algorithm, stream); }

}  // namespace dmuond::bench
