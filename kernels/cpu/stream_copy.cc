#include "kernels/cpu/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace dmuond::kernels::cpu {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;
constexpr size_t kPrefetchBytes = 32 * kLine;
constexpr size_t kPage = 4096;
constexpr size_t kGroup = kStreamRows * kPage;

size_t BytesToLine(const std::byte* address) {
  return (kLine - reinterpret_cast<uintptr_t>(address) % kLine) % kLine;
}

// REQUIRES: `to` at the beginning of a line.
inline void StreamLine(std::byte* to, const std::byte* from) {
  const auto* words = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  const __m128i w0 = _mm_loadu_si128(words);
  const __m128i w1 = _mm_loadu_si128(words + 1);
  const __m128i w2 = _mm_loadu_si128(words + 2);
  const __m128i w3 = _mm_loadu_si128(words + 3);
  _mm_stream_si128(out, w0);
  _mm_stream_si128(out + 1, w1);
  _mm_stream_si128(out + 2, w2);
  _mm_stream_si128(out + 3, w3);
}

// Four pages in lockstep, while the next four come into the cache.
// REQUIRES: `to` at the beginning of a line.
void StreamGroup(std::byte* to, const std::byte* from, bool another_follows) {
  for (size_t i = 0; i < kPage; i += kLine) {
    for (size_t page = i; page < kGroup; page += kPage) {
      if (another_follows) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kGroup + page), _MM_HINT_T0);
      }
      StreamLine(to + page, from + page);
    }
  }
}

}  // namespace

void StreamCopy(void* dst, const void* src, size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const size_t head = std::min(bytes, BytesToLine(to));
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + kGroup <= bytes; i += kGroup) {
    StreamGroup(to + i, from + i, i + 2 * kGroup <= bytes);
  }
  for (; i + kLine <= bytes; i += kLine) StreamLine(to + i, from + i);
  std::memcpy(to + i, from + i, bytes - i);
}

void StreamCopyRows(std::byte* const* dst, const std::byte* const* src, int rows, size_t bytes) {
  if (rows < kStreamRows || bytes < 2 * kLine) {
    for (int row = 0; row < rows; ++row) StreamCopy(dst[row], src[row], bytes);
    return;
  }
  std::byte* to[kStreamRows];
  const std::byte* from[kStreamRows];
  size_t head_max = 0;
  for (int row = 0; row < kStreamRows; ++row) {
    const size_t head = BytesToLine(dst[row]);
    head_max = std::max(head_max, head);
    std::memcpy(dst[row], src[row], head);
    to[row] = dst[row] + head;
    from[row] = src[row] + head;
  }
  const size_t lines = (bytes - head_max) / kLine;  // whole ones that every row has
  // Rows usually lie at one distance from each other, and the next four follow: while these are
  // copied the first lines of those come into the cache. A wrong guess costs bandwidth, nothing
  // else.
  const ptrdiff_t next = kStreamRows * (src[1] - src[0]);
  for (size_t i = 0; i < lines * kLine; i += kLine) {
    for (int row = 0; row < kStreamRows; ++row) {
      if (i < kPrefetchBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from[row] + next + i), _MM_HINT_T0);
      }
      StreamLine(to[row] + i, from[row] + i);
    }
  }
  for (int row = 0; row < kStreamRows; ++row) {
    const size_t done = static_cast<size_t>(to[row] - dst[row]) + lines * kLine;
    std::memcpy(dst[row] + done, src[row] + done, bytes - done);
  }
}

void StreamFence() { _mm_sfence(); }

#else

void StreamCopy(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }
void StreamCopyRows(std::byte* const* dst, const std::byte* const* src, int rows, size_t bytes) {
  for (int row = 0; row < rows; ++row) std::memcpy(dst[row], src[row], bytes);
}
void StreamFence() {}

#endif

}  // namespace dmuond::kernels::cpu
