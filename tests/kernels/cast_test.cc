#include "kernels/cpu/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace dmuond::kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value of a non-negative finite fp16 from the definition: 5 bits of exponent, 10 of mantissa.
double ValueOfHalf(int bits) {
  const int exponent = bits >> 10;
  const int mantissa = bits & 0x3ff;
  return exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
}

double ValueOfBF16(int bits) {
  const int exponent = bits >> 7;
  const int mantissa = bits & 0x7f;
  return exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
}

TEST(Cast, EveryHalfWidensToItsValueAndBack) {
  for (int bits = 0; bits < 0x7c00; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    ASSERT_EQ(FromF16(half), static_cast<float>(ValueOfHalf(bits))) << bits;
    ASSERT_EQ(FromF16(half | 0x8000), -FromF16(half)) << bits;
    ASSERT_EQ(ToF16(FromF16(half)), half);
    ASSERT_EQ(ToF16(FromF16(half | 0x8000)), half | 0x8000);
  }
  EXPECT_TRUE(std::signbit(FromF16(0x8000)));
  EXPECT_EQ(FromF16(0x7c00), kInfinity);
  EXPECT_EQ(FromF16(0xfc00), -kInfinity);
  for (int bits = 0x7c01; bits < 0x8000; ++bits) {
    ASSERT_TRUE(std::isnan(FromF16(static_cast<uint16_t>(bits))));
    ASSERT_GT(ToF16(FromF16(static_cast<uint16_t>(bits))) & 0x7fff, 0x7c00);
  }
}

// Between two neighbours everything below the middle goes down, everything above it up, and the
// middle to the even one. That is the whole definition of round to nearest even.
template <typename Type>
void ExpectNearestEvenBetween(uint16_t low, float lower, float upper, uint16_t high) {
  const auto middle = static_cast<float>((static_cast<double>(lower) + upper) / 2);
  ASSERT_EQ(static_cast<double>(middle), (static_cast<double>(lower) + upper) / 2);
  ASSERT_EQ(Type::Store(middle), low % 2 == 0 ? low : high) << low;
  ASSERT_EQ(Type::Store(std::nextafter(middle, 0.0F)), low);
  ASSERT_EQ(Type::Store(std::nextafter(middle, kInfinity)), high);
  ASSERT_EQ(Type::Store(-middle), (low % 2 == 0 ? low : high) | 0x8000);
  ASSERT_EQ(Type::Round(middle), Type::Load(Type::Store(middle)));
  ASSERT_EQ(Type::Round(std::nextafter(middle, 0.0F)), lower);
  ASSERT_EQ(Type::Round(std::nextafter(middle, kInfinity)), Type::Load(high));
}

TEST(Cast, HalfRoundsToNearestEvenBetweenAllNeighbours) {
  for (int bits = 0; bits < 0x7bff; ++bits) {
    ExpectNearestEvenBetween<F16>(
        static_cast<uint16_t>(bits), static_cast<float>(ValueOfHalf(bits)),
        static_cast<float>(ValueOfHalf(bits + 1)), static_cast<uint16_t>(bits + 1));
  }
  // The last middle lies between 65504 and what would be 65536.
  ExpectNearestEvenBetween<F16>(0x7bff, 65504.0F, 65536.0F, 0x7c00);
}

TEST(Cast, BF16RoundsToNearestEvenBetweenAllNeighbours) {
  for (int bits = 0; bits < 0x7f7f; ++bits) {
    ExpectNearestEvenBetween<BF16>(
        static_cast<uint16_t>(bits), static_cast<float>(ValueOfBF16(bits)),
        static_cast<float>(ValueOfBF16(bits + 1)), static_cast<uint16_t>(bits + 1));
  }
}

TEST(Cast, InfinityAndNanStayWhatTheyAre) {
  EXPECT_EQ(ToF16(kInfinity), 0x7c00);
  EXPECT_EQ(ToF16(-kInfinity), 0xfc00);
  EXPECT_EQ(ToF16(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(ToBF16(kInfinity), 0x7f80);
  EXPECT_EQ(ToBF16(std::numeric_limits<float>::max()), 0x7f80);
  for (const uint32_t bits : {0x7f800001U, 0x7fffffffU, 0xff800001U, 0x7fc00000U}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(FromF16(ToF16(nan))));
    EXPECT_TRUE(std::isnan(FromBF16(ToBF16(nan))));
    EXPECT_TRUE(std::isnan(RoundToF16(nan)));
    EXPECT_TRUE(std::isnan(RoundToBF16(nan)));
  }
}

// The array versions are other machine code: vectors, one per instruction set, or the processor's
// own conversions.
TEST(Cast, ArraysGiveTheSameBitsAsSingleElements) {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0xfffe0000U; bits += 65537U) {
    values.push_back(std::bit_cast<float>(bits));
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> narrow(values.size(), 0xabcd);
    Narrow(dtype, values.data(), narrow.data(), values.size());
    std::vector<float> wide(values.size(), -1.0F);
    Widen(dtype, narrow.data(), wide.data(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const bool half = dtype == DType::kF16;
      ASSERT_EQ(narrow[i], half ? ToF16(values[i]) : ToBF16(values[i])) << values[i];
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]),
                std::bit_cast<uint32_t>(half ? FromF16(narrow[i]) : FromBF16(narrow[i])));
    }
  }
}

}  // namespace
}  // namespace dmuond::kernels::cpu
