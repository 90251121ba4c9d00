#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/cast.h"
#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/random_box.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
constexpr double kEps = 1e-8;
constexpr double kDecay = 0.01;

UpdateScalars ScalarsOf(int64_t t) {
  UpdateScalars scalars;
  scalars.learning_rate = kLearningRate;
  scalars.weight_decay = kDecay;
  scalars.beta1 = kBeta1;
  scalars.beta2 = kBeta2;
  scalars.eps = kEps;
  scalars.bias_correction1 = 1 - std::pow(kBeta1, static_cast<double>(t));
  scalars.bias_correction2 = 1 - std::pow(kBeta2, static_cast<double>(t));
  return scalars;
}

struct State {
  explicit State(int64_t elements)
      : m(static_cast<size_t>(elements)), v(m), master(m), weight(m.size()) {}
  std::vector<float> m, v, master;
  std::vector<uint16_t> weight;
};

// One update into poisoned memory.
State Step(int threads, const std::vector<float>& gradient, const State& in,
           const UpdateScalars& scalars) {
  auto device = *cpu::CpuDevice::Create(threads);
  auto stream = *device->CreateStream();
  const auto n = static_cast<int64_t>(gradient.size());
  State out(n);
  for (auto* values : {&out.m, &out.v, &out.master}) values->assign(gradient.size(), NAN);
  out.weight.assign(gradient.size(), 0xffff);
  // Two pieces, so that the second one starts in the middle of everything.
  const int64_t cut = n / 3;
  std::vector<AdamWPiece> pieces;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, n}}) {
    pieces.push_back({end - begin, DType::kBF16, gradient.data() + begin, in.m.data() + begin,
                      out.m.data() + begin, in.v.data() + begin, out.v.data() + begin,
                      in.master.data() + begin, out.master.data() + begin,
                      out.weight.data() + begin, &scalars});
  }
  EXPECT_TRUE(device->ops().UpdateAdamW(*stream, pieces).ok());
  return out;
}

TEST(AdamW, FollowsTheFormulaOverManySteps) {
  constexpr int64_t kElements = 200000;
  BoxRandom random(1);
  State state(kElements);
  state.master = RandomValues(kElements, random);
  std::vector<reference::AdamWState> expected(kElements);
  for (int64_t i = 0; i < kElements; ++i) expected[i].weight = state.master[i];
  for (int64_t t = 1; t <= 12; ++t) {
    std::vector<float> gradient = RandomValues(kElements, random);
    state = Step(2, gradient, state, ScalarsOf(t));
    for (int64_t i = 0; i < kElements; ++i) {
      reference::AdamWStep(kLearningRate, kBeta1, kBeta2, kEps, kDecay, t, gradient[i],
                           expected[i]);
    }
  }
  for (int64_t i = 0; i < kElements; ++i) {
    ASSERT_NEAR(state.master[i], expected[i].weight, 2e-6 * (1 + std::abs(expected[i].weight)));
    ASSERT_NEAR(state.m[i], expected[i].m, 1e-6);
    ASSERT_NEAR(state.v[i], expected[i].v, 1e-6 * (1e-3 + expected[i].v));
    ASSERT_EQ(state.weight[i], cpu::ToBF16(state.master[i]));
  }
}

TEST(AdamW, BitsDoNotDependOnThreadsAndTheClipFactorMultipliesTheGradient) {
  constexpr int64_t kElements = 300001;
  BoxRandom random(2);
  State state(kElements);
  state.master = RandomValues(kElements, random);
  std::vector<float> gradient = RandomValues(kElements, random);
  UpdateScalars clipped = ScalarsOf(1);
  clipped.gradient_factor = 0.25;
  const State one = Step(1, gradient, state, clipped);
  const State three = Step(3, gradient, state, clipped);
  EXPECT_EQ(one.master, three.master);
  EXPECT_EQ(one.v, three.v);
  for (float& g : gradient) g *= 0.25F;
  EXPECT_EQ(Step(2, gradient, state, ScalarsOf(1)).master, one.master);
}

TEST(AdamW, WithoutAGradientStatePassesThrough) {
  constexpr int64_t kElements = 70000;
  BoxRandom random(3);
  State state(kElements);
  state.m = RandomValues(kElements, random);
  state.v = RandomValues(kElements, random);
  state.master = RandomValues(kElements, random);
  UpdateScalars scalars = ScalarsOf(3);
  scalars.active = 0;
  const State out = Step(2, std::vector<float>(kElements, NAN), state, scalars);
  EXPECT_EQ(out.m, state.m);
  EXPECT_EQ(out.v, state.v);
  EXPECT_EQ(out.master, state.master);
  for (int64_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(out.weight[i], cpu::ToBF16(state.master[i]));
  }
}

}  // namespace
}  // namespace dmuond::kernels
