#include "kernels/cpu/cast.h"

#include <cstring>

#include "kernels/cpu/clones.h"

namespace dmuond::kernels::cpu {
namespace {

DMUOND_CLONES void WidenBF16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = FromBF16(src[i]);
}
DMUOND_CLONES void WidenF16(const uint16_t* __restrict src, float* __restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = FromF16(src[i]);
}
DMUOND_CLONES void NarrowBF16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = ToBF16(src[i]);
}
DMUOND_CLONES void NarrowF16(const float* __restrict src, uint16_t* __restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = ToF16(src[i]);
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
      return NarrowF16(src, static_cast<uint16_t*>(dst), elements);
  }
}

}  // namespace dmuond::kernels::cpu
