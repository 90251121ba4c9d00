#include <utility>

#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/whole_kernel.cuh"
#include "kernels/cuda/whole_product.h"

namespace dmuond::kernels::cuda {

struct WholeProduct::State {
  void (*function)(WholeParams) = nullptr;
  WholeParams params{};
  int ctas = 0;
};

WholeProduct::WholeProduct(std::unique_ptr<State> state) : state_(std::move(state)) {}
WholeProduct::~WholeProduct() = default;

std::unique_ptr<WholeProduct> WholeProduct::Create(const GemmProblem& problem, GemmType type,
                                                   std::string* error) {
  constexpr int64_t kBatchMax = 1 << 20;
  if (!Fits(GemmTile::kWhole, problem, GemmLayout::kNT) || problem.batch > kBatchMax) {
    *error = "no kernel for " + std::to_string(problem.batch) + " whole products of " +
             Describe("a", problem.a) + "; " + Describe("d", problem.d);
    return nullptr;
  }
  auto state = std::make_unique<State>();
  WholeParams& params = state->params;
  const auto encode = [&](const MatrixView& matrix, const char* name, CUtensorMap* map) {
    return EncodeMap(matrix, problem.batch, type, 64, name, map, error);
  };
  params.has_c = problem.c.data != nullptr;
  params.has_c2 = problem.c2.data != nullptr;
  if (!encode(problem.a, "a", &params.a) || !encode(problem.b, "b", &params.b) ||
      !encode(problem.d, "d", &params.d) || (params.has_c && !encode(problem.c, "c", &params.c)) ||
      (params.has_c2 && !encode(problem.c2, "c2", &params.c2))) {
    return nullptr;
  }
  params.alpha = problem.alpha;
  params.beta = problem.beta;
  params.beta2 = problem.beta2;
  params.diagonal = problem.diagonal;
  params.same = ShapeOf(problem, GemmLayout::kNT).same_operands;
  state->function = type == GemmType::kF16 ? WholeEntry<__half> : WholeEntry<__nv_bfloat16>;
  state->ctas = static_cast<int>(problem.batch) * 2;
  const cudaError_t set =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(state->function),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, kWholeSharedBytes);
  if (set != cudaSuccess) {
    *error = std::string("cannot prepare a whole product: ") + cudaGetErrorString(set);
    return nullptr;
  }
  return std::unique_ptr<WholeProduct>(new WholeProduct(std::move(state)));
}

cudaError_t WholeProduct::Launch(cudaStream_t stream, bool overlap) const {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(state_->ctas);
  config.blockDim = dim3(kWholeThreads);
  config.dynamicSmemBytes = kWholeSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, state_->function, state_->params);
}

}  // namespace dmuond::kernels::cuda
