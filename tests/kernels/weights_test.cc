#include "kernels/cpu/weights.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cast.h"

namespace dmuond::kernels::cpu {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// Whether weights made of these masters count as not finite.
bool Flagged(DType dtype, const std::vector<float>& masters, bool stored = true) {
  std::vector<float> weights(masters.size());
  uint32_t flag = 0;
  StoreWeights(dtype, masters.data(), stored ? weights.data() : nullptr, 0,
               static_cast<int64_t>(masters.size()), &flag);
  return flag != 0;
}

TEST(WeightsTest, OneThatIsNoNumberIsFoundWhereverItIs) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t elements : {1UL, 7UL, 64UL, 1003UL}) {
      std::vector<float> masters(elements, -1.5F);
      masters[elements / 2] = 0;
      EXPECT_FALSE(Flagged(dtype, masters));
      for (const size_t at : {size_t{0}, elements / 3, elements - 1}) {
        for (const float wrong : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
          std::vector<float> spoilt = masters;
          spoilt[at] = wrong;
          EXPECT_TRUE(Flagged(dtype, spoilt)) << at << " of " << elements;
          EXPECT_TRUE(Flagged(dtype, spoilt, /*stored=*/false)) << "the master alone";
        }
      }
    }
  }
}

TEST(WeightsTest, AFiniteMasterThatTheTrainersTypeCannotHoldCounts) {
  EXPECT_FALSE(Flagged(DType::kF16, {65504.0F, -65519.0F}));
  EXPECT_TRUE(Flagged(DType::kF16, {1.0F, 65520.0F}));
  EXPECT_TRUE(Flagged(DType::kBF16, {1.0F, -kLargest}));
  EXPECT_FALSE(Flagged(DType::kF32, {1.0F, -kLargest}));
}

TEST(WeightsTest, WithoutAFlagWeightsAreStoredAllTheSame) {
  const std::vector<float> masters = {1.0F, HUGE_VALF, 2.0F};
  std::vector<uint16_t> weights(3);
  StoreWeights(DType::kBF16, masters.data(), weights.data(), 1, 2, nullptr);
  EXPECT_EQ(weights, (std::vector<uint16_t>{0, ToBF16(HUGE_VALF), ToBF16(2.0F)}));
}

}  // namespace
}  // namespace dmuond::kernels::cpu
