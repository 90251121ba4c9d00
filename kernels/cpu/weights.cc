#include "kernels/cpu/weights.h"

#include <algorithm>
#include <atomic>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/clones.h"

namespace dmuond::kernels::cpu {
namespace {

// Infinities and NaNs are the numbers whose exponent is all ones: the largest one, masked, says
// whether there are any.
template <typename Bits>
[[gnu::always_inline]] inline Bits LargestExponent(const Bits* values, size_t n, Bits mask) {
  Bits largest = 0;
  for (size_t i = 0; i < n; ++i) {
    largest = std::max(largest, static_cast<Bits>(values[i] & mask));
  }
  return largest;
}

DMUOND_CLONES uint32_t LargestExponent32(const uint32_t* values, size_t n) {
  return LargestExponent<uint32_t>(values, n, 0x7f800000U);
}
DMUOND_CLONES uint16_t LargestExponent16(const uint16_t* values, size_t n, uint16_t mask) {
  return LargestExponent<uint16_t>(values, n, mask);
}

}  // namespace

bool AllFinite(DType dtype, const void* values, size_t elements) {
  switch (dtype) {
    case DType::kF32:
      return LargestExponent32(static_cast<const uint32_t*>(values), elements) != 0x7f800000U;
    case DType::kBF16:
      return LargestExponent16(static_cast<const uint16_t*>(values), elements, 0x7f80U) != 0x7f80U;
    case DType::kF16:
      return LargestExponent16(static_cast<const uint16_t*>(values), elements, 0x7c00U) != 0x7c00U;
  }
  return true;
}

void StoreWeights(DType dtype, const float* masters, void* weights, int64_t begin, int64_t elements,
                  uint32_t* non_finite) {
  const auto n = static_cast<size_t>(elements);
  const void* made = masters + begin;
  DType made_dtype = DType::kF32;
  if (weights != nullptr) {
    std::byte* to = static_cast<std::byte*>(weights) + (static_cast<size_t>(begin) * SizeOf(dtype));
    Narrow(dtype, masters + begin, to, n);
    if (dtype != DType::kF32) {
      made = to;
      made_dtype = dtype;
    }
  }
  if (non_finite == nullptr || AllFinite(made_dtype, made, n)) return;
  std::atomic_ref<uint32_t>(*non_finite).store(1, std::memory_order_relaxed);
}

}  // namespace dmuond::kernels::cpu
