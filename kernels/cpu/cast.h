// Conversions between fp32, bf16 and fp16: round to nearest even, subnormals and infinities exact,
// NaN stays a (quiet) NaN. Branch-free integer and fp32 code that every instruction set runs with
// the same result.
//
// The one-element functions are here to be inlined into loops; the loops over arrays are in
// cast.cc. Threads: any.
#ifndef DMUOND_KERNELS_CPU_CAST_H_
#define DMUOND_KERNELS_CPU_CAST_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/device.h"

namespace dmuond::kernels::cpu {

[[nodiscard]] inline float FromBF16(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// fp32 bits rounded to the upper 16 of them; the lower 16 are zero afterwards.
[[nodiscard]] inline uint32_t RoundBitsToBF16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
  const uint32_t quiet = (bits & 0xffff0000U) | 0x00400000U;
  return (bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
}

[[nodiscard]] inline uint16_t ToBF16(float x) {
  return static_cast<uint16_t>(RoundBitsToBF16(std::bit_cast<uint32_t>(x)) >> 16);
}

[[nodiscard]] inline float FromF16(uint16_t x) {
  const uint32_t sign = (static_cast<uint32_t>(x) & 0x8000U) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x) & 0x7fffU;
  // Normal numbers only need another exponent bias. A subnormal is an integer times 2^-24: put it
  // into the mantissa of 2^-14 and subtract 2^-14.
  const uint32_t shifted = magnitude << 13;
  const uint32_t normal = shifted + ((127U - 15U) << 23);
  const float subnormal =
      std::bit_cast<float>(shifted + ((127U - 14U) << 23)) - std::bit_cast<float>(113U << 23);
  const uint32_t special = shifted | 0x7f800000U | (magnitude > 0x7c00U ? 0x00400000U : 0U);
  uint32_t bits = magnitude < 0x0400U ? std::bit_cast<uint32_t>(subnormal) : normal;
  bits = magnitude >= 0x7c00U ? special : bits;
  return std::bit_cast<float>(bits | sign);
}

// The fp32 value nearest to x that fp16 can hold.
[[nodiscard]] inline float RoundToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits & 0x80000000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t normal = (magnitude + 0x0fffU + ((magnitude >> 13) & 1U)) & 0xffffe000U;
  // Below 2^-14 fp16 has steps of 2^-24, which is the last bit of fp32 numbers around 0.5.
  const float subnormal = (std::bit_cast<float>(magnitude) + 0.5F) - 0.5F;
  uint32_t rounded = magnitude < (113U << 23) ? std::bit_cast<uint32_t>(subnormal) : normal;
  rounded = rounded >= (143U << 23) ? 0x7f800000U : rounded;  // 65520 and more round to infinity
  rounded = magnitude > 0x7f800000U ? (magnitude & 0xffffe000U) | 0x00400000U : rounded;
  return std::bit_cast<float>(rounded | sign);
}

[[nodiscard]] inline uint16_t ToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(RoundToF16(x));
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t normal = (magnitude - ((127U - 15U) << 23)) >> 13;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  uint32_t half = magnitude < (113U << 23) ? subnormal : normal;
  half = magnitude >= 0x7f800000U ? 0x7c00U | ((magnitude >> 13) & 0x03ffU) : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000U));
}

[[nodiscard]] inline float RoundToBF16(float x) {
  return std::bit_cast<float>(RoundBitsToBF16(std::bit_cast<uint32_t>(x)));
}

// Element types as template parameters: storage type, Load and Store, and Round (fp32 to the
// nearest fp32 value that the type can hold).
struct F32 {
  using Storage = float;
  static float Load(float x) { return x; }
  static float Store(float x) { return x; }
  static float Round(float x) { return x; }
};
struct BF16 {
  using Storage = uint16_t;
  static float Load(uint16_t x) { return FromBF16(x); }
  static uint16_t Store(float x) { return ToBF16(x); }
  static float Round(float x) { return RoundToBF16(x); }
};
struct F16 {
  using Storage = uint16_t;
  static float Load(uint16_t x) { return FromF16(x); }
  static uint16_t Store(float x) { return ToF16(x); }
  static float Round(float x) { return RoundToF16(x); }
};

// dst[i] = src[i], contiguous; the arrays must not overlap.
void Widen(DType from, const void* src, float* dst, size_t elements);
void Narrow(DType to, const float* src, void* dst, size_t elements);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_CAST_H_
