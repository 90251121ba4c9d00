// Random strided boxes for property tests: sizes, order of dimensions in memory, gaps and dtype.
#ifndef DMUOND_TESTS_KERNELS_RANDOM_BOX_H_
#define DMUOND_TESTS_KERNELS_RANDOM_BOX_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cpu/cast.h"
#include "kernels/ops.h"

namespace dmuond::kernels {

using Shape = std::vector<int64_t>;
using BoxRandom = std::mt19937_64;

// A box with its own memory. Gaps are filled with a pattern that nobody may change.
class OwnedBox {
 public:
  static constexpr std::byte kGap{0x5a};

  OwnedBox(const Shape& shape, DType dtype, BoxRandom& random) {
    box_.dtype = dtype;
    box_.dims = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), box_.shape.begin());
    // Half of all boxes lie as tensors usually do, the others in any order of dimensions.
    std::vector<int> order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
    int64_t stride = random() % 4 == 0 ? 2 : 1;
    for (auto d = order.rbegin(); d != order.rend(); ++d) {
      box_.strides[*d] = stride;
      stride *= std::max<int64_t>(1, shape[*d]);
      if (random() % 3 == 0) stride += static_cast<int64_t>(random() % 5);
    }
    memory_.assign(static_cast<size_t>(stride) * SizeOf(dtype) + 64, kGap);
    box_.data = memory_.data() + SizeOf(dtype) * (random() % 4);
  }

  [[nodiscard]] const StridedBox& box() const { return box_; }
  [[nodiscard]] StridedBox Absent() const {
    StridedBox box = box_;
    box.data = nullptr;
    return box;
  }
  [[nodiscard]] const std::vector<std::byte>& memory() const { return memory_; }

  // Calls visit(address) for each element, the last dimension fastest.
  template <typename Visit>
  void ForEach(Visit&& visit) const {
    int64_t count = 1;
    for (int d = 0; d < box_.dims; ++d) count *= box_.shape[d];
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i;
      int64_t offset = 0;
      for (int d = box_.dims - 1; d >= 0; --d) {
        offset += rest % box_.shape[d] * box_.strides[d];
        rest /= box_.shape[d];
      }
      visit(box_.data + offset * static_cast<int64_t>(SizeOf(box_.dtype)));
    }
  }

  void Write(const std::vector<float>& values) {
    size_t i = 0;
    ForEach([&](std::byte* at) { cpu::Narrow(box_.dtype, &values[i++], at, 1); });
  }
  [[nodiscard]] std::vector<float> Read() const {
    std::vector<float> values;
    ForEach([&](const std::byte* at) { cpu::Widen(box_.dtype, at, &values.emplace_back(), 1); });
    return values;
  }
  // True if every byte outside the elements is as it was.
  [[nodiscard]] bool GapsAreUntouched() const {
    std::vector<std::byte> copy = memory_;
    const std::byte* base = memory_.data();
    ForEach([&](const std::byte* at) {
      std::memset(copy.data() + (at - base), static_cast<int>(kGap), SizeOf(box_.dtype));
    });
    return std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == kGap; });
  }

 private:
  std::vector<std::byte> memory_;
  StridedBox box_;
};

inline int64_t Count(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

inline std::vector<float> RandomValues(int64_t count, BoxRandom& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

inline DType RandomDType(BoxRandom& random) { return static_cast<DType>(1 + random() % 3); }

}  // namespace dmuond::kernels

#endif  // DMUOND_TESTS_KERNELS_RANDOM_BOX_H_
