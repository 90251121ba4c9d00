// Norms, AdamW and Muon on the GPU against the CPU device over many steps.
#include <cmath>

#include "kernels/cuda/library_product.h"
#include "kernels/presets.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/random_box.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels::cuda {
namespace {

using Floats = std::vector<float>;

class StateOps : public GpuTest {
 protected:
  BoxRandom random_{77};
};

TEST_F(StateOps, SumsOfSquaresMatchWhereverATensorIsCut) {
  const int64_t elements = 3 * kNormBlock + 777;
  const Floats values = RandomValues(elements, random_);
  const Twin twin = Put(values);
  const auto sums = *gpu_->AllocateHost(64 * sizeof(double));
  auto* const got = reinterpret_cast<double*>(sums->data());
  for (const int64_t cut : {int64_t{0}, int64_t{1}, kNormBlock, kNormBlock + 6, elements}) {
    for (const int64_t first : {int64_t{0}, kNormBlock - 3, int64_t{12345}}) {
      const int64_t n = elements - cut;
      std::vector<double> expected(64, -1);
      std::fill_n(got, 64, -1);
      const NormTask cpu_task{values.data() + cut, n, first, expected.data()};
      const NormTask gpu_task{twin.as<float>() + cut, n, first, got};
      ASSERT_TRUE(cpu_->ops().SumsOfSquares(*cpu_stream_, {&cpu_task, 1}).ok());
      ASSERT_TRUE(gpu_->ops().SumsOfSquares(*gpu_stream_, {&gpu_task, 1}).ok());
      Synchronize();
      for (int i = 0; i < 64; ++i) ASSERT_NEAR(got[i], expected[i], 1e-13 * std::abs(expected[i]));
    }
  }
  const Floats bad = {1, 2, NAN, INFINITY};
  const Twin bad_twin = Put(bad);
  const NormTask task{bad_twin.as<float>(), 4, 0, got};
  ASSERT_TRUE(gpu_->ops().SumsOfSquares(*gpu_stream_, {&task, 1}).ok());
  Synchronize();
  EXPECT_FALSE(std::isfinite(got[0]));
}

TEST_F(StateOps, SquaresOfASumAreThoseOfItsResult) {
  const int64_t elements = 2 * kNormBlock + 4321;
  const Floats a = RandomValues(elements, random_);
  const Floats b = RandomValues(elements, random_);
  const Twin gpu_a = Put(a), gpu_b = Put(b), dst = Put(a);
  const auto sums = *gpu_->AllocateHost(8 * sizeof(double));
  auto* const got = reinterpret_cast<double*>(sums->data());
  const auto box = [&](const Twin& twin) {
    return StridedBox{twin.data(), DType::kF32, 1, {elements}, {1}};
  };
  const std::vector<StridedBox> sources = {box(gpu_a), box(gpu_b)};
  const SumTask task{box(dst), sources, {}, 0.5F, got};
  ASSERT_TRUE(gpu_->ops().Sum(*gpu_stream_, {&task, 1}).ok());
  const NormTask norm{dst.as<float>(), elements, 0, got + 4};
  ASSERT_TRUE(gpu_->ops().SumsOfSquares(*gpu_stream_, {&norm, 1}).ok());
  Synchronize();
  for (int i = 0; i < 3; ++i) {
    EXPECT_GT(got[i], 0);
    EXPECT_EQ(got[i], got[4 + i]) << i;
  }
}

UpdateScalars AdamScalars(int step) {
  UpdateScalars s;
  s.learning_rate = 1e-3 * (1 + step);
  s.weight_decay = 0.1;
  s.gradient_factor = step % 2 == 0 ? 1 : 0.7;
  s.beta1 = 0.9;
  s.beta2 = 0.999;
  s.eps = 1e-8;
  s.bias_correction1 = 1 - std::pow(0.9, step + 1);
  s.bias_correction2 = 1 - std::pow(0.999, step + 1);
  s.active = step == 4 ? 0 : 1;
  return s;
}

TEST_F(StateOps, AdamWHasTheBitsOfTheCpuOverTenSteps) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t n : {int64_t{1}, int64_t{1023}, int64_t{70001}}) {
      Floats m(n), v(n), w = RandomValues(n, random_), m_out(n), v_out(n), w_out(n);
      std::vector<std::byte> weight(n * SizeOf(dtype));
      Twin gm = Put(m), gv = Put(v), gw = Put(w), gm2 = Put(m), gv2 = Put(v), gw2 = Put(w);
      const Twin gweight = Put(weight);
      for (int step = 0; step < 10; ++step) {
        const Floats g = RandomValues(n, random_);
        const Twin gg = Put(g);
        const UpdateScalars scalars = AdamScalars(step);
        const AdamWPiece cpu_piece{n,        dtype,        g.data(), m.data(),     m_out.data(),
                                   v.data(), v_out.data(), w.data(), w_out.data(), weight.data(),
                                   &scalars};
        const AdamWPiece gpu_piece{n,
                                   dtype,
                                   gg.as<float>(),
                                   gm.as<float>(),
                                   gm2.as<float>(),
                                   gv.as<float>(),
                                   gv2.as<float>(),
                                   gw.as<float>(),
                                   gw2.as<float>(),
                                   gweight.data(),
                                   &scalars};
        ASSERT_TRUE(cpu_->ops().UpdateAdamW(*cpu_stream_, {&cpu_piece, 1}).ok());
        const absl::Status status = gpu_->ops().UpdateAdamW(*gpu_stream_, {&gpu_piece, 1});
        ASSERT_TRUE(status.ok()) << status;
        Synchronize();
        std::swap(m, m_out);
        std::swap(v, v_out);
        std::swap(w, w_out);
        std::swap(gm, gm2);
        std::swap(gv, gv2);
        std::swap(gw, gw2);
        ASSERT_EQ(gm.ReadAs<float>(), m) << Name(dtype) << " step " << step;
        ASSERT_EQ(gv.ReadAs<float>(), v) << Name(dtype) << " step " << step;
        ASSERT_EQ(gw.ReadAs<float>(), w) << Name(dtype) << " step " << step;
        std::vector<std::byte> published = gweight.Read();
        published.resize(weight.size());
        ASSERT_EQ(published, weight) << Name(dtype) << " step " << step;
      }
    }
  }
}

// Two matrices of a shape in their slots on one device, updated step by step.
struct MuonRun {
  double gpu_error = 0;  // of the accumulated change of weights, against fp64
  double between = 0;    // the same between the two devices
  bool same_momentum = true;
};

class MuonOps : public StateOps {
 protected:
  MuonRun Run(const MuonConfig& config, int64_t rows, int64_t cols, int steps);
};

reference::MuonRules RulesOf(const MuonConfig& config) {
  return {.ema = config.momentum == MomentumForm::kEma,
          .nesterov = config.nesterov,
          .steps = config.newton_schulz.coefficients,
          .schatten4 = config.newton_schulz.norm == NormRule::kSchatten4,
          .scale = [rule = config.scale](int64_t m, int64_t n) { return UpdateScale(rule, m, n); }};
}

MuonRun MuonOps::Run(const MuonConfig& config, int64_t rows, int64_t cols, int steps) {
  using reference::Combine;
  using reference::Matrix;
  const int64_t n = rows * cols;
  reference::Random random(5);
  const Matrix start(rows, cols, reference::Gaussian(rows, cols, random).ToFloat());
  const Matrix drift = reference::Gaussian(rows, cols, random);
  reference::MuonState state{start, Matrix(rows, cols)};
  Floats buf(n), buf_out(n), w = start.ToFloat(), w_out(n);
  std::vector<uint16_t> weight(n);
  Twin gbuf = Put(buf), gbuf_out = Put(buf), gw = Put(w), gw_out = Put(w);
  const Twin gweight = Put(weight);
  const size_t cpu_bytes = cpu_->ops().MuonWorkspaceBytes(rows, cols, 1, config);
  const size_t gpu_bytes = gpu_->ops().MuonWorkspaceBytes(rows, cols, 1, config);
  const auto cpu_workspace = *cpu_->AllocateScratch(cpu_bytes);
  const auto gpu_workspace = *gpu_->AllocateScratch(gpu_bytes);
  MuonRun run;
  for (int step = 0; step < steps; ++step) {
    const Matrix gradient(
        rows, cols, Combine(1, reference::Gaussian(rows, cols, random), 0.5, drift).ToFloat());
    const Floats g = gradient.ToFloat();
    const Twin gg = Put(g);
    UpdateScalars s;
    s.learning_rate = 0.02 * (1 - step / 20.0);
    s.momentum = 0.85 + 0.01 * step;
    s.weight_decay = 0.1;
    const MuonMatrix cpu_matrix{g.data(),      buf.data(), buf_out.data(), w.data(), w_out.data(),
                                weight.data(), &s};
    const MuonMatrix gpu_matrix{gg.as<float>(),
                                gbuf.as<float>(),
                                gbuf_out.as<float>(),
                                gw.as<float>(),
                                gw_out.as<float>(),
                                gweight.data(),
                                &s};
    absl::Status status = cpu_->ops().UpdateMuon(
        *cpu_stream_, {rows, cols, DType::kBF16, &config, {&cpu_matrix, 1}}, cpu_workspace->data());
    EXPECT_TRUE(status.ok()) << status;
    status = gpu_->ops().UpdateMuon(
        *gpu_stream_, {rows, cols, DType::kBF16, &config, {&gpu_matrix, 1}}, gpu_workspace->data());
    EXPECT_TRUE(status.ok()) << status;
    Synchronize();
    reference::MuonStep(RulesOf(config), s.learning_rate, s.momentum, s.weight_decay, gradient,
                        state);
    std::swap(buf, buf_out);
    std::swap(w, w_out);
    std::swap(gbuf, gbuf_out);
    std::swap(gw, gw_out);
    run.same_momentum = run.same_momentum && gbuf.ReadAs<float>() == buf;
  }
  const Matrix cpu_end(rows, cols, w);
  const Matrix gpu_end(rows, cols, gw.ReadAs<float>());
  const auto change = [&](const Matrix& end) { return Combine(1, end, -1, start); };
  run.gpu_error = RelativeDifference(change(gpu_end), change(state.weight));
  run.between = RelativeDifference(change(gpu_end), change(cpu_end));
  return run;
}

using Shapes = std::vector<std::pair<int64_t, int64_t>>;

// The same device with each engine.
class MuonEngines : public MuonOps, public testing::WithParamInterface<ProductEngine> {
 protected:
  MuonEngines() { engine_ = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Engines, MuonEngines,
                         testing::Values(ProductEngine::kOwn, ProductEngine::kLibrary),
                         [](const testing::TestParamInfo<ProductEngine>& info) {
                           return info.param == ProductEngine::kOwn ? "Own" : "Library";
                         });

struct NamedConfig {
  std::string name;
  MuonConfig config;
};
// The presets, and two of them with the Schatten-4 norm.
std::vector<NamedConfig> Configs() {
  std::vector<NamedConfig> all;
  for (const char* name : kPresetNames) all.push_back({name, *FindPreset(name)});
  for (const char* name : {"dmuon", "torch"}) {
    all.push_back({std::string(name) + ", schatten4", *FindPreset(name)});
    all.back().config.newton_schulz.norm = NormRule::kSchatten4;
  }
  return all;
}

TEST_P(MuonEngines, EveryPresetFollowsItsFormulasAndTheCpuForTwelveSteps) {
  for (const auto& [name, config] : Configs()) {
    for (const auto& [rows, cols] : Shapes{{96, 96}, {64, 200}, {200, 64}, {1, 33}, {257, 130}}) {
      const MuonRun run = Run(config, rows, cols, 12);
      EXPECT_LT(run.gpu_error, 0.03) << name << " " << rows << " x " << cols;
      EXPECT_LT(run.between, 0.03) << name << " " << rows << " x " << cols;
      EXPECT_TRUE(run.same_momentum) << name << " " << rows << " x " << cols;
      std::printf("# %-16s %4ld x %4ld, 12 steps: %.1e from fp64, %.1e from the CPU\n",
                  name.c_str(), static_cast<long>(rows), static_cast<long>(cols), run.gpu_error,
                  run.between);
    }
  }
}

TEST_P(MuonEngines, InFp32EveryPresetIsItsFormula) {
  for (auto [name, config] : Configs()) {
    config.newton_schulz.dtype = DType::kF32;
    for (const auto& [rows, cols] : Shapes{{96, 96}, {64, 200}, {200, 64}, {1, 33}}) {
      EXPECT_LT(Run(config, rows, cols, 12).gpu_error, 5e-5)
          << name << " " << rows << " x " << cols;
    }
  }
}

TEST_F(MuonOps, AChoiceChangesTheEngineAndTheFormOfOneShape) {
  if (!CheckLibrary().ok()) GTEST_SKIP() << CheckLibrary();
  const MuonConfig config = *FindPreset("dmuon");
  const size_t own = gpu_->ops().MuonWorkspaceBytes(256, 512, 2, config);
  const MuonRun before = Run(config, 128, 192, 3);
  const KernelChoice choices[] = {
      {256, 512, DType::kF16, ProductEngine::kLibrary, NewtonSchulzForm::kGram},
      {128, 192, DType::kF16, ProductEngine::kDefault, NewtonSchulzForm::kStandard}};
  ASSERT_TRUE(gpu_->ops().UseChoices(choices).ok());
  EXPECT_GT(gpu_->ops().MuonWorkspaceBytes(256, 512, 2, config), own) << "sums in fp32";
  EXPECT_EQ(gpu_->ops().MuonWorkspaceBytes(512, 256, 2, config), own) << "another shape";
  EXPECT_LT(Run(config, 256, 512, 3).gpu_error, 0.03);
  const MuonRun standard = Run(config, 128, 192, 3);
  EXPECT_LT(standard.gpu_error, 0.03);
  EXPECT_NE(standard.gpu_error, before.gpu_error) << "the form was not changed";
}

TEST_F(MuonOps, MisalignedMatricesAreRefused) {
  const MuonConfig config = *FindPreset("dmuon");
  const auto memory = *gpu_->AllocateScratch(1 << 20);
  auto* const odd = reinterpret_cast<float*>(memory->data() + 4);
  const UpdateScalars scalars;
  const MuonMatrix matrix{odd, odd, odd, odd, odd, nullptr, &scalars};
  EXPECT_EQ(
      gpu_->ops()
          .UpdateMuon(*gpu_stream_, {8, 8, DType::kBF16, &config, {&matrix, 1}}, memory->data())
          .code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
