// Copies that go around the cache. A plain store first reads the line that it will overwrite; where
// a result is larger than the cache and read again much later, that read is a third of all traffic.
#ifndef DMUOND_KERNELS_CPU_STREAM_COPY_H_
#define DMUOND_KERNELS_CPU_STREAM_COPY_H_

#include <cstddef>

namespace dmuond::kernels::cpu {

// Results from this size on are streamed: twice a large second-level cache.
inline constexpr size_t kStreamBytesMin = size_t{4} << 20;

// memcpy with streaming stores, long runs as four pages at a time (four_streams.h says why). Call
// StreamFence before another thread may read dst.
void StreamCopy(void* dst, const void* src, size_t bytes);
// The same for `rows` rows of `bytes`, up to four at a time.
inline constexpr int kStreamRows = 4;
void StreamCopyRows(std::byte* const* dst, const std::byte* const* src, int rows, size_t bytes);
void StreamFence();

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_STREAM_COPY_H_
