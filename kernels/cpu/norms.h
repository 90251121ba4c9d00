// Sums of squares in fp64, in a fixed order of addition.
#ifndef DMUOND_KERNELS_CPU_NORMS_H_
#define DMUOND_KERNELS_CPU_NORMS_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace dmuond::kernels::cpu {

// Memory that is read next: kChunk elements at each address. Where there is less, name an address
// that is in the cache anyway.
struct Ahead {
  std::array<const std::byte*, 2> sources{};
  int64_t element_bytes = sizeof(float);
};

// The sum of squares of a sequence, fed in chunks. The order of addition is a function of the
// number of elements alone: each chunk's four quarters go into eight running sums each, which carry
// on from chunk to chunk and are added at the end as one binary tree.
//
//   SquareSum sum;
//   for (…) sum.Add(chunk, n);  // n == kChunk, but for the last
//   total = sum.Total();
//
// Threads: one at a time.
class SquareSum {
 public:
  static constexpr int64_t kChunk = 4096;
  void Add(const float* chunk, int64_t elements);
  // Of dst[i] = chunk[i] * factor, kChunk elements, stored around the cache in the same pass
  // (stream_copy.h), while what is needed next comes into it.
  // REQUIRES: dst at the beginning of a line of 64 bytes.
  void AddStreaming(const float* chunk, float factor, float* dst, const Ahead& ahead);
  [[nodiscard]] double Total() const;

 private:
  static constexpr int64_t kStreams = 4;
  static constexpr int64_t kLanes = 8;
  alignas(64) std::array<double, kStreams * kLanes> sums_{};
};

// Of all of an array. Threads: any.
[[nodiscard]] double SumOfSquares(const float* data, int64_t elements);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_NORMS_H_
