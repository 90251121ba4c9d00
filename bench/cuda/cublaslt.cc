#include "bench/cuda/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace dmuond::bench {
namespace {

constexpr size_t kWorkspaceBytes = 64 << 20;

struct Library {
  void* handle = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetVersion) version = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
};

const Library& Load() {
  static const Library library = [] {
    Library l;
    l.handle = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (l.handle == nullptr) return l;
    const auto bind = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(l.handle, name));
    };
    bind(l.create, "cublasLtCreate");
    bind(l.version, "cublasLtGetVersion");
    bind(l.desc_create, "cublasLtMatmulDescCreate");
    bind(l.desc_set, "cublasLtMatmulDescSetAttribute");
    bind(l.layout_create, "cublasLtMatrixLayoutCreate");
    bind(l.layout_set, "cublasLtMatrixLayoutSetAttribute");
    bind(l.preference_create, "cublasLtMatmulPreferenceCreate");
    bind(l.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    bind(l.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    bind(l.matmul, "cublasLtMatmul");
    return l;
  }();
  return library;
}

}  // namespace

struct LibraryProduct::State {
  Problem problem;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t d = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  void* workspace = nullptr;

  cublasStatus_t Run(const cublasLtMatmulAlgo_t& algo, cudaStream_t stream) const {
    const Problem& p = problem;
    // Column-major: D' = B' * A seen from the library.
    return Load().matmul(handle, desc, &p.alpha, p.b, b, p.a, a, &p.beta,
                         p.c == nullptr ? p.d : p.c, d, p.d, d, &algo, workspace, kWorkspaceBytes,
                         stream);
  }
};

LibraryProduct::LibraryProduct(std::unique_ptr<State> state) : state_(std::move(state)) {}
LibraryProduct::~LibraryProduct() {
  if (state_ != nullptr) cudaFree(state_->workspace);
}

std::string LibraryProduct::Version() {
  return Load().handle == nullptr ? "none" : std::to_string(Load().version());
}

std::unique_ptr<LibraryProduct> LibraryProduct::Create(const Problem& problem) {
  const Library& l = Load();
  if (l.handle == nullptr) return nullptr;
  auto s = std::make_unique<State>();
  s->problem = problem;
  static cublasLtHandle_t handle = [&] {
    cublasLtHandle_t created = nullptr;
    l.create(&created);
    return created;
  }();
  s->handle = handle;
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
  l.heuristic(s->handle, s->desc, s->b, s->a, s->d, s->d, preference, 8, found.data(), &count);
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
