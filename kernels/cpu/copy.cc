#include "kernels/cpu/copy.h"

#include <array>
#include <cstring>
#include <limits>

#include "kernels/cpu/cast.h"

namespace dmuond::kernels::cpu {
namespace {

// What a conversion holds in the first-level cache at a time.
constexpr int64_t kChunk = 2048;

template <typename Word>
void CopyStrided(Word* dst, int64_t dst_stride, const Word* src, int64_t src_stride,
                 int64_t length) {
  for (int64_t i = 0; i < length; ++i) dst[i * dst_stride] = src[i * src_stride];
}

// Calls f with a value of the storage traits for dtype.
template <typename F>
void WithType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(F32{});
    case DType::kBF16:
      return f(BF16{});
    case DType::kF16:
      return f(F16{});
  }
}

void CopyRunSameType(DType dtype, std::byte* dst, int64_t dst_stride, const std::byte* src,
                     int64_t src_stride, int64_t length) {
  if (dst_stride == 1 && src_stride == 1) {
    std::memcpy(dst, src, static_cast<size_t>(length) * SizeOf(dtype));
  } else if (dtype == DType::kF32) {
    CopyStrided(reinterpret_cast<uint32_t*>(dst), dst_stride,
                reinterpret_cast<const uint32_t*>(src), src_stride, length);
  } else {
    CopyStrided(reinterpret_cast<uint16_t*>(dst), dst_stride,
                reinterpret_cast<const uint16_t*>(src), src_stride, length);
  }
}

// Stride 1 where a run is one element: whatever its stride says, it is contiguous.
int64_t RunStride(const BoxWalk& walk, size_t box) {
  return walk.contiguous_runs() ? 1 : walk.run_stride(box);
}

}  // namespace

void LoadRun(DType dtype, const std::byte* data, int64_t offset, int64_t stride, float* dst,
             int64_t length) {
  const std::byte* first = data + offset * static_cast<int64_t>(SizeOf(dtype));
  if (stride == 1) return Widen(dtype, first, dst, static_cast<size_t>(length));
  WithType(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto* from = reinterpret_cast<const typename Type::Storage*>(first);
    for (int64_t i = 0; i < length; ++i) dst[i] = Type::Load(from[i * stride]);
  });
}

void StoreRun(DType dtype, std::byte* data, int64_t offset, int64_t stride, const float* src,
              int64_t length) {
  std::byte* first = data + offset * static_cast<int64_t>(SizeOf(dtype));
  if (stride == 1) return Narrow(dtype, src, first, static_cast<size_t>(length));
  WithType(dtype, [&](auto type) {
    using Type = decltype(type);
    auto* to = reinterpret_cast<typename Type::Storage*>(first);
    for (int64_t i = 0; i < length; ++i) to[i * stride] = Type::Store(src[i]);
  });
}

void CopyElements(const BoxWalk& walk, const StridedBox& dst, const StridedBox& src, int64_t begin,
                  int64_t end) {
  const int64_t dst_stride = RunStride(walk, 0);
  const int64_t src_stride = RunStride(walk, 1);
  if (dst.dtype == src.dtype) {
    const auto size = static_cast<int64_t>(SizeOf(dst.dtype));
    walk.Runs(begin, end, std::numeric_limits<int64_t>::max(),
              [&](const int64_t* offsets, int64_t length) {
                CopyRunSameType(dst.dtype, dst.data + offsets[0] * size, dst_stride,
                                src.data + offsets[1] * size, src_stride, length);
              });
    return;
  }
  std::array<float, kChunk> chunk;
  walk.Runs(begin, end, kChunk, [&](const int64_t* offsets, int64_t length) {
    if (dst.dtype == DType::kF32 && dst_stride == 1) {
      LoadRun(src.dtype, src.data, offsets[1], src_stride,
              reinterpret_cast<float*>(dst.data) + offsets[0], length);
    } else {
      LoadRun(src.dtype, src.data, offsets[1], src_stride, chunk.data(), length);
      StoreRun(dst.dtype, dst.data, offsets[0], dst_stride, chunk.data(), length);
    }
  });
}

void FillElements(const BoxWalk& walk, const StridedBox& dst, float value, int64_t begin,
                  int64_t end) {
  const int64_t stride = RunStride(walk, 0);
  WithType(dst.dtype, [&](auto type) {
    using Type = decltype(type);
    const auto stored = Type::Store(value);
    auto* data = reinterpret_cast<typename Type::Storage*>(dst.data);
    walk.Runs(begin, end, std::numeric_limits<int64_t>::max(),
              [&](const int64_t* offsets, int64_t length) {
                auto* to = data + offsets[0];
                for (int64_t i = 0; i < length; ++i) to[i * stride] = stored;
              });
  });
}

}  // namespace dmuond::kernels::cpu
