// CudaOps' part that moves and adds boxes: contiguous ones by the copy engine or 16 bytes at a
// time, others element by element.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/box_walk.h"
#include "kernels/cpu/cast.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/task_checks.h"

namespace dmuond::kernels::cuda {
namespace {

using cpu::BoxWalk;

// The copy engine's pitches are 32-bit.
constexpr int64_t kPitchMax = (int64_t{1} << 31) - 1;

// One run from end to end, in this box.
bool IsRun(const BoxWalk& walk, size_t box) { return walk.dims() == 1 && walk.stride(box, 0) == 1; }
// Rows of consecutive elements.
bool IsRows(const BoxWalk& walk, size_t box, int64_t element_bytes) {
  return walk.dims() == 2 && walk.stride(box, 1) == 1 && walk.stride(box, 0) >= walk.size(1) &&
         walk.stride(box, 0) * element_bytes <= kPitchMax;
}

CUdeviceptr Address(const std::byte* data) { return reinterpret_cast<CUdeviceptr>(data); }

// Whose memory it is; -1: the host's.
int OwnerOf(const Driver& driver, const std::byte* data) {
  unsigned type = CU_MEMORYTYPE_HOST;
  int device = -1;
  // Memory that is not pinned is none that the driver knows.
  if (driver.pointer_get_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Address(data)) !=
          CUDA_SUCCESS ||
      type == CU_MEMORYTYPE_HOST) {
    return -1;
  }
  driver.pointer_get_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, Address(data));
  return device;
}

// One run or rows of one type, which the driver copies.
struct DriversCopy {
  bool run = false;
  bool rows = false;
};
DriversCopy CopyOf(const BoxWalk& walk, const StridedBox& dst, const StridedBox& src) {
  if (dst.dtype != src.dtype) return {};
  const auto bytes = static_cast<int64_t>(SizeOf(dst.dtype));
  return {IsRun(walk, 0) && IsRun(walk, 1), IsRows(walk, 0, bytes) && IsRows(walk, 1, bytes)};
}

template <typename Pass>
void SetShape(const BoxWalk& walk, Pass& pass) {
  pass.elements = walk.elements();
  pass.dims = walk.dims();
  for (int d = 0; d < walk.dims(); ++d) {
    pass.shape[d] = walk.size(d);
    pass.strides[d] = walk.stride(0, d);
  }
}

StridedOperand Operand(const BoxWalk& walk, size_t box, const StridedBox& from) {
  StridedOperand operand;
  operand.data = from.data;
  operand.type = static_cast<WeightType>(from.dtype);
  for (int d = 0; d < walk.dims(); ++d) operand.strides[d] = walk.stride(box, d);
  return operand;
}

}  // namespace

absl::Status CudaOps::Copy(Stream& stream, const StridedBox& dst, const StridedBox& src) {
  RETURN_IF_ERROR(CheckCopy(dst, src));
  if (Elements(dst) == 0) return absl::OkStatus();
  BoxWalk walk(dst);
  walk.Add(src);
  walk.Simplify();
  CUstream to = CudaStream::Of(stream);
  const auto bytes = static_cast<int64_t>(SizeOf(dst.dtype));
  const DriversCopy by_driver = CopyOf(walk, dst, src);
  if (by_driver.run) {
    return driver_.Check(
        driver_.memcpy_async(Address(dst.data), Address(src.data), walk.elements() * bytes, to),
        "cuMemcpyAsync");
  }
  if (by_driver.rows) {
    CUDA_MEMCPY2D rows{};
    rows.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
    rows.srcDevice = Address(src.data);
    rows.srcPitch = walk.stride(1, 0) * bytes;
    rows.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    rows.dstDevice = Address(dst.data);
    rows.dstPitch = walk.stride(0, 0) * bytes;
    rows.WidthInBytes = walk.size(1) * bytes;
    rows.Height = walk.size(0);
    return driver_.Check(driver_.memcpy_2d_async(&rows, to), "cuMemcpy2DAsync");
  }
  StridedCopy copy;
  copy.destination = dst.data;
  copy.type = static_cast<WeightType>(dst.dtype);
  SetShape(walk, copy);
  copy.source = Operand(walk, 1, src);
  return CudaStatus(LaunchStridedCopy(to, copy), "a strided copy");
}

bool CudaOps::CopiesByEngine(const StridedBox& dst, const StridedBox& src) const {
  if (Elements(dst) == 0) return true;
  BoxWalk walk(dst);
  walk.Add(src);
  walk.Simplify();
  const DriversCopy by_driver = CopyOf(walk, dst, src);
  return (by_driver.run || by_driver.rows) &&
         OwnerOf(driver_, dst.data) != OwnerOf(driver_, src.data);
}

absl::Status CudaOps::Fill(Stream& stream, const StridedBox& dst, float value) {
  RETURN_IF_ERROR(CheckBox(dst, "destination of a fill"));
  if (Elements(dst) == 0) return absl::OkStatus();
  BoxWalk walk(dst);
  walk.Simplify();
  CUstream to = CudaStream::Of(stream);
  if (IsRun(walk, 0)) {
    const CUdeviceptr address = Address(dst.data);
    const auto count = static_cast<size_t>(walk.elements());
    if (dst.dtype == DType::kF32) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      return driver_.Check(driver_.memset_d32_async(address, bits, count, to), "cuMemsetD32Async");
    }
    const uint16_t bits = dst.dtype == DType::kF16 ? cpu::ToF16(value) : cpu::ToBF16(value);
    return driver_.Check(driver_.memset_d16_async(address, bits, count, to), "cuMemsetD16Async");
  }
  StridedCopy fill;
  fill.destination = dst.data;
  fill.type = static_cast<WeightType>(dst.dtype);
  SetShape(walk, fill);
  fill.value = value;
  return CudaStatus(LaunchStridedCopy(to, fill), "a strided fill");
}

absl::Status CudaOps::AddSum(CUstream stream, const SumTask& task) {
  const auto level_of = [&](size_t source) {
    return task.levels.empty() ? uint8_t{0} : task.levels[source];
  };
  BoxWalk walk(task.dst);
  bool simple = reinterpret_cast<uintptr_t>(task.dst.data) % 16 == 0;
  SumPass pass;
  SumTree tree(pass);
  for (size_t i = 0; i < task.sources.size(); ++i) {
    const StridedBox& source = task.sources[i];
    simple = simple && reinterpret_cast<uintptr_t>(source.data) % 16 == 0 &&
             tree.Add(source.data, static_cast<WeightType>(source.dtype), level_of(i));
    if (source.data != nullptr) walk.Add(source);
  }
  walk.Simplify();
  for (size_t box = 0; box < walk.boxes(); ++box) simple = simple && IsRun(walk, box);
  if (simple) {
    tree.Finish();
    pass.destination = reinterpret_cast<float*>(task.dst.data);
    pass.elements = walk.elements();
    pass.factor = task.factor;
    pass.squares = task.squares;
    sums_[task.squares == nullptr ? 0 : 1].push_back(pass);
    return absl::OkStatus();
  }
  if (task.squares != nullptr) {
    squares_.push_back(
        {reinterpret_cast<const float*>(task.dst.data), walk.elements(), 0, task.squares});
  }
  StridedSum& sum = *strided_;
  sum.destination = reinterpret_cast<float*>(task.dst.data);
  sum.factor = task.factor;
  sum.count = static_cast<int>(task.sources.size());
  SetShape(walk, sum);
  many_.clear();
  size_t box = 1;
  for (size_t i = 0; i < task.sources.size(); ++i) {
    StridedOperand to =
        task.sources[i].data == nullptr ? StridedOperand{} : Operand(walk, box++, task.sources[i]);
    to.level = level_of(i);
    many_.push_back(to);
  }
  if (many_.size() > kStridedSourcesMax) {
    return CudaStatus(LaunchStridedSumOfMany(stream, sum, many_), "a strided sum of many");
  }
  std::copy(many_.begin(), many_.end(), sum.sources);
  return CudaStatus(LaunchStridedSum(stream, sum), "a strided sum");
}

absl::Status CudaOps::Sum(Stream& stream, std::span<const SumTask> tasks) {
  for (const SumTask& task : tasks) {
    RETURN_IF_ERROR(CheckSum(task));
  }
  for (std::vector<SumPass>& passes : sums_) passes.clear();
  squares_.clear();
  for (const SumTask& task : tasks) {
    if (Elements(task.dst) == 0) continue;
    RETURN_IF_ERROR(AddSum(CudaStream::Of(stream), task));
  }
  for (const std::vector<SumPass>& passes : sums_) {
    RETURN_IF_ERROR(CudaStatus(LaunchSum(CudaStream::Of(stream), passes), "an ordered sum"));
  }
  return CudaStatus(LaunchSquares(CudaStream::Of(stream), squares_), "squares of sums");
}

}  // namespace dmuond::kernels::cuda
