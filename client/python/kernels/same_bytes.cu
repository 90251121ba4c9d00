// Compares many pairs of memory ranges bit by bit, in one launch.
//
// Every block gets as many chunks as every other, whichever pairs they are of: a few huge ranges
// and many tiny ones keep the whole device at work, at the speed of its memory. The table and the
// answer may lie in memory of the host that is mapped for the device: a block reads a few entries
// of the table, and only what differs is written.
//
// make_ptx.sh makes of this file what the package carries.
#include <cstdint>

namespace {

constexpr unsigned kThreads = 256;  // of every block
constexpr unsigned kBlocks = 4;     // that a multiprocessor has room for at once
constexpr uint64_t kChunkBytes = 16384;

__device__ bool Differ(uint8_t a, uint8_t b) { return a != b; }
__device__ bool Differ(uint16_t a, uint16_t b) { return a != b; }
__device__ bool Differ(uint32_t a, uint32_t b) { return a != b; }
__device__ bool Differ(uint4 a, uint4 b) {
  return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
}

// Returns whether this thread's share of the block's range differs. REQUIRES: `a` and `b` are
// multiples of sizeof(Word).
template <typename Word>
__device__ bool RangesDiffer(uint64_t a, uint64_t b, uint64_t bytes) {
  const auto* a_words = reinterpret_cast<const Word*>(a);
  const auto* b_words = reinterpret_cast<const Word*>(b);
  const uint64_t words = bytes / sizeof(Word);
  // So many words of each side are on their way to a thread at once.
  constexpr int kWords = sizeof(Word) == 16 ? 4 : 16;
  bool differ = false;
#pragma unroll kWords
  for (uint64_t i = threadIdx.x; i < words; i += kThreads) {
    // Nobody reads it again soon: it need not stay in the caches.
    differ |= Differ(__ldcs(a_words + i), __ldcs(b_words + i));
  }
  const uint64_t last = words * sizeof(Word) + threadIdx.x;  // of the bytes that make no word
  if (last < bytes) {
    differ |=
        *reinterpret_cast<const uint8_t*>(a + last) != *reinterpret_cast<const uint8_t*>(b + last);
  }
  return differ;
}

// As above, by the largest words that both addresses are multiples of.
__device__ bool RangesDiffer(uint64_t a, uint64_t b, uint64_t bytes) {
  const uint64_t both = a | b;
  if (both % 16 == 0) return RangesDiffer<uint4>(a, b, bytes);
  if (both % 4 == 0) return RangesDiffer<uint32_t>(a, b, bytes);
  if (both % 2 == 0) return RangesDiffer<uint16_t>(a, b, bytes);
  return RangesDiffer<uint8_t>(a, b, bytes);
}

struct Pair {
  uint64_t a;
  uint64_t b;
  uint64_t bytes;
  uint64_t first_chunk;  // so many chunks all pairs before it have together
};

// Returns the pair that has the chunk: the last one that begins there or before it. Others that
// begin there are empty.
__device__ uint32_t PairOf(uint64_t chunk, const Pair* pairs, uint32_t count) {
  uint32_t low = 0;
  uint32_t high = count;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (pairs[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

// Stores `round` to `different[i]` for every pair i that differs, and nothing for the others.
// REQUIRES: `chunks` is the sum of all pairs' ceil(bytes / kChunkBytes) and is not 0; blocks have
// kThreads threads. There may be any number of blocks; kBlocks for each multiprocessor are fastest.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    dmuond_same_bytes(const Pair* pairs, uint64_t* different, uint64_t chunks, uint64_t round,
                      uint32_t count) {
  uint64_t chunk = chunks * blockIdx.x / gridDim.x;
  const uint64_t end = chunks * (blockIdx.x + 1) / gridDim.x;
  if (chunk == end) return;
  for (uint32_t i = PairOf(chunk, pairs, count); chunk < end; ++i) {
    const Pair pair = pairs[i];
    const uint64_t from = (chunk - pair.first_chunk) * kChunkBytes;
    const uint64_t to = min(pair.bytes, (end - pair.first_chunk) * kChunkBytes);
    if (RangesDiffer(pair.a + from, pair.b + from, to - from)) different[i] = round;
    chunk = pair.first_chunk + (to + kChunkBytes - 1) / kChunkBytes;
  }
}
