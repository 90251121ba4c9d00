// Doubles of element_passes.h and strided_passes.h.
#include <algorithm>
#include <utility>

#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/strided_passes.h"
#include "tests/fake_cuda/doubles/doubles.h"

namespace dmuond::kernels::cuda {
namespace {

DType TypeOf(WeightType type) { return static_cast<DType>(type); }

StridedBox Run(const void* data, WeightType type, int64_t elements) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), TypeOf(type), 1, {elements}, {1}};
}

// `shape`: of a StridedSum or StridedCopy.
template <typename Shape>
StridedBox Box(const Shape& shape, const void* data, WeightType type, const int64_t* strides) {
  StridedBox box;
  box.data = static_cast<std::byte*>(const_cast<void*>(data));
  box.dtype = TypeOf(type);
  box.dims = shape.dims;
  std::copy_n(shape.shape, shape.dims, box.shape.begin());
  std::copy_n(strides, shape.dims, box.strides.begin());
  return box;
}

void AddBox(const StridedBox& box, Ranges& ranges) {
  if (box.data == nullptr) return;
  int64_t first = 0;
  int64_t last = 0;
  for (int d = 0; d < box.dims; ++d) {
    const int64_t reach = (box.shape[d] - 1) * box.strides[d];
    (reach < 0 ? first : last) += reach;
  }
  const auto element = static_cast<int64_t>(SizeOf(box.dtype));
  ranges.Add(box.data + first * element, static_cast<size_t>((last - first + 1) * element),
             static_cast<size_t>(element));
}

StridedBox OnWorker(StridedBox box) {
  if (box.data != nullptr) box.data = cuda::OnWorker(box.data);
  return box;
}

UpdateScalars FromPass(const PassScalars& s) {
  return {.learning_rate = s.learning_rate,
          .momentum = s.momentum,
          .weight_decay = s.weight_decay,
          .gradient_factor = s.gradient_factor,
          .beta1 = s.beta1,
          .beta2 = s.beta2,
          .eps = s.eps,
          .bias_correction1 = s.bias_correction1,
          .bias_correction2 = s.bias_correction2,
          .active = s.active};
}

struct Summands {
  StridedBox destination;
  std::vector<StridedBox> sources;
  std::vector<uint8_t> levels;
  float factor = 1;
};

cudaError_t LaunchSummands(cudaStream_t stream, const char* name, std::vector<Summands> sums,
                           const Ranges& ranges) {
  return LaunchDouble(stream, name, ranges, [sums = std::move(sums)](Ops& ops, Stream& s) {
    for (const Summands& sum : sums) {
      std::vector<StridedBox> sources;
      for (const StridedBox& source : sum.sources) sources.push_back(OnWorker(source));
      const SumTask task{OnWorker(sum.destination), sources, sum.levels, sum.factor};
      if (absl::Status status = ops.Sum(s, {&task, 1}); !status.ok()) return status;
    }
    return absl::OkStatus();
  });
}

}  // namespace

cudaError_t LaunchSum(cudaStream_t stream, WeightType type, std::span<const SumPass> passes) {
  std::vector<Summands> sums;
  Ranges ranges;
  for (const SumPass& pass : passes) {
    Summands sum;
    sum.destination = Run(pass.destination, WeightType::kF32, pass.elements);
    sum.factor = pass.factor;
    ranges.Add(pass.destination, static_cast<size_t>(pass.elements) * sizeof(float));
    for (int i = 0; i < pass.count; ++i) {
      sum.sources.push_back(Run(pass.sources[i], type, pass.elements));
      ranges.Add(pass.sources[i], static_cast<size_t>(pass.elements) * SizeOf(TypeOf(type)));
    }
    sums.push_back(std::move(sum));
  }
  return LaunchSummands(stream, "sum", std::move(sums), ranges);
}

cudaError_t LaunchSquares(cudaStream_t stream, std::span<const SquaresPass> passes) {
  Ranges ranges;
  for (const SquaresPass& pass : passes) {
    ranges.Add(pass.data, static_cast<size_t>(pass.elements) * sizeof(float), sizeof(float));
    ranges.Add(pass.sums,
               static_cast<size_t>(NormBlocks(pass.first_element, pass.elements)) * sizeof(double),
               sizeof(double));
  }
  std::vector<SquaresPass> kept(passes.begin(), passes.end());
  return LaunchDouble(stream, "squares", ranges, [kept = std::move(kept)](Ops& ops, Stream& s) {
    std::vector<NormTask> tasks;
    for (const SquaresPass& pass : kept) {
      tasks.push_back({cuda::OnWorker(pass.data), pass.elements, pass.first_element,
                       cuda::OnWorker(pass.sums)});
    }
    return ops.SumsOfSquares(s, tasks);
  });
}

cudaError_t LaunchAdamW(cudaStream_t stream, WeightType weight, std::span<const AdamWPass> passes) {
  Ranges ranges;
  for (const AdamWPass& p : passes) {
    const auto elements = static_cast<size_t>(p.elements);
    for (const float* data : {p.gradient, p.m_in, static_cast<const float*>(p.m_out), p.v_in,
                              static_cast<const float*>(p.v_out), p.master_in,
                              static_cast<const float*>(p.master_out)}) {
      ranges.Add(data, elements * sizeof(float));
    }
    ranges.Add(p.weight_out, elements * SizeOf(TypeOf(weight)));
  }
  std::vector<AdamWPass> kept(passes.begin(), passes.end());
  return LaunchDouble(stream, "adamw", ranges,
                      [weight, kept = std::move(kept)](Ops& ops, Stream& s) {
                        for (const AdamWPass& p : kept) {
                          const UpdateScalars scalars = FromPass(p.scalars);
                          const AdamWPiece piece{.elements = p.elements,
                                                 .weight_dtype = TypeOf(weight),
                                                 .gradient = cuda::OnWorker(p.gradient),
                                                 .m_in = cuda::OnWorker(p.m_in),
                                                 .m_out = cuda::OnWorker(p.m_out),
                                                 .v_in = cuda::OnWorker(p.v_in),
                                                 .v_out = cuda::OnWorker(p.v_out),
                                                 .master_in = cuda::OnWorker(p.master_in),
                                                 .master_out = cuda::OnWorker(p.master_out),
                                                 .weight_out = fakeCudaAlias(p.weight_out),
                                                 .scalars = &scalars};
                          if (absl::Status status = ops.UpdateAdamW(s, {&piece, 1}); !status.ok())
                            return status;
                        }
                        return absl::OkStatus();
                      });
}

cudaError_t LaunchStridedSumOfMany(cudaStream_t stream, StridedSum sum,
                                   std::span<const StridedOperand> sources) {
  Summands summands;
  summands.destination = Box(sum, sum.destination, WeightType::kF32, sum.strides);
  summands.factor = sum.factor;
  Ranges ranges;
  AddBox(summands.destination, ranges);
  for (const StridedOperand& source : sources) {
    summands.sources.push_back(Box(sum, source.data, source.type, source.strides));
    summands.levels.push_back(source.level);
    AddBox(summands.sources.back(), ranges);
  }
  return LaunchSummands(stream, "strided_sum", {std::move(summands)}, ranges);
}

cudaError_t LaunchStridedSum(cudaStream_t stream, const StridedSum& sum) {
  return LaunchStridedSumOfMany(stream, sum, {sum.sources, static_cast<size_t>(sum.count)});
}

cudaError_t LaunchStridedCopy(cudaStream_t stream, const StridedCopy& copy) {
  const StridedBox to = Box(copy, copy.destination, copy.type, copy.strides);
  const StridedBox from = Box(copy, copy.source.data, copy.source.type, copy.source.strides);
  Ranges ranges;
  AddBox(to, ranges);
  AddBox(from, ranges);
  return LaunchDouble(stream, from.data == nullptr ? "strided_fill" : "strided_copy", ranges,
                      [to, from, value = copy.value](Ops& ops, Stream& s) {
                        return from.data == nullptr ? ops.Fill(s, OnWorker(to), value)
                                                    : ops.Copy(s, OnWorker(to), OnWorker(from));
                      });
}

}  // namespace dmuond::kernels::cuda
