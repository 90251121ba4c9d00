// Doubles of element_passes.h and strided_passes.h.
#include <algorithm>
#include <utility>

#include "kernels/cpu/cast.h"
#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/strided_passes.h"
#include "tests/fake_cuda/doubles/doubles.h"

namespace dmuond::kernels::cuda {
namespace {

DType TypeOf(WeightType type) { return static_cast<DType>(type); }

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

}  // namespace

cudaError_t LaunchSum(cudaStream_t stream, std::span<const SumPass> passes) {
  Ranges ranges;
  for (const SumPass& pass : passes) {
    const auto elements = static_cast<size_t>(pass.elements);
    ranges.Add(pass.destination, elements * sizeof(float));
    for (int i = 0; i < pass.count; ++i) {
      ranges.Add(pass.sources[i], elements * SizeOf(TypeOf(pass.types[i])));
    }
    ranges.Add(pass.squares, static_cast<size_t>(NormBlocks(0, pass.elements)) * sizeof(double),
               sizeof(double));
  }
  std::vector<SumPass> kept(passes.begin(), passes.end());
  return LaunchDouble(stream, "sum", ranges, [kept = std::move(kept)](Ops& ops, Stream& s) {
    for (const SumPass& pass : kept) {
      const auto elements = static_cast<size_t>(pass.elements);
      std::vector<std::vector<float>> nodes(std::max(pass.count, 1), std::vector<float>(elements));
      for (int i = 0; i < pass.count; ++i) {
        const auto* const source = static_cast<const std::byte*>(pass.sources[i]);
        cpu::Widen(TypeOf(pass.types[i]), cuda::OnWorker(source), nodes[i].data(), elements);
      }
      for (int i = 0; i + 1 < pass.count; ++i) {
        std::vector<float>& left = nodes[pass.additions[i].left];
        const std::vector<float>& right = nodes[pass.additions[i].right];
        for (size_t e = 0; e < elements; ++e) left[e] += right[e];
      }
      float* const destination = cuda::OnWorker(pass.destination);
      for (size_t e = 0; e < elements; ++e) {
        destination[e] = pass.factor == 1.0F ? nodes[0][e] : nodes[0][e] * pass.factor;
      }
      if (pass.squares == nullptr) continue;
      const NormTask task{destination, pass.elements, 0, cuda::OnWorker(pass.squares)};
      if (absl::Status status = ops.SumsOfSquares(s, {&task, 1}); !status.ok()) return status;
    }
    return absl::OkStatus();
  });
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
  const StridedBox destination = Box(sum, sum.destination, WeightType::kF32, sum.strides);
  std::vector<StridedBox> boxes;
  std::vector<uint8_t> levels;
  Ranges ranges;
  AddBox(destination, ranges);
  for (const StridedOperand& source : sources) {
    boxes.push_back(Box(sum, source.data, source.type, source.strides));
    levels.push_back(source.level);
    AddBox(boxes.back(), ranges);
  }
  return LaunchDouble(stream, "strided_sum", ranges,
                      [=, factor = sum.factor, boxes = std::move(boxes)](Ops& ops, Stream& s) {
                        std::vector<StridedBox> on_worker;
                        for (const StridedBox& box : boxes) on_worker.push_back(OnWorker(box));
                        const SumTask task{OnWorker(destination), on_worker, levels, factor};
                        return ops.Sum(s, {&task, 1});
                      });
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
