#include "kernels/cuda/library_product.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/symmetric_passes.h"

namespace dmuond::kernels::cuda {
namespace {

// For which the heuristic is asked: neither one matrix nor so many that none of them matters.
constexpr int kNominalBatch = 8;
constexpr int kAlgorithms = 16;
constexpr uint32_t kAlignment = 16;  // of every matrix of a batch, gemm.h

// The library's descriptors, as one owner. The library is column-major: it computes the transpose,
// D' = B' * A', and a row-major matrix is its own transpose there.
class Descriptors {
 public:
  explicit Descriptors(const CublasLt& library) : library_(library) {}
  ~Descriptors() {
    for (cublasLtMatrixLayout_t layout : {first, second, addend, out}) {
      if (layout != nullptr) library_.layout_destroy(layout);
    }
    if (desc != nullptr) library_.desc_destroy(desc);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  bool Create(const GemmProblem& p, GemmLayout layout, cudaDataType_t type, cudaDataType_t out_type,
              const MatrixView& c, const MatrixView& d) {
    const cublasOperation_t first_op = layout == GemmLayout::kNT ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second_op = layout == GemmLayout::kTN ? CUBLAS_OP_T : CUBLAS_OP_N;
    return library_.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           library_.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &first_op, sizeof(first_op)) ==
               CUBLAS_STATUS_SUCCESS &&
           library_.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSB, &second_op, sizeof(second_op)) ==
               CUBLAS_STATUS_SUCCESS &&
           Describe(p.b, type, &first) && Describe(p.a, type, &second) &&
           Describe(c.data == nullptr ? d : c, out_type, &addend) && Describe(d, out_type, &out);
  }
  bool SetBatch(int batch) {
    for (cublasLtMatrixLayout_t layout : {first, second, addend, out}) {
      if (library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)) !=
          CUBLAS_STATUS_SUCCESS) {
        return false;
      }
    }
    return true;
  }

  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t first = nullptr;  // B
  cublasLtMatrixLayout_t second = nullptr;
  cublasLtMatrixLayout_t addend = nullptr;
  cublasLtMatrixLayout_t out = nullptr;

 private:
  bool Describe(const MatrixView& m, cudaDataType_t type, cublasLtMatrixLayout_t* to) {
    // Also of a single matrix: the algorithm is asked for batches of this layout.
    const int64_t stride = m.batch_stride != 0 ? m.batch_stride : m.rows * m.ld;
    return library_.layout_create(to, type, m.cols, m.rows, m.ld) == CUBLAS_STATUS_SUCCESS &&
           library_.layout_set(*to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                               sizeof(stride)) == CUBLAS_STATUS_SUCCESS;
  }
  const CublasLt& library_;
};

class Preference {
 public:
  explicit Preference(const CublasLt& library) : library_(library) {
    good_ = library.preference_create(&preference_) == CUBLAS_STATUS_SUCCESS &&
            Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kLibraryScratchBytes) &&
            Set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      good_ = good_ && Set(attribute, kAlignment);
    }
  }
  ~Preference() {
    if (preference_ != nullptr) library_.preference_destroy(preference_);
  }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  [[nodiscard]] bool good() const { return good_; }
  [[nodiscard]] cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <typename T>
  bool Set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    return library_.preference_set(preference_, attribute, &value, sizeof(value)) ==
           CUBLAS_STATUS_SUCCESS;
  }
  const CublasLt& library_;
  cublasLtMatmulPreference_t preference_ = nullptr;
  bool good_ = false;
};

bool Takes(const CublasLt& library, Descriptors& d, const cublasLtMatmulAlgo_t& algorithm,
           int batch) {
  cublasLtMatmulHeuristicResult_t result{};
  return d.SetBatch(batch) &&
         library.algo_check(library.handle, d.desc, d.first, d.second, d.addend, d.out, &algorithm,
                            &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= kLibraryScratchBytes;
}

// A function of everything in the descriptors but the batch.
bool FindAlgorithm(const CublasLt& library, Descriptors& d, cublasLtMatmulAlgo_t* algorithm) {
  const Preference preference(library);
  std::array<cublasLtMatmulHeuristicResult_t, kAlgorithms> found{};
  int count = 0;
  if (!preference.good() || !d.SetBatch(kNominalBatch) ||
      library.heuristic(library.handle, d.desc, d.first, d.second, d.addend, d.out,
                        preference.get(), kAlgorithms, found.data(),
                        &count) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (found[i].state == CUBLAS_STATUS_SUCCESS && Takes(library, d, found[i].algo, 1) &&
        Takes(library, d, found[i].algo, kLibraryBatchMax)) {
      *algorithm = found[i].algo;
      return true;
    }
  }
  return false;
}

bool IsWide(const GemmProblem& p) { return p.c2.data != nullptr || p.diagonal != 0; }

}  // namespace

struct LibraryProduct::State {
  explicit State(const CublasLt& library_in) : library(library_in), descriptors(library_in) {}

  const CublasLt& library;
  GemmProblem problem;
  GemmType type = GemmType::kF16;
  Descriptors descriptors;
  cublasLtMatmulAlgo_t algorithm{};
  float* wide = nullptr;  // nullptr: D is written as it is
  void* scratch = nullptr;
};

LibraryProduct::LibraryProduct(std::unique_ptr<State> state) : state_(std::move(state)) {}
LibraryProduct::~LibraryProduct() = default;

absl::Status CheckLibrary() { return CublasLt::Get().status(); }

std::string LibraryVersion() {
  const absl::StatusOr<const CublasLt*> library = CublasLt::Get();
  if (!library.ok()) return "";
  const size_t version = (*library)->get_version();
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

int64_t LibraryProduct::WideElements(const GemmProblem& problem) {
  return IsWide(problem) ? problem.d.rows * problem.d.rows * problem.batch : 0;
}

std::unique_ptr<LibraryProduct> LibraryProduct::Create(const GemmProblem& problem,
                                                       GemmLayout layout, GemmType type,
                                                       const LibraryWorkspace& workspace,
                                                       std::string* error) {
  const absl::StatusOr<const CublasLt*> library = CublasLt::Get();
  if (!library.ok()) {
    *error = std::string(library.status().message());
    return nullptr;
  }
  if (problem.alpha.values != nullptr || problem.beta.values != nullptr ||
      problem.beta2.values != nullptr) {
    *error = "the library takes one factor for a whole batch";
    return nullptr;
  }
  auto state = std::make_unique<State>(**library);
  state->problem = problem;
  state->type = type;
  state->scratch = workspace.scratch;
  const cudaDataType_t value = type == GemmType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
  MatrixView c = problem.c;
  MatrixView d = problem.d;
  if (IsWide(problem)) {
    state->wide = workspace.wide;
    c = d = {workspace.wide, d.rows, d.cols, d.cols, d.rows * d.cols};
  }
  if (!state->descriptors.Create(problem, layout, value, IsWide(problem) ? CUDA_R_32F : value, c,
                                 d) ||
      !FindAlgorithm(**library, state->descriptors, &state->algorithm) ||
      !Takes(**library, state->descriptors, state->algorithm, static_cast<int>(problem.batch))) {
    *error = absl::StrCat("cuBLASLt has no algorithm for ", problem.batch, " products of ",
                          problem.d.rows, " x ", problem.d.cols, " x ",
                          layout == GemmLayout::kTN ? problem.a.rows : problem.a.cols);
    return nullptr;
  }
  return std::unique_ptr<LibraryProduct>(new LibraryProduct(std::move(state)));
}

cudaError_t LibraryProduct::Launch(cudaStream_t stream) const {
  const State& s = *state_;
  const GemmProblem& p = s.problem;
  if (s.wide != nullptr) {
    const cudaError_t result =
        LaunchWidenAddends(stream, s.type, p.c, p.beta.factor, p.c2, p.beta2.factor, p.diagonal,
                           p.d.rows, p.batch, s.wide);
    if (result != cudaSuccess) return result;
  }
  const float alpha = p.alpha.factor;
  const float beta = s.wide != nullptr ? 1.0F : p.c.data != nullptr ? p.beta.factor : 0.0F;
  void* const out = s.wide != nullptr ? s.wide : p.d.data;
  const void* const addend = s.wide == nullptr && p.c.data != nullptr ? p.c.data : out;
  const Descriptors& d = s.descriptors;
  const cublasStatus_t product = s.library.matmul(
      s.library.handle, d.desc, &alpha, p.b.data, d.first, p.a.data, d.second, &beta, addend,
      d.addend, out, d.out, &s.algorithm, s.scratch, kLibraryScratchBytes, stream);
  if (product != CUBLAS_STATUS_SUCCESS) {
    const cudaError_t last = cudaGetLastError();
    return last != cudaSuccess ? last : cudaErrorUnknown;
  }
  if (s.wide != nullptr) return LaunchNarrowMirrored(stream, s.type, s.wide, p.d, p.batch);
  // A * B with A != B is symmetric only up to rounding.
  if (p.symmetric && p.a.data != p.b.data) return LaunchMirror(stream, s.type, p.d, p.batch);
  return cudaSuccess;
}

}  // namespace dmuond::kernels::cuda
