#include <algorithm>
#include <utility>

#include "kernels/cuda/small_kernel.cuh"
#include "kernels/cuda/small_products.h"
#include "kernels/cuda/tensor_map.h"

namespace dmuond::kernels::cuda {
namespace {

using SmallFunction = void (*)(SmallParams);

template <bool kTall>
SmallFunction Find(int strips) {
  switch (strips) {
    case 1:
      return SmallEntry<__half, 1, kTall>;
    case 2:
      return SmallEntry<__half, 2, kTall>;
    case 3:
      return SmallEntry<__half, 3, kTall>;
    case 4:
      return SmallEntry<__half, 4, kTall>;
    default:
      return nullptr;
  }
}

}  // namespace

struct SmallProducts::State {
  SmallFunction function = nullptr;
  SmallParams params{};
  int ctas = 0;
  int threads = 0;
};

SmallProducts::SmallProducts(std::unique_ptr<State> state) : state_(std::move(state)) {}
SmallProducts::~SmallProducts() = default;

std::unique_ptr<SmallProducts> SmallProducts::Create(const SmallRound& round,
                                                     const SmallProblem& problem,
                                                     std::string* error) {
  const MatrixView& x = problem.x;
  const MatrixView& result = problem.result;
  const int64_t p = problem.tall ? x.cols : x.rows;
  const int64_t q = problem.tall ? x.rows : x.cols;
  const int strips = static_cast<int>((p + 63) / 64);
  const bool fits = round.applies ? result.rows == x.rows && result.cols == x.cols
                                  : result.rows == p && result.cols == p;
  auto state = std::make_unique<State>();
  state->function = problem.tall ? Find<true>(strips) : Find<false>(strips);
  if (state->function == nullptr || p > kSmallRowsMax || !fits || problem.batch < 1 ||
      problem.batch > (int64_t{1} << 30) || round.ops.size() > kSmallOpsMax) {
    *error = "no kernel for a small round of " + std::to_string(problem.batch) + " matrices, " +
             Describe("x", x) + "; " + Describe("result", result) + "; " +
             std::to_string(round.ops.size()) + " products";
    return nullptr;
  }
  SmallParams& params = state->params;
  if (!EncodeMap(x, problem.batch, GemmType::kF16, 64, "x", &params.x, error) ||
      !EncodeMap(result, problem.batch, GemmType::kF16, 64, "result", &params.result, error)) {
    return nullptr;
  }
  params.gram_alpha = problem.gram_alpha;
  params.alpha = problem.apply_alpha;
  params.beta = problem.apply_beta;
  params.applies = round.applies;
  params.adds_x = round.apply.beta != 0;
  params.steps = static_cast<int>((q + 63) / 64);
  params.ops = static_cast<int>(round.ops.size());
  params.op[0].out = 0;
  std::copy(round.ops.begin(), round.ops.end(), params.op + 1);
  state->ctas = static_cast<int>(problem.batch) * SmallCtas(strips);
  state->threads = SmallThreads(strips);
  const cudaError_t set =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(state->function),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, kSmallSharedBytes);
  if (set != cudaSuccess) {
    *error = std::string("cannot prepare a small round: ") + cudaGetErrorString(set);
    return nullptr;
  }
  return std::unique_ptr<SmallProducts>(new SmallProducts(std::move(state)));
}

cudaError_t SmallProducts::Launch(cudaStream_t stream, bool overlap) const {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(state_->ctas);
  config.blockDim = dim3(state_->threads);
  config.dynamicSmemBytes = kSmallSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, state_->function, state_->params);
}

}  // namespace dmuond::kernels::cuda
