#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_kernel.cuh"
#include "kernels/cuda/tensor_map.h"

namespace dmuond::kernels::cuda {
namespace {

// (rows of D, k), (k, columns of D) as the layout stores them.
bool CheckShapes(const GemmProblem& p, GemmLayout layout, std::string* error) {
  const bool a_transposed = layout == GemmLayout::kTN;
  const bool b_transposed = layout == GemmLayout::kNT || layout == GemmLayout::kSS;
  const int64_t m = a_transposed ? p.a.cols : p.a.rows;
  const int64_t k = a_transposed ? p.a.rows : p.a.cols;
  const int64_t k_of_b = b_transposed ? p.b.cols : p.b.rows;
  const int64_t n = b_transposed ? p.b.rows : p.b.cols;
  const auto addend_fits = [&](const MatrixView& c) {
    return c.data == nullptr || (c.rows == m && c.cols == n);
  };
  if (k != k_of_b || k > kStepsMax * kTileK || p.d.rows != m || p.d.cols != n ||
      (p.symmetric && m != n) || (layout == GemmLayout::kSS && (!p.symmetric || k != m)) ||
      ((p.diagonal != 0 || p.store_lower) && !p.symmetric) || !addend_fits(p.c) ||
      !addend_fits(p.c2) || p.batch < 1) {
    *error = "shapes disagree: " + Describe("a", p.a) + "; " + Describe("b", p.b) + "; " +
             Describe("c", p.c) + "; " + Describe("d", p.d);
    return false;
  }
  return true;
}

}  // namespace

GemmShape ShapeOf(const GemmProblem& problem, GemmLayout layout) {
  const MatrixView& a = problem.a;
  const MatrixView& b = problem.b;
  GemmShape shape;
  shape.rows = problem.d.rows;
  shape.cols = problem.d.cols;
  shape.depth = layout == GemmLayout::kTN ? a.rows : a.cols;
  shape.batch = problem.batch;
  shape.symmetric = problem.symmetric;
  shape.same_operands = layout != GemmLayout::kNN && a.data == b.data && a.rows == b.rows &&
                        a.cols == b.cols && a.ld == b.ld && a.batch_stride == b.batch_stride;
  shape.has_c = problem.c.data != nullptr;
  shape.has_c2 = problem.c2.data != nullptr;
  shape.store_lower = problem.store_lower;
  return shape;
}

int Columns(GemmTile tile) {
  switch (tile) {
    case GemmTile::k256:
      return 256;
    case GemmTile::k192:
      return 192;
    case GemmTile::k128:
      return 128;
    case GemmTile::k64:
      return 64;
  }
  return 0;
}

const char* Name(GemmTile tile) {
  switch (tile) {
    case GemmTile::k256:
      return "256";
    case GemmTile::k192:
      return "192";
    case GemmTile::k128:
      return "128";
    case GemmTile::k64:
      return "64";
  }
  return "unknown";
}

struct Gemm::State {
  GemmVariant variant{};
  GemmParams params{};
  void* memory = nullptr;  // jobs, then problems
  int clusters = 0;

  ~State() { cudaFree(memory); }
};

Gemm::Gemm(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gemm::~Gemm() = default;

namespace {

GemmVariant FindVariant(const GemmOptions& options) {
  const bool f16 = options.type == GemmType::kF16;
  if (options.update != nullptr) {
    return f16 ? FindUpdateGemm<__half>(options.tile, options.layout)
               : FindUpdateGemm<__nv_bfloat16>(options.tile, options.layout);
  }
  return f16 ? FindGemm<__half>(options.tile, options.layout)
             : FindGemm<__nv_bfloat16>(options.tile, options.layout);
}

}  // namespace

std::unique_ptr<Gemm> Gemm::Create(std::span<const GemmProblem> problems, const GemmOptions& wanted,
                                   std::string* error) {
  GemmOptions options = wanted;
  if (options.update != nullptr && options.tile == GemmTile::k64) options.tile = GemmTile::k128;
  if (options.layout == GemmLayout::kSS && !ReadsLower(options.tile, options.layout)) {
    options.layout = GemmLayout::kNT;
  }
  auto state = std::make_unique<State>();
  state->variant = FindVariant(options);
  if (state->variant.function == nullptr || problems.empty() || problems.size() > kProblemsMax) {
    *error = std::string("no kernel for tile ") + Name(options.tile) + ", or 0 or more than " +
             std::to_string(kProblemsMax) + " problems";
    return nullptr;
  }
  if (options.update != nullptr &&
      (problems.size() != 1 || problems[0].symmetric || problems[0].c2.data != nullptr ||
       !GemmUpdate::Fits(problems[0].d.cols))) {
    *error = Describe("d", problems[0].d) +
             ": an update takes one problem that is not symmetric, and columns in multiples of 8";
    return nullptr;
  }
  const int box_a = BoxA(options.layout, SharingOf(Columns(options.tile)));
  const int wide_b = WideBoxB(options.layout, Columns(options.tile));
  std::vector<DeviceProblem> device_problems(problems.size());
  std::vector<GemmShape> shapes;
  for (size_t i = 0; i < problems.size(); ++i) {
    const GemmProblem& p = problems[i];
    DeviceProblem& to = device_problems[i];
    if (!CheckShapes(p, wanted.layout, error) ||
        !EncodeMap(p.a, p.batch, options.type, box_a, "a", &to.a, error) ||
        !EncodeMap(p.a, p.batch, options.type, 64, "a", &to.a_block, error) ||
        !EncodeMap(p.b, p.batch, options.type, kTileUnit, "b", &to.b, error) ||
        !EncodeMap(p.b, p.batch, options.type, wide_b, "b", &to.b_wide, error) ||
        !EncodeMap(p.d, p.batch, options.type, 64, "d", &to.d, error) ||
        (p.c.data != nullptr && !EncodeMap(p.c, p.batch, options.type, 64, "c", &to.c, error)) ||
        (p.c2.data != nullptr &&
         !EncodeMap(p.c2, p.batch, options.type, 64, "c2", &to.c2, error))) {
      return nullptr;
    }
    to.alpha = p.alpha;
    to.beta = p.beta;
    to.beta2 = p.beta2;
    to.diagonal = p.diagonal;
    shapes.push_back(ShapeOf(p, options.layout));
  }

  const void* function = reinterpret_cast<const void*>(state->variant.function);
  cudaError_t result = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            state->variant.shared_bytes);
  if (result == cudaSuccess) {
    result = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  int clusters = 0;
  if (result == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(2);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = state->variant.shared_bytes;
    result = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
  }
  const GemmSchedule schedule = MakeSchedule(shapes, Columns(options.tile), clusters);
  const size_t job_bytes = (schedule.jobs.size() * sizeof(GemmJob) + 255) / 256 * 256;
  const size_t problem_bytes = device_problems.size() * sizeof(DeviceProblem);
  if (result == cudaSuccess) result = cudaMalloc(&state->memory, job_bytes + problem_bytes);
  if (result == cudaSuccess) {
    result = cudaMemcpy(state->memory, schedule.jobs.data(), schedule.jobs.size() * sizeof(GemmJob),
                        cudaMemcpyHostToDevice);
  }
  auto* problems_at = static_cast<std::byte*>(state->memory) + job_bytes;
  if (result == cudaSuccess) {
    result = cudaMemcpy(problems_at, device_problems.data(), problem_bytes, cudaMemcpyHostToDevice);
  }
  // cudaMemcpy() of pageable memory returns when the data has left it, not when it has arrived, and
  // a launch may come at once, in a stream that the default stream does not order.
  if (result == cudaSuccess) result = cudaStreamSynchronize(cudaStreamLegacy);
  if (result != cudaSuccess) {
    *error = std::string("cannot prepare the product: ") + cudaGetErrorString(result);
    return nullptr;
  }
  state->clusters = schedule.clusters;
  state->params.inline_problem = device_problems[0];
  state->params.problems =
      problems.size() > 1 ? reinterpret_cast<const DeviceProblem*>(problems_at) : nullptr;
  state->params.jobs = static_cast<const GemmJob*>(state->memory);
  state->params.wide_b = wide_b;
  if (options.update != nullptr) {
    const GemmUpdate& update = *options.update;
    state->params.update = {update.matrices,
                            update.inverse_norm,
                            update.scale,
                            problems[0].d.cols,
                            static_cast<int>(problems[0].d.rows),
                            update.weight,
                            update.squares};
  }
  return std::unique_ptr<Gemm>(new Gemm(std::move(state)));
}

cudaError_t Gemm::Launch(cudaStream_t stream, bool overlap) const {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(state_->clusters * 2);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = state_->variant.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, state_->variant.function, state_->params);
}

}  // namespace dmuond::kernels::cuda
