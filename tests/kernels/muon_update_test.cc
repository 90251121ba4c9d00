// The whole Muon update of a batch: momentum, Newton-Schulz, decay, weights; and what it must not
// depend on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cast.h"
#include "kernels/presets.h"
#include "tests/kernels/cpu_muon_helpers.h"
#include "tests/kernels/random_box.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels::cpu {
namespace {

using reference::Gaussian;
using reference::Matrix;

reference::MuonRules RulesOf(const MuonConfig& config) {
  return {.ema = config.momentum == MomentumForm::kEma,
          .nesterov = config.nesterov,
          .steps = config.newton_schulz.coefficients,
          .schatten4 = config.newton_schulz.norm == NormRule::kSchatten4,
          .scale = [rule = config.scale](int64_t m, int64_t n) {
            const auto rows = static_cast<double>(m);
            const auto cols = static_cast<double>(n);
            return rule == ScaleRule::kOriginal ? std::sqrt(std::max(1.0, rows / cols))
                                                : 0.2 * std::sqrt(std::max(rows, cols));
          }};
}

// Twelve steps with schedules of learning rate and momentum against the reference; the difference
// of the accumulated weight change.
double AccumulatedError(const MuonConfig& config, int64_t rows, int64_t cols) {
  reference::Random random(11);
  TestLane lane(2);
  std::vector<TestMatrix> batch(1, TestMatrix(rows, cols, DType::kF32));
  const Matrix start(rows, cols, Gaussian(rows, cols, random).ToFloat());
  batch[0].master = start.ToFloat();
  reference::MuonState state{start, Matrix(rows, cols)};
  const Matrix drift = Gaussian(rows, cols, random);
  for (int step = 0; step < 12; ++step) {
    const double learning_rate = 0.02 * (1 - step / 20.0);
    const double momentum = 0.85 + 0.01 * step;
    const Matrix gradient(rows, cols,
                          Combine(1, Gaussian(rows, cols, random), 0.5, drift).ToFloat());
    batch[0].gradient = gradient.ToFloat();
    batch[0].scalars.learning_rate = learning_rate;
    batch[0].scalars.momentum = momentum;
    batch[0].scalars.weight_decay = 0.1;
    lane.Update(config, rows, cols, batch);
    MuonStep(RulesOf(config), learning_rate, momentum, 0.1, gradient, state);
  }
  const Matrix end(rows, cols, batch[0].master);
  return RelativeDifference(Combine(1, end, -1, start), Combine(1, state.weight, -1, start));
}

// The bounds of docs/maths.md, section 2. They leave out 1 x 1, whose changes may cancel.
double HalfPrecisionBound(const std::string& preset, int64_t p, int64_t q) {
  if (preset == "dmuon") return p >= 16 ? 5e-3 : 0.02;
  return p >= 8 || q >= 32 ? 0.03 : 0.075;
}

TEST(MuonUpdate, EveryPresetFollowsItsFormulas) {
  for (const std::string name : kPresetNames) {
    for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{96, 96},
                                                                             {64, 200},
                                                                             {200, 64},
                                                                             {1, 33},
                                                                             {1, 4},
                                                                             {2, 2},
                                                                             {3, 3},
                                                                             {8, 8},
                                                                             {16, 24},
                                                                             {32, 48}}) {
      const int64_t p = std::min(rows, cols);
      const int64_t q = std::max(rows, cols);
      MuonConfig config = *FindPreset(name);
      EXPECT_LT(AccumulatedError(config, rows, cols), HalfPrecisionBound(name, p, q))
          << name << " " << rows << "x" << cols;
      config.newton_schulz.dtype = DType::kF32;
      EXPECT_LT(AccumulatedError(config, rows, cols), name == "dmuon" && p >= 8 ? 2e-5 : 5e-5)
          << name << " " << rows << "x" << cols;
      config.nesterov = false;
      EXPECT_LT(AccumulatedError(config, rows, cols), 5e-5) << name << " " << rows;
      config = *FindPreset(name);
      config.newton_schulz.norm = NormRule::kSchatten4;
      EXPECT_LT(AccumulatedError(config, rows, cols), HalfPrecisionBound(name, p, q))
          << name << " " << rows << "x" << cols;
      config.newton_schulz.dtype = DType::kF32;
      EXPECT_LT(AccumulatedError(config, rows, cols), name == "dmuon" && p >= 8 ? 2e-5 : 5e-5)
          << name << " " << rows << "x" << cols;
    }
  }
}

std::vector<TestMatrix> RandomBatch(int64_t rows, int64_t cols, int count, DType dtype) {
  BoxRandom random(21);
  std::vector<TestMatrix> batch;
  for (int i = 0; i < count; ++i) {
    TestMatrix& m = batch.emplace_back(rows, cols, dtype);
    m.gradient = RandomValues(rows * cols, random);
    m.momentum = RandomValues(rows * cols, random);
    m.master = RandomValues(rows * cols, random);
    m.scalars.learning_rate = 0.01 * (i + 1);
    m.scalars.momentum = 0.95;
    m.scalars.weight_decay = 0.1;
    m.scalars.gradient_factor = 1.0 / (i + 1);
  }
  return batch;
}

void ExpectSameBits(const TestMatrix& a, const TestMatrix& b) {
  EXPECT_EQ(a.momentum, b.momentum);
  EXPECT_EQ(a.master, b.master);
  EXPECT_EQ(a.weight, b.weight);
}

TEST(MuonUpdate, BatchNeighboursAndThreadsDoNotChangeBits) {
  constexpr int kCount = 4;  // with 3 threads: three whole matrices and one by panels
  MuonConfig schatten4 = *FindPreset("dmuon");
  schatten4.newton_schulz.norm = NormRule::kSchatten4;
  for (const MuonConfig& config : {*FindPreset("dmuon"), *FindPreset("torch"), schatten4}) {
    // Two panels of symmetric products, two of applications, several parts of elementwise passes.
    for (const auto& [rows, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{270, 800}, {800, 270}}) {
      TestLane lane(1);
      std::vector<TestMatrix> alone;
      for (TestMatrix& m : RandomBatch(rows, cols, kCount, DType::kBF16)) {
        std::vector<TestMatrix> one = {m};
        lane.Update(config, rows, cols, one, DType::kBF16);
        alone.push_back(one[0]);
      }
      for (const int threads : {1, 2, 3}) {
        TestLane together(threads);
        std::vector<TestMatrix> batch = RandomBatch(rows, cols, kCount, DType::kBF16);
        together.Update(config, rows, cols, batch, DType::kBF16);
        for (int i = 0; i < kCount; ++i) ExpectSameBits(batch[i], alone[i]);
      }
    }
  }
}

TEST(MuonUpdate, BatchesOf8And56GiveTheBitsOfOne) {
  const MuonConfig config = *FindPreset("dmuon");
  TestLane lane(3);
  std::vector<TestMatrix> all = RandomBatch(48, 80, 56, DType::kF16);
  std::vector<TestMatrix> eight(all.begin(), all.begin() + 8);
  std::vector<TestMatrix> one(all.begin(), all.begin() + 1);
  lane.Update(config, 48, 80, all, DType::kF16);
  lane.Update(config, 48, 80, eight, DType::kF16);
  lane.Update(config, 48, 80, one, DType::kF16);
  for (int i = 0; i < 8; ++i) ExpectSameBits(eight[i], all[i]);
  ExpectSameBits(one[0], all[0]);
}

TEST(MuonUpdate, WeightsAreTheMastersRounded) {
  const MuonConfig config = *FindPreset("dmuon");
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    TestLane lane(2);
    std::vector<TestMatrix> batch = RandomBatch(70, 50, 3, dtype);
    lane.Update(config, 70, 50, batch, dtype);
    for (const TestMatrix& m : batch) {
      std::vector<std::byte> expected(m.weight.size());
      Narrow(dtype, m.master.data(), expected.data(), m.master.size());
      EXPECT_EQ(m.weight, expected);
    }
  }
}

TEST(MuonUpdate, WithoutAGradientStatePassesThrough) {
  const MuonConfig config = *FindPreset("keller");
  TestLane lane(2);
  std::vector<TestMatrix> batch = RandomBatch(64, 96, 3, DType::kF32);
  batch[1].scalars.active = 0;
  batch[1].gradient.assign(batch[1].gradient.size(), NAN);
  const TestMatrix before = batch[1];
  std::vector<TestMatrix> neighbour = {batch[0]};
  lane.Update(config, 64, 96, batch);
  lane.Update(config, 64, 96, neighbour);
  EXPECT_EQ(batch[1].momentum, before.momentum);
  EXPECT_EQ(batch[1].master, before.master);
  ExpectSameBits(batch[0], neighbour[0]);
}

TEST(MuonUpdate, AZeroMatrixOnlyDecays) {
  for (const char* name : kPresetNames) {
    const MuonConfig config = *FindPreset(name);
    TestLane lane(2);
    std::vector<TestMatrix> batch = RandomBatch(64, 96, 2, DType::kF32);
    batch[0].gradient.assign(batch[0].gradient.size(), 0.0F);
    batch[0].momentum = batch[0].gradient;
    const std::vector<float> before = batch[0].master;
    lane.Update(config, 64, 96, batch);
    const auto decay = static_cast<float>(1 - 0.01 * 0.1);
    for (size_t i = 0; i < before.size(); ++i) ASSERT_EQ(batch[0].master[i], before[i] * decay);
  }
}

// From the change of masters, which start at zero: rate * scale * O.
TEST(MuonUpdate, TellsTheSquaresOfAnUpdate) {
  for (const char* name : kPresetNames) {
    const MuonConfig config = *FindPreset(name);
    for (const auto& [rows, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{96, 96}, {200, 64}, {1, 33}, {300, 700}}) {
      SCOPED_TRACE(absl::StrCat(name, ", ", rows, " x ", cols));
      TestLane lane(2);
      std::vector<TestMatrix> batch = RandomBatch(rows, cols, 3, DType::kF32);
      for (TestMatrix& m : batch) m.master.assign(m.master.size(), 0.0F);
      batch[1].gradient.assign(batch[1].gradient.size(), 0.0F);  // no direction
      batch[1].momentum = batch[1].gradient;
      batch[2].scalars.active = 0;
      lane.Update(config, rows, cols, batch);
      double squares = 0;
      for (const float x : batch[0].master) squares += static_cast<double>(x) * x;
      squares /= std::pow(batch[0].scalars.learning_rate, 2);
      EXPECT_NEAR(batch[0].update_squares, squares, 1e-6 * squares);
      EXPECT_EQ(batch[1].update_squares, 0);
      EXPECT_EQ(batch[2].update_squares, 0);
    }
  }
}

TEST(MuonUpdate, MomentumStaysFiniteAtTheEndOfTheRange) {
  for (const char* name : {"dmuon", "torch"}) {
    const MuonConfig config = *FindPreset(name);
    TestLane lane(1);
    std::vector<TestMatrix> batch(1, TestMatrix(16, 24, DType::kF32));
    batch[0].gradient.assign(16 * 24, 3.4e38F);
    batch[0].scalars.learning_rate = 0.1;
    batch[0].scalars.momentum = 0.95;
    for (int step = 0; step < 3; ++step) {
      lane.Update(config, 16, 24, batch);
      for (const float x : batch[0].momentum) ASSERT_TRUE(std::isfinite(x));
      for (const float x : batch[0].master) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST(MuonUpdate, NonsenseIsRefused) {
  auto device = *CpuDevice::Create(1);
  auto stream = *device->CreateStream();
  MuonConfig config;  // without coefficients
  EXPECT_EQ(
      device->ops().UpdateMuon(*stream, {.rows = 4, .cols = 4, .config = &config}, nullptr).code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->ops().MuonWorkspaceBytes(4, 4, 1, config), 0);
  config = *FindPreset("dmuon");
  EXPECT_EQ(
      device->ops().UpdateMuon(*stream, {.rows = 0, .cols = 4, .config = &config}, nullptr).code(),
      absl::StatusCode::kInvalidArgument);
  alignas(64) std::array<std::byte, 128> memory;
  EXPECT_EQ(device->ops()
                .UpdateMuon(*stream, {.rows = 4, .cols = 4, .config = &config}, memory.data() + 1)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dmuond::kernels::cpu
