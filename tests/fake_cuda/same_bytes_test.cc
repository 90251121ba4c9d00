// The kernel of client/python/kernels/same_bytes.cu, compiled for the host: its threads run one
// after the other. They do not need each other.
#include <gtest/gtest.h>
#include <vector_types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace {
dim3 gridDim;     // NOLINT: what CUDA calls them
uint3 blockIdx;   // NOLINT
uint3 threadIdx;  // NOLINT
template <typename Word>
Word __ldcs(const Word* from) {  // NOLINT
  EXPECT_EQ(reinterpret_cast<uintptr_t>(from) % alignof(Word), 0U);
  return *from;
}
using std::min;
}  // namespace
#undef __device__
#undef __global__
#undef __launch_bounds__
#define __device__
#define __global__
#define __launch_bounds__(threads, blocks)
#include "client/python/kernels/same_bytes.cu"

namespace {

// Sides that are exactly as long as their ranges, so that a sanitizer sees what is read beside
// them.
struct Sides {
  std::vector<uint8_t> a;
  std::vector<uint8_t> b;
  size_t a_begin = 0;
  size_t b_begin = 0;
  uint64_t bytes = 0;
};

Sides MakeSides(uint64_t bytes, size_t a_begin, size_t b_begin) {
  Sides sides{std::vector<uint8_t>(a_begin + bytes), std::vector<uint8_t>(b_begin + bytes), a_begin,
              b_begin, bytes};
  for (uint64_t i = 0; i < bytes; ++i) {
    sides.a[a_begin + i] = sides.b[b_begin + i] = static_cast<uint8_t>(i * 37 + i / 256);
  }
  // What lies before the ranges differs.
  std::fill_n(sides.a.begin(), a_begin, uint8_t{1});
  std::fill_n(sides.b.begin(), b_begin, uint8_t{2});
  return sides;
}

// The indices of those that differ, by so many blocks.
std::vector<size_t> Differing(const std::vector<Sides>& all, unsigned blocks) {
  std::vector<Pair> pairs;
  uint64_t chunks = 0;
  for (const Sides& sides : all) {
    pairs.push_back({reinterpret_cast<uint64_t>(sides.a.data() + sides.a_begin),
                     reinterpret_cast<uint64_t>(sides.b.data() + sides.b_begin), sides.bytes,
                     chunks});
    chunks += (sides.bytes + kChunkBytes - 1) / kChunkBytes;
  }
  constexpr uint64_t kRound = 7;
  std::vector<uint64_t> different(pairs.size(), kRound - 1);
  gridDim = dim3(blocks);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < kThreads; ++threadIdx.x) {
      dmuond_same_bytes(pairs.data(), different.data(), chunks, kRound,
                        static_cast<uint32_t>(pairs.size()));
    }
  }
  std::vector<size_t> found;
  for (size_t i = 0; i < different.size(); ++i) {
    if (different[i] == kRound) found.push_back(i);
  }
  return found;
}

TEST(SameBytes, EveryByteCounts) {
  for (const size_t a_begin : {0, 1, 2, 4, 8}) {
    for (const uint64_t bytes : {1, 15, 16, 17, 33}) {
      for (uint64_t at = 0; at < bytes; ++at) {
        std::vector<Sides> all = {MakeSides(bytes, a_begin, 0)};
        EXPECT_TRUE(Differing(all, 1).empty());
        all[0].b[at] ^= 128;
        EXPECT_EQ(Differing(all, 1), std::vector<size_t>{0}) << at << " of " << bytes;
      }
    }
  }
}

TEST(SameBytes, EveryChunkOfEveryPairHasABlock) {
  const uint64_t chunk = kChunkBytes;
  const uint64_t sizes[] = {0, 1, 5 * chunk, 0, 0, chunk, chunk + 1, 16, 3 * chunk - 1, 0};
  for (const unsigned blocks : {1, 2, 3, 7, 13, 40}) {
    std::vector<Sides> all;
    for (const uint64_t bytes : sizes) all.push_back(MakeSides(bytes, 0, 0));
    EXPECT_TRUE(Differing(all, blocks).empty());
    for (size_t i = 0; i < all.size(); ++i) {
      for (uint64_t at = 0; at < all[i].bytes; at += std::max<uint64_t>(1, chunk / 2 - 1)) {
        all[i].a[at] ^= 1;
        EXPECT_EQ(Differing(all, blocks), std::vector<size_t>{i}) << at << ", " << blocks;
        all[i].a[at] ^= 1;
      }
    }
  }
}

TEST(SameBytes, PairsThatDifferAreFoundAmongOthers) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<Sides> all;
    std::vector<size_t> expected;
    for (size_t i = 0; i < 30; ++i) {
      const uint64_t bytes = random() % (1U << (random() % 17));
      all.push_back(MakeSides(bytes, random() % 17, random() % 17));
      Sides& sides = all.back();
      if (bytes == 0 || random() % 3 != 0) continue;
      sides.b[sides.b_begin + random() % bytes] ^= 1;
      expected.push_back(i);
    }
    EXPECT_EQ(Differing(all, 1 + random() % 50), expected);
  }
}

}  // namespace
