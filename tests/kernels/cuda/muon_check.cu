// Checks of kernels/cuda/muon_update.h on the GPU, without a framework: what maths.md, section 4,
// asks of a whole update. Prints a row per case, exits non-zero if any is wrong.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/newton_schulz_reference.cuh"
#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/muon_graph.h"
#include "tests/kernels/spectra.h"

namespace dmuond::bench {
namespace {

using kernels::ProductEngine;
using kernels::cuda::PassMatrix;
using kernels::cuda::PassScalars;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Updates are the direction itself.
MuonConfig UnscaledConfig(const char* preset = "dmuon") {
  MuonConfig config = PresetConfig(preset);
  config.scale = kernels::ScaleRule::kNone;
  return config;
}

// A batch of matrices with all their slots.
struct Batch {
  Batch(int64_t rows_in, int64_t cols_in, int64_t count_in)
      : rows(rows_in),
        cols(cols_in),
        count(count_in),
        slot((rows * cols + 7) / 8 * 8),
        gradient(slot * count),
        momentum(slot * count),
        momentum_out(slot * count),
        master(slot * count),
        master_out(slot * count),
        weight(slot * count),
        update_squares(count) {
    update_squares.Fill(0xFF);
    momentum.Fill(0);
    master.Fill(0);
    momentum_out.Fill(0xFF);
    master_out.Fill(0xFF);
    weight.Fill(0xFF);
    PassScalars s{};
    s.learning_rate = 1;
    s.momentum = 0.5;
    s.gradient_factor = 1;
    s.active = 1;
    host_scalars.assign(count, s);
  }
  std::vector<PassMatrix> Matrices(int64_t first, int64_t n) const {
    std::vector<PassMatrix> m;
    for (int64_t z = first; z < first + n; ++z) {
      m.push_back({gradient.get() + z * slot, momentum.get() + z * slot,
                   momentum_out.get() + z * slot, master.get() + z * slot,
                   master_out.get() + z * slot, weight.get() + z * slot, host_scalars[z],
                   update_squares.get() + z});
    }
    return m;
  }
  // Updates matrices [first, first + n) in one call.
  bool Update(const MuonConfig& config, ProductEngine engine, int64_t first, int64_t n) const {
    const PreparedUpdate prepared = Prepare(config, rows, cols, n, nullptr, engine);
    if (prepared.graph == nullptr) return false;
    CUDA_CHECK(prepared.graph->Launch(nullptr, Matrices(first, n)));
    CUDA_CHECK(cudaDeviceSynchronize());
    return true;
  }

  int64_t rows, cols, count, slot;
  Buffer<float> gradient, momentum, momentum_out, master, master_out;
  Buffer<__nv_bfloat16> weight;
  Buffer<double> update_squares;
  std::vector<PassScalars> host_scalars;
};

const char* Name(ProductEngine engine) {
  return engine == ProductEngine::kOwn ? "own" : "cublaslt";
}

int64_t Row(ProductEngine engine, const char* name, int64_t rows, int64_t cols, double error,
            int64_t wrong) {
  std::printf(" %-8s %-44s %6ld %6ld %10.2e %8ld\n", Name(engine), name, static_cast<long>(rows),
              static_cast<long>(cols), error, static_cast<long>(wrong));
  std::fflush(stdout);
  return wrong;
}

__global__ void Scale(float* x, int64_t count, float by) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    x[i] *= by;
  }
}

__global__ void Normalise(double* x, int64_t count, const double* squares) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    x[i] /= sqrt(*squares);
  }
}

// The largest singular value, from below, by power iteration.
double SigmaMax(const float* matrix, int64_t rows, int64_t cols) {
  Buffer<double> o(rows * cols);
  Widen<<<1024, 256>>>(o.get(), matrix, rows * cols, 1.0);
  Buffer<float> start(cols);
  FillRandom(start.get(), 1, cols, cols, cols, 1, 77, false, Fill::kNormal, 1.0F);
  Buffer<double> right(cols);
  Buffer<double> left(rows);
  Buffer<double> squares(1);
  Widen<<<64, 256>>>(right.get(), start.get(), cols, 1.0);
  double sigma = 0;
  for (int i = 0; i < 100; ++i) {
    Multiply(left.get(), o.get(), right.get(), nullptr, rows, 1, cols, cols, 1, 1, 1, 1, 0);
    squares.Fill(0);
    SumSquares<<<64, 256>>>(left.get(), rows, squares.get());
    Normalise<<<64, 256>>>(left.get(), rows, squares.get());
    Multiply(right.get(), o.get(), left.get(), nullptr, cols, 1, rows, 1, cols, 1, 1, 1, 0);
    squares.Fill(0);
    SumSquares<<<64, 256>>>(right.get(), cols, squares.get());
    sigma = std::sqrt(squares.ToHost(0, 1)[0]);
    Normalise<<<64, 256>>>(right.get(), cols, squares.get());
  }
  return sigma;
}

struct Limits {
  double error;
  double sigma;
};
// What docs/maths.md, section 4, says of matrices from p = 64 on.
Limits LimitsOf(const std::string& spectrum, int64_t rows, int64_t cols, bool schatten4 = false) {
  const auto [p, q] = std::minmax(rows, cols);
  const bool square = 4 * q <= 5 * p;
  static const std::map<std::string, std::pair<double, double>> errors = {
      {"gaussian", {0.005, 0.008}},
      {"uniform", {0.006, 0.046}},
      {"power law", {0.006, 0.046}},
      {"exponential", {0.034, 0.065}},
      {"heavy-tailed", {0.034, 0.065}},
      {"half zero", {0.025, 0.14}},
      {"log-spaced to 1e-9", {0.06, 0.10}},
      {"two spikes", {0.035, 0.04}},
      {"rank 10", {0.12, 0.12}},
      {"rank 2", {0.17, 0.18}},
      {"rank 1", {0.22, 0.30}}};
  static const std::map<std::string, std::pair<double, double>> with_schatten4 = {
      {"exponential", {0.04, 0.065}},
      {"heavy-tailed", {0.04, 0.065}},
      {"half zero", {0.045, 0.14}},
      {"two spikes", {0.035, 0.045}},
      {"rank 10", {0.17, 0.17}}};
  auto found = errors.find(spectrum);
  if (schatten4 && with_schatten4.contains(spectrum)) found = with_schatten4.find(spectrum);
  double error = 0.10;  // real gradients
  if (found != errors.end()) error = square ? found->second.first : found->second.second;
  return {error, square ? 1.15 : 1.3};
}

// How far what is told of an update's squares is off, relative to what the masters say. They
// started at zero, at a learning rate of 1.
double TellsSquares(const Batch& batch, int64_t z) {
  Buffer<double> wide(batch.rows * batch.cols);
  Buffer<double> sum(1);
  sum.Fill(0);
  Widen<<<1024, 256>>>(wide.get(), batch.master_out.get() + z * batch.slot, batch.rows * batch.cols,
                       1.0);
  SumSquares<<<256, 256>>>(wide.get(), batch.rows * batch.cols, sum.get());
  const double found = batch.update_squares.ToHost(z, 1)[0];
  const double expected = sum.ToHost(0, 1)[0];
  const double off = std::abs(found - expected) / std::max(expected, 1e-30);
  return std::isfinite(off) ? off : 1;
}

// Updates a batch of one gradient. Relative Frobenius error against fp64, and (which sanitizers
// take minutes for) the largest singular value. Masters start at zero, so the new master is -O.
int64_t CheckGradient(ProductEngine engine, const char* name, const Batch& batch,
                      const Limits& limits, bool with_sigma,
                      const MuonConfig& config = UnscaledConfig()) {
  const int64_t rows = batch.rows;
  const int64_t cols = batch.cols;
  if (!batch.Update(config, engine, 0, 1)) return 1;
  Buffer<double> ref(rows * cols);
  Buffer<double> sums(2);
  sums.Fill(0);
  Reference(batch.gradient.get(), rows, cols, config.newton_schulz, ref.get());
  Difference<<<256, 256>>>(batch.master_out.get(), ref.get(), rows * cols, 1.0, sums.get());
  const auto s = sums.ToHost(0, 2);
  const double error = std::sqrt(s[0] / s[1]);
  int64_t wrong = Row(engine, name, rows, cols, error, error <= limits.error ? 0 : 1);
  const double told = TellsSquares(batch, 0);
  if (told > 1e-5) {
    const std::string what = std::string(name) + ", sum of squares told";
    wrong += Row(engine, what.c_str(), rows, cols, told, 1);
  }
  if (!with_sigma) return wrong;
  const double sigma = SigmaMax(batch.master_out.get(), rows, cols);
  const std::string also = std::string(name) + ", largest singular value";
  return wrong + Row(engine, also.c_str(), rows, cols, sigma, sigma <= limits.sigma ? 0 : 1);
}

int64_t CheckGaussian(ProductEngine engine, int64_t rows, int64_t cols, bool with_sigma) {
  Batch batch(rows, cols, 1);
  FillRandom(batch.gradient.get(), 1, rows * cols, rows * cols, rows * cols, 1, 5, false,
             Fill::kNormal, 1.0F);
  const Limits limits = LimitsOf("gaussian", rows, cols);
  return CheckGradient(engine, "gaussian", batch, limits, with_sigma) +
         CheckGradient(engine, "gaussian, schatten4", batch, limits, with_sigma,
                       UnscaledConfig("dmuon,schatten4"));
}

// The matrices of the CPU's tests, within the same bounds: docs/maths.md, section 4.
int64_t CheckShaped(ProductEngine engine, const spectra::Shaped& u) {
  Batch batch(u.rows, u.cols, 1);
  const std::vector<float> gradient = u.ToFloat();
  CUDA_CHECK(cudaMemcpy(batch.gradient.get(), gradient.data(), gradient.size() * sizeof(float),
                        cudaMemcpyHostToDevice));
  const int64_t wrong =
      CheckGradient(engine, u.name.c_str(), batch, LimitsOf(u.name, u.rows, u.cols), true);
  // In bf16 no error is small, but singular values stay bounded.
  const std::string in_bf16 = u.name + ", bf16";
  constexpr Limits kBF16 = {std::numeric_limits<double>::max(), 1.25};
  const std::string schatten4 = u.name + ", schatten4";
  const std::string schatten4_in_bf16 = schatten4 + ", bf16";
  return wrong +
         CheckGradient(engine, in_bf16.c_str(), batch, kBF16, true, UnscaledConfig("torch")) +
         CheckGradient(engine, schatten4.c_str(), batch, LimitsOf(u.name, u.rows, u.cols, true),
                       true, UnscaledConfig("dmuon,schatten4")) +
         CheckGradient(engine, schatten4_in_bf16.c_str(), batch, kBF16, true,
                       UnscaledConfig("torch,schatten4"));
}

int64_t CheckShaped(ProductEngine engine) {
  int64_t wrong = 0;
  for (const uint64_t seed : {1, 2, 3}) {
    spectra::Random random(seed);
    std::vector<spectra::Shaped> all;
    for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
             {512, 512}, {511, 513}, {256, 1024}, {1024, 256}, {64, 4096}}) {
      for (spectra::Shaped& u : spectra::Hard(rows, cols, random)) all.push_back(std::move(u));
      for (const int64_t rank : {1, 2, 10}) {
        all.push_back(spectra::Rotated("rank " + std::to_string(rank), rows, cols,
                                       std::vector<double>(rank, 1.0), random));
      }
    }
    for (spectra::Shaped& u : spectra::DemoGradients(random)) all.push_back(std::move(u));
    for (const spectra::Shaped& u : all) wrong += CheckShaped(engine, u);
  }
  return wrong;
}

// Gradients that differ by powers of two give the same update, bit for bit: norms from 1e-20 to
// 1e20, alone or among others.
int64_t CheckScaleAndBatch(ProductEngine engine, const MuonConfig& config, int64_t rows,
                           int64_t cols) {
  constexpr int kExponents[8] = {0, -66, 66, -30, 30, -10, 10, 3};
  Batch together(rows, cols, 8);
  Batch alone(rows, cols, 8);
  for (Batch* batch : {&together, &alone}) {
    for (int64_t z = 0; z < 8; ++z) {
      float* const g = batch->gradient.get() + z * batch->slot;
      const int64_t n = rows * cols;
      FillRandom(g, 1, n, n, n, 1, 5, false, Fill::kNormal, 1.0F);
      Scale<<<256, 256>>>(g, n, std::ldexp(1.0F, kExponents[z]));
    }
  }
  if (!together.Update(config, engine, 0, 8)) return 1;
  for (int64_t z = 0; z < 8; ++z) {
    if (!alone.Update(config, engine, z, 1)) return 1;
  }
  int64_t different = 0;
  for (int64_t z = 0; z < 8; ++z) {
    const float* const first = together.master_out.get();
    different += DifferentBits(first, together.master_out.get() + z * together.slot, rows * cols);
    different += DifferentBits(first, alone.master_out.get() + z * alone.slot, rows * cols);
  }
  return Row(engine, "scaled by 2^-66 .. 2^66, batch 1 and 8", rows, cols, 0, different);
}

// A zero gradient gives decay and nothing else; an inactive matrix keeps every bit, whatever its
// gradient holds; their neighbour is not disturbed.
int64_t CheckZeroAndInactive(ProductEngine engine, const MuonConfig& config, int64_t rows,
                             int64_t cols) {
  const int64_t n = rows * cols;
  Batch batch(rows, cols, 3);
  FillRandom(batch.gradient.get(), 1, n, n, n, 1, 5, false, Fill::kNormal, 1.0F);
  CUDA_CHECK(cudaMemset(batch.gradient.get() + batch.slot, 0, n * sizeof(float)));
  const std::vector<float> poison(n, kNaN);
  CUDA_CHECK(cudaMemcpy(batch.gradient.get() + 2 * batch.slot, poison.data(), n * sizeof(float),
                        cudaMemcpyHostToDevice));
  for (const int64_t z : {1, 2}) {
    FillRandom(batch.master.get() + z * batch.slot, 1, n, n, n, 1, 6, false, Fill::kNormal, 1.0F);
  }
  FillRandom(batch.momentum.get() + 2 * batch.slot, 1, n, n, n, 1, 7, false, Fill::kNormal, 1.0F);
  batch.host_scalars[1].learning_rate = 0.5;
  batch.host_scalars[1].weight_decay = 0.5;
  batch.host_scalars[2].weight_decay = 0.5;
  batch.host_scalars[2].active = 0;
  if (!batch.Update(config, engine, 0, 3)) return 1;
  int64_t wrong = 0;
  const auto before = batch.master.ToHost(batch.slot, n);
  const auto after = batch.master_out.ToHost(batch.slot, n);
  for (int64_t i = 0; i < n; ++i) wrong += after[i] == before[i] * 0.75F ? 0 : 1;
  wrong += DifferentBits(batch.master.get() + 2 * batch.slot,
                         batch.master_out.get() + 2 * batch.slot, n);
  wrong += DifferentBits(batch.momentum.get() + 2 * batch.slot,
                         batch.momentum_out.get() + 2 * batch.slot, n);
  const auto squares = batch.update_squares.ToHost(0, 3);
  wrong += TellsSquares(batch, 0) < 1e-5 && squares[1] == 0 && squares[2] == 0 ? 0 : 1;
  for (const int64_t z : {0, 1, 2}) {
    const auto master = batch.master_out.ToHost(z * batch.slot, n);
    const auto weight = batch.weight.ToHost(z * batch.slot, n);
    for (int64_t i = 0; i < n; ++i) {
      const bool rounded = static_cast<float>(weight[i]) ==
                           static_cast<float>(static_cast<__nv_bfloat16>(master[i]));
      wrong += rounded && std::isfinite(master[i]) ? 0 : 1;
    }
  }
  return Row(engine, "zero, inactive with NaN gradient, neighbour", rows, cols, 0, wrong);
}

// 56 different matrices together, eight of them, and one alone.
int64_t CheckBatchBits(ProductEngine engine, const MuonConfig& config, const char* name,
                       int64_t rows, int64_t cols) {
  Batch batch(rows, cols, 56);
  const int64_t n = rows * cols;
  for (int64_t z = 0; z < 56; ++z) {
    FillRandom(batch.gradient.get() + z * batch.slot, 1, n, n, n, 1, 40 + z, false, Fill::kNormal,
               1.0F);
  }
  if (!batch.Update(config, engine, 0, 56)) return 1;
  Buffer<float> all(batch.slot * 56);
  CUDA_CHECK(cudaMemcpy(all.get(), batch.master_out.get(), batch.slot * 56 * sizeof(float),
                        cudaMemcpyDeviceToDevice));
  int64_t different = 0;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{17, 1}, {0, 8}, {55, 1}}) {
    batch.master_out.Fill(0xFF);
    if (!batch.Update(config, engine, first, count)) return 1;
    for (int64_t z = first; z < first + count; ++z) {
      different +=
          DifferentBits(all.get() + z * batch.slot, batch.master_out.get() + z * batch.slot, n);
    }
  }
  return Row(engine, name, rows, cols, 0, different);
}

// A gradient whose scale a sample misjudges: zero, or tiny, wherever the estimate looks. The second
// cast must repair it.
__global__ void HideFromSamples(float* g, int64_t count, int64_t stretches, int64_t samples,
                                float by) {
  for (int64_t i = threadIdx.x; i < samples * 512; i += blockDim.x) {
    const int64_t at = i / 512 * stretches / samples * 4096 + i % 512;
    if (at < count) g[at] *= by;
  }
}
int64_t CheckMisjudgedScale(ProductEngine engine, int64_t rows, int64_t cols, float by,
                            const char* name) {
  const MuonConfig config = UnscaledConfig();
  const int64_t n = rows * cols;
  Batch batch(rows, cols, 1);
  FillRandom(batch.gradient.get(), 1, n, n, n, 1, 5, false, Fill::kNormal, 1.0F);
  const int64_t stretches = (n + 4095) / 4096;
  HideFromSamples<<<1, 512>>>(batch.gradient.get(), n, stretches, std::min<int64_t>(64, stretches),
                              by);
  CUDA_CHECK(cudaGetLastError());
  if (!batch.Update(config, engine, 0, 1)) return 1;
  Buffer<double> ref(n);
  Buffer<double> sums(2);
  sums.Fill(0);
  Reference(batch.gradient.get(), rows, cols, config.newton_schulz, ref.get());
  Difference<<<256, 256>>>(batch.master_out.get(), ref.get(), n, 1.0, sums.get());
  const auto s = sums.ToHost(0, 2);
  const double error = std::sqrt(s[0] / s[1]);
  return Row(engine, name, rows, cols, error, error <= 0.11 ? 0 : 1);
}

// More launches than lists that are under way at a time: the bits of one.
int64_t CheckLaunches() {
  constexpr int64_t kRows = 256, kCols = 640, kCount = 3;
  const MuonConfig config = UnscaledConfig();
  Batch batch(kRows, kCols, kCount);
  const int64_t all = batch.slot * kCount;
  FillRandom(batch.gradient.get(), 1, all, all, all, 1, 71, false, Fill::kNormal, 1.0F);
  if (!batch.Update(config, ProductEngine::kOwn, 0, kCount)) return 1;
  Buffer<float> expected(all);
  CUDA_CHECK(cudaMemcpy(expected.get(), batch.master_out.get(), all * sizeof(float),
                        cudaMemcpyDeviceToDevice));
  batch.master_out.Fill(0xFF);
  const PreparedUpdate prepared = Prepare(config, kRows, kCols, kCount);
  if (prepared.graph == nullptr) return 1;
  const std::vector<PassMatrix> matrices = batch.Matrices(0, kCount);
  for (int run = 0; run < 5; ++run) CUDA_CHECK(prepared.graph->Launch(nullptr, matrices));
  CUDA_CHECK(cudaDeviceSynchronize());
  int64_t different = 0;
  for (int64_t z = 0; z < kCount; ++z) {
    different += DifferentBits(expected.get() + z * batch.slot,
                               batch.master_out.get() + z * batch.slot, kRows * kCols);
  }
  return Row(ProductEngine::kOwn, "five launches", kRows, kCols, 0, different);
}

// Masters, weights and momenta have the bits of a pass of their own where the last product writes
// them: matrices that end within tiles, tall ones, products that read C, zero and inactive ones.
int64_t CheckFused(const char* preset, int64_t rows, int64_t cols, kernels::DType weight) {
  constexpr int64_t kCount = 5;
  const MuonConfig config = PresetConfig(preset);
  Batch batch(rows, cols, kCount);
  const int64_t all = batch.slot * kCount;
  FillRandom(batch.gradient.get(), 1, all, all, all, 1, 31, false, Fill::kNormal, 1e-3F);
  FillRandom(batch.momentum.get(), 1, all, all, all, 1, 32, false, Fill::kNormal, 1e-3F);
  FillRandom(batch.master.get(), 1, all, all, all, 1, 33, false, Fill::kNormal, 0.02F);
  CUDA_CHECK(cudaMemset(batch.gradient.get() + batch.slot, 0, rows * cols * sizeof(float)));
  CUDA_CHECK(cudaMemset(batch.momentum.get() + batch.slot, 0, rows * cols * sizeof(float)));
  CUDA_CHECK(cudaMemset(batch.gradient.get() + 2 * batch.slot, 0xFF, rows * cols * sizeof(float)));
  batch.host_scalars[2].active = 0;
  CUDA_CHECK(cudaMemset(batch.gradient.get() + 3 * batch.slot, 0xFF, 4));  // one NaN
  for (PassScalars& s : batch.host_scalars) {
    s.learning_rate = 0.02;
    s.weight_decay = 0.1;
  }
  Buffer<float> weights(all);
  Buffer<float> expected(4 * all);
  int64_t different = 0;
  for (const bool separate : {true, false}) {
    batch.momentum_out.Fill(0xFF);
    batch.master_out.Fill(0xFF);
    weights.Fill(0xFF);
    std::vector<PassMatrix> matrices = batch.Matrices(0, kCount);
    for (int64_t z = 0; z < kCount; ++z) matrices[z].weight_out = weights.get() + z * batch.slot;
    matrices[kCount - 1].weight_out = nullptr;
    const PreparedUpdate prepared =
        Prepare(config, rows, cols, kCount, nullptr, ProductEngine::kOwn, separate, weight);
    if (prepared.graph == nullptr) return 1;
    if (prepared.update().newton_schulz().updates() == separate) return 1;
    CUDA_CHECK(prepared.graph->Launch(nullptr, matrices));
    CUDA_CHECK(cudaDeviceSynchronize());
    const Buffer<float>* const written[] = {&batch.momentum_out, &batch.master_out, &weights};
    for (int i = 0; i < 3; ++i) {
      if (separate) {
        CUDA_CHECK(cudaMemcpy(expected.get() + i * all, written[i]->get(), all * sizeof(float),
                              cudaMemcpyDeviceToDevice));
      } else {
        different += DifferentBits(expected.get() + i * all, written[i]->get(), all);
      }
    }
  }
  const std::string name =
      std::string("in the last product, ") + preset + ", " + kernels::Name(weight);
  return Row(ProductEngine::kOwn, name.c_str(), rows, cols, 0, different);
}

// Many launches of small updates one after another, tiles measured before: a product's CTAs must
// not outlive, nor end before, what they signal. The bits of the first launch.
int64_t CheckOften(const MuonConfig& config, int64_t rows, int64_t cols) {
  kernels::cuda::TileTuner tuner;
  int64_t different = 0;
  for (const int64_t count : {1, 2, 3, 4, 21}) {
    Batch batch(rows, cols, count);
    const int64_t all = batch.slot * count;
    FillRandom(batch.gradient.get(), 1, all, all, all, 1, 40, false, Fill::kNormal, 1.0F);
    const PreparedUpdate prepared = Prepare(config, rows, cols, count, &tuner);
    if (prepared.graph == nullptr) return 1;
    CUDA_CHECK(prepared.graph->Launch(nullptr, batch.Matrices(0, count)));
    Buffer<float> first(all);
    CUDA_CHECK(cudaMemcpy(first.get(), batch.master_out.get(), all * sizeof(float),
                          cudaMemcpyDeviceToDevice));
    for (int i = 0; i < 200; ++i) {
      CUDA_CHECK(prepared.graph->Launch(nullptr, batch.Matrices(0, count)));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    different += DifferentBits(first.get(), batch.master_out.get(), all);
  }
  return Row(ProductEngine::kOwn, "1,000 launches", rows, cols, 0, different);
}

// A batch of more than 2^31 elements: its matrices have the bits that they have alone.
int64_t CheckLargeBatch(ProductEngine engine) {
  const int64_t rows = 14336, cols = 4096, count = 38, n = rows * cols;
  static_assert(38LL * 14336 * 4096 > (1LL << 31));
  const MuonConfig config = UnscaledConfig();
  Batch batch(rows, cols, count);
  FillRandom(batch.gradient.get(), 1, n * count, n * count, n * count, 1, 5, false, Fill::kNormal,
             1.0F);
  if (!batch.Update(config, engine, 0, count)) return 1;
  Buffer<float> together(n);
  int64_t different = 0;
  for (const int64_t z : {int64_t{0}, int64_t{19}, count - 1}) {
    float* const master = batch.master_out.get() + z * batch.slot;
    CUDA_CHECK(cudaMemcpy(together.get(), master, n * sizeof(float), cudaMemcpyDeviceToDevice));
    CUDA_CHECK(cudaMemset(master, 0xFF, n * sizeof(float)));
    if (!batch.Update(config, engine, z, 1)) return 1;
    different += DifferentBits(together.get(), master, n);
  }
  return Row(engine, "38 together, 2.2e9 elements", rows, cols, 0, different);
}

// Passes over more than 2^31 elements: the end of them is what it is alone.
int64_t CheckLargePasses() {
  using kernels::cuda::WeightType;
  const int64_t n = (int64_t{1} << 31) + 12345, tail = 1 << 20;
  const int64_t first = (n - tail) / 65536 * 65536;
  int64_t wrong = 0;
  Buffer<float> out(n);
  Buffer<float> alone(n - first);
  {
    Buffer<__nv_bfloat16> a(n);
    Buffer<__nv_bfloat16> b(n);
    FillRandom(a.get(), 1, n, n, n, 1, 1, false, Fill::kNormal, 1.0F);
    FillRandom(b.get(), 1, n, n, n, 1, 2, false, Fill::kNormal, 1.0F);
    out.Fill(0xFF);
    alone.Fill(0xFF);
    kernels::cuda::SumPass whole{
        out.get(), n,   {a.get(), b.get()}, {WeightType::kBF16, WeightType::kBF16}, {{0, 1}},
        2,         0.5F};
    kernels::cuda::SumPass end = whole;
    end.destination = alone.get();
    end.elements = n - first;
    end.sources[0] = a.get() + first;
    end.sources[1] = b.get() + first;
    CUDA_CHECK(kernels::cuda::LaunchSum(nullptr, {&whole, 1}));
    CUDA_CHECK(kernels::cuda::LaunchSum(nullptr, {&end, 1}));
    wrong += DifferentBits(out.get() + first, alone.get(), n - first);
  }
  {
    const int64_t blocks = (n + 65535) / 65536;
    Buffer<double> sums(blocks);
    Buffer<double> end_sums(blocks);
    kernels::cuda::SquaresPass whole{out.get(), n, 0, sums.get()};
    kernels::cuda::SquaresPass end{out.get() + first, n - first, first, end_sums.get()};
    CUDA_CHECK(kernels::cuda::LaunchSquares(nullptr, {&whole, 1}));
    CUDA_CHECK(kernels::cuda::LaunchSquares(nullptr, {&end, 1}));
    CUDA_CHECK(cudaDeviceSynchronize());
    const int64_t from = first / 65536;
    if (sums.ToHost(from, blocks - from) != end_sums.ToHost(0, blocks - from)) ++wrong;
  }
  Buffer<float> v(n);
  v.Fill(0x3C);
  Buffer<float> master(n);
  Buffer<float> master_alone(n - first);
  kernels::cuda::AdamWPass whole{};
  whole.elements = n;
  whole.gradient = whole.m_in = whole.master_in = out.get();
  whole.v_in = v.get();
  whole.master_out = master.get();
  // Outputs that nobody looks at.
  Buffer<float> m_out(n);
  whole.m_out = m_out.get();
  Buffer<float> v_out(n);
  whole.v_out = v_out.get();
  whole.scalars.learning_rate = 1e-3;
  whole.scalars.beta1 = 0.9;
  whole.scalars.beta2 = 0.99;
  whole.scalars.eps = 1e-8;
  whole.scalars.gradient_factor = 1;
  whole.scalars.bias_correction1 = whole.scalars.bias_correction2 = 1;
  whole.scalars.active = 1;
  kernels::cuda::AdamWPass end = whole;
  end.elements = n - first;
  end.gradient = end.m_in = end.master_in = out.get() + first;
  end.v_in = v.get() + first;
  end.master_out = master_alone.get();
  CUDA_CHECK(kernels::cuda::LaunchAdamW(nullptr, WeightType::kF32, {&whole, 1}));
  CUDA_CHECK(kernels::cuda::LaunchAdamW(nullptr, WeightType::kF32, {&end, 1}));
  wrong += DifferentBits(master.get() + first, master_alone.get(), n - first);
  return Row(ProductEngine::kOwn, "sum, squares, AdamW of 2^31 elements", n, 1, 0, wrong);
}

int64_t CheckEngine(ProductEngine engine, bool brief) {
  int64_t wrong = 0;
  // Brief: for compute-sanitizer, every kernel once.
  using Shapes = std::vector<std::pair<int64_t, int64_t>>;
  for (const auto& [rows, cols] :
       brief ? Shapes{{136, 200}, {200, 133}}
             : Shapes{{256, 1024}, {1024, 256}, {511, 513}, {1000, 3000}, {512, 512}}) {
    wrong += CheckGaussian(engine, rows, cols, !brief);
    for (const char* preset : {"dmuon", "dmuon,schatten4"}) {
      const MuonConfig config = UnscaledConfig(preset);
      wrong += CheckZeroAndInactive(engine, config, rows, cols);
      if (!brief) wrong += CheckScaleAndBatch(engine, config, rows, cols);
    }
  }
  wrong += CheckMisjudgedScale(engine, 136, 600, 0, "zero where the estimate looks");
  if (brief) return wrong;
  for (const auto& [rows, cols] :
       Shapes{{1, 640}, {640, 1}, {64, 4096}, {4096, 64}, {2568, 2568}}) {
    wrong += CheckGaussian(engine, rows, cols, true);
  }
  wrong += CheckShaped(engine);
  wrong += CheckMisjudgedScale(engine, 512, 1024, 1e-6F, "tiny where the estimate looks");
  wrong += CheckMisjudgedScale(engine, 512, 1024, 1e6F, "huge where the estimate looks");
  MuonConfig standard = UnscaledConfig();
  standard.newton_schulz.form = kernels::NewtonSchulzForm::kStandard;
  standard.newton_schulz.restarts.clear();
  MuonConfig bf16 = PresetConfig("torch");
  for (const auto& [rows, cols] : Shapes{{256, 1536}, {1536, 1536}, {1024, 136}}) {
    wrong += CheckBatchBits(engine, UnscaledConfig(), "batch 1, 8, 56", rows, cols);
    wrong += CheckBatchBits(engine, standard, "batch 1, 8, 56, fp16 standard", rows, cols);
    wrong += CheckBatchBits(engine, bf16, "batch 1, 8, 56, bf16 standard", rows, cols);
    wrong += CheckBatchBits(engine, UnscaledConfig("dmuon,schatten4"), "batch 1, 8, 56, schatten4",
                            rows, cols);
  }
  return wrong;
}

// `own_only`: without cuBLASLt, whose kernels racecheck cannot follow to the end.
int Main(bool brief, bool own_only) {
  std::printf("#%-8s %-44s %6s %6s %10s %8s\n", "engine", "case", "rows", "cols", "error",
              "#wrong");
  using kernels::DType;
  int64_t wrong = CheckFused("dmuon", 136, 200, DType::kBF16);
  wrong += CheckFused("torch", 200, 136, DType::kF32);
  wrong += CheckLaunches();
  wrong += CheckEngine(ProductEngine::kOwn, brief);
  const absl::Status library = own_only ? absl::OkStatus() : kernels::cuda::CheckLibrary();
  if (own_only) {
    std::printf("# own kernels only\n");
  } else if (library.ok()) {
    std::printf("# cuBLASLt %s\n", kernels::cuda::LibraryVersion().c_str());
    wrong += CheckEngine(ProductEngine::kLibrary, brief);
  } else {
    std::printf("# %s\n", std::string(library.message()).c_str());
    ++wrong;
  }
  if (!brief) {
    for (const auto& [rows, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{256, 1536}, {1024, 1024}, {2560, 1024}}) {
      wrong += CheckOften(UnscaledConfig(), rows, cols);
      wrong += CheckOften(UnscaledConfig("dmuon,schatten4"), rows, cols);
    }
    for (const char* preset : {"dmuon", "torch", "dmuon,schatten4"}) {
      for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
               {8, 8}, {64, 1000}, {1000, 64}, {512, 512}, {1000, 3000}, {3000, 1000}}) {
        wrong += CheckFused(preset, rows, cols, DType::kBF16);
      }
      wrong += CheckFused(preset, 333, 520, DType::kF16);
      wrong += CheckFused(preset, 520, 328, DType::kF32);
    }
    wrong += CheckLargePasses();
    wrong += CheckLargeBatch(ProductEngine::kOwn);
    if (library.ok()) wrong += CheckLargeBatch(ProductEngine::kLibrary);
  }
  std::printf("# %s\n", wrong == 0 ? "all right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  return dmuond::bench::Main(first == "--brief" || first == "--brief-own", first == "--brief-own");
}
