#include "kernels/cpu/copy.h"

#include <array>
#include <cstring>
#include <limits>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/stream_copy.h"

namespace dmuond::kernels::cpu {
namespace {

// What a conversion holds in the first-level cache at a time.
constexpr int64_t kChunk = 4096;

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

void CopyStridedRun(DType dtype, std::byte* dst, int64_t dst_stride, const std::byte* src,
                    int64_t src_stride, int64_t length) {
  if (dtype == DType::kF32) {
    CopyStrided(reinterpret_cast<uint32_t*>(dst), dst_stride,
                reinterpret_cast<const uint32_t*>(src), src_stride, length);
  } else {
    CopyStrided(reinterpret_cast<uint16_t*>(dst), dst_stride,
                reinterpret_cast<const uint16_t*>(src), src_stride, length);
  }
}

// Collects short runs of one length and copies four at a time.
class RowCopier {
 public:
  ~RowCopier() { Flush(); }
  void Add(std::byte* dst, const std::byte* src, size_t bytes) {
    if (bytes != bytes_ || rows_ == kStreamRows) Flush();
    bytes_ = bytes;
    dst_[rows_] = dst;
    src_[rows_++] = src;
  }

 private:
  void Flush() {
    StreamCopyRows(dst_.data(), src_.data(), rows_, bytes_);
    rows_ = 0;
  }
  std::array<std::byte*, kStreamRows> dst_{};
  std::array<const std::byte*, kStreamRows> src_{};
  int rows_ = 0;
  size_t bytes_ = 0;
};

// From this size on a run is four streams by itself.
constexpr size_t kLongRun = size_t{256} << 10;

void CopyContiguousRuns(const BoxWalk& walk, const StridedBox& dst, const StridedBox& src,
                        int64_t begin, int64_t end) {
  const auto size = static_cast<int64_t>(SizeOf(dst.dtype));
  const bool stream = static_cast<size_t>(walk.elements() * size) >= kStreamBytesMin;
  {
    RowCopier rows;
    walk.Runs(begin, end, std::numeric_limits<int64_t>::max(),
              [&](const int64_t* offsets, int64_t length) {
                std::byte* to = dst.data + offsets[0] * size;
                const std::byte* from = src.data + offsets[1] * size;
                const auto bytes = static_cast<size_t>(length * size);
                if (!stream) {
                  std::memcpy(to, from, bytes);
                } else if (bytes < kLongRun) {
                  rows.Add(to, from, bytes);
                } else {
                  StreamCopy(to, from, bytes);
                }
              });
  }
  StreamFence();
}

void ConvertRuns(const BoxWalk& walk, const StridedBox& dst, int64_t dst_stride,
                 const StridedBox& src, int64_t src_stride, int64_t begin, int64_t end) {
  const size_t size = SizeOf(dst.dtype);
  const bool stream =
      dst_stride == 1 && static_cast<size_t>(walk.elements()) * size >= kStreamBytesMin;
  std::array<float, kChunk> wide;
  alignas(64) std::array<std::byte, kChunk * sizeof(float)> narrow;
  walk.Runs(begin, end, kChunk, [&](const int64_t* offsets, int64_t length) {
    const float* values = wide.data();
    if (src.dtype == DType::kF32 && src_stride == 1) {
      values = reinterpret_cast<const float*>(src.data) + offsets[1];
    } else {
      LoadRun(src.dtype, src.data, offsets[1], src_stride, wide.data(), length);
    }
    if (!stream) return StoreRun(dst.dtype, dst.data, offsets[0], dst_stride, values, length);
    StoreRun(dst.dtype, narrow.data(), 0, 1, values, length);
    StreamCopy(dst.data + offsets[0] * static_cast<int64_t>(size), narrow.data(),
               static_cast<size_t>(length) * size);
  });
  StreamFence();
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
  if (dst.dtype == src.dtype && dst_stride == 1 && src_stride == 1) {
    return CopyContiguousRuns(walk, dst, src, begin, end);
  }
  if (dst.dtype == src.dtype) {
    const auto size = static_cast<int64_t>(SizeOf(dst.dtype));
    walk.Runs(begin, end, std::numeric_limits<int64_t>::max(),
              [&](const int64_t* offsets, int64_t length) {
                CopyStridedRun(dst.dtype, dst.data + offsets[0] * size, dst_stride,
                               src.data + offsets[1] * size, src_stride, length);
              });
    return;
  }
  ConvertRuns(walk, dst, dst_stride, src, src_stride, begin, end);
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
