#include "kernels/cpu/cast.h"

#include <cstring>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/f16c.h"
#include "kernels/cpu/four_streams.h"

namespace dmuond::kernels::cpu {
namespace {

DMUOND_CLONES void WidenBF16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
  ForFourStreams(static_cast<int64_t>(n), [=](int64_t i) { dst[i] = FromBF16(src[i]); });
}
DMUOND_CLONES void WidenF16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
  ForFourStreams(static_cast<int64_t>(n), [=](int64_t i) { dst[i] = FromF16(src[i]); });
}
DMUOND_CLONES void NarrowBF16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
  ForFourStreams(static_cast<int64_t>(n), [=](int64_t i) { dst[i] = ToBF16(src[i]); });
}
DMUOND_CLONES void NarrowF16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
  ForFourStreams(static_cast<int64_t>(n), [=](int64_t i) { dst[i] = ToF16(src[i]); });
}

}  // namespace

void Widen(DType from, const void* src, float* dst, size_t elements) {
  switch (from) {
    case DType::kF32:
      std::memcpy(dst, src, elements * sizeof(float));
      return;
    case DType::kBF16:
      return WidenBF16(static_cast<const uint16_t*>(src), dst, elements);
    case DType::kF16:
      if (HasF16C()) {
        return WidenF16C(static_cast<const uint16_t*>(src), dst, static_cast<int64_t>(elements));
      }
      return WidenF16(static_cast<const uint16_t*>(src), dst, elements);
  }
}

void Narrow(DType to, const float* src, void* dst, size_t elements) {
  switch (to) {
    case DType::kF32:
      std::memcpy(dst, src, elements * sizeof(float));
      return;
    case DType::kBF16:
      return NarrowBF16(src, static_cast<uint16_t*>(dst), elements);
    case DType::kF16:
      if (HasF16C()) {
        return NarrowF16C(src, static_cast<uint16_t*>(dst), static_cast<int64_t>(elements));
      }
      return NarrowF16(src, static_cast<uint16_t*>(dst), elements);
  }
}

}  // namespace dmuond::kernels::cpu
