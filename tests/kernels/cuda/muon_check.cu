// Checks of kernels/cuda/muon_update.h on the GPU, without a framework: what maths.md, section 4,
// asks of a whole update. Prints a row per case, exits non-zero if any is wrong.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/newton_schulz_reference.cuh"
#include "kernels/cuda/muon_update.h"

namespace dmuond::bench {
namespace {

using kernels::cuda::PassMatrix;
using kernels::cuda::PassScalars;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The default preset; updates are the direction itself.
MuonConfig UnscaledConfig() {
  MuonConfig config = PresetConfig("dmuon");
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
        weight(slot * count) {
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
                   master_out.get() + z * slot, weight.get() + z * slot, host_scalars[z]});
    }
    return m;
  }
  // Updates matrices [first, first + n) in one call.
  bool Update(const MuonConfig& config, int64_t first, int64_t n) const {
    const PreparedUpdate prepared = Prepare(config, rows, cols, n);
    if (prepared.update == nullptr) return false;
    CUDA_CHECK(prepared.update->Launch(nullptr, Matrices(first, n)));
    CUDA_CHECK(cudaDeviceSynchronize());
    return true;
  }

  int64_t rows, cols, count, slot;
  Buffer<float> gradient, momentum, momentum_out, master, master_out;
  Buffer<__nv_bfloat16> weight;
  std::vector<PassScalars> host_scalars;
};

int64_t Row(const char* name, int64_t rows, int64_t cols, double error, int64_t wrong) {
  std::printf(" %-44s %6ld %6ld %10.2e %8ld\n", name, static_cast<long>(rows),
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

enum class Spectrum { kGaussian, kHeavyTailed, kHalfZero, kExponential, kRank10 };

__global__ void Shape(float* g, const float* left, const float* right, int64_t rows, int64_t cols,
                      Spectrum spectrum) {
  const int64_t count = rows * cols;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t r = i / cols;
    const int64_t c = i % cols;
    if (spectrum == Spectrum::kHeavyTailed) g[i] = g[i] * g[i] * g[i];
    if (spectrum == Spectrum::kHalfZero && r % 2 == 0) g[i] = 0;
    if (spectrum == Spectrum::kExponential) {
      g[i] *= expf(-6.0F * static_cast<float>(r) / static_cast<float>(rows));
    }
    if (spectrum == Spectrum::kRank10) {
      float sum = 0;
      for (int k = 0; k < 10; ++k) sum += left[r * 10 + k] * right[k * cols + c];
      g[i] = sum;
    }
  }
}

// Relative Frobenius error against fp64. Masters start at zero, so the new master is -O.
int64_t CheckSpectrum(const char* name, Spectrum spectrum, int64_t rows, int64_t cols,
                      double limit) {
  const MuonConfig config = UnscaledConfig();
  Batch batch(rows, cols, 1);
  Buffer<float> left(rows * 10);
  Buffer<float> right(cols * 10);
  FillRandom(left.get(), 1, rows * 10, rows * 10, rows * 10, 1, 8, false, Fill::kNormal, 1.0F);
  FillRandom(right.get(), 1, cols * 10, cols * 10, cols * 10, 1, 9, false, Fill::kNormal, 1.0F);
  FillRandom(batch.gradient.get(), 1, rows * cols, rows * cols, rows * cols, 1, 5, false,
             Fill::kNormal, 1.0F);
  Shape<<<256, 256>>>(batch.gradient.get(), left.get(), right.get(), rows, cols, spectrum);
  CUDA_CHECK(cudaGetLastError());
  if (!batch.Update(config, 0, 1)) return 1;
  Buffer<double> ref(rows * cols);
  Buffer<double> sums(2);
  sums.Fill(0);
  Reference(batch.gradient.get(), rows, cols, config.newton_schulz, ref.get());
  Difference<<<256, 256>>>(batch.master_out.get(), ref.get(), rows * cols, 1.0, sums.get());
  const auto s = sums.ToHost(0, 2);
  const double error = std::sqrt(s[0] / s[1]);
  return Row(name, rows, cols, error, error <= limit ? 0 : 1);
}

// Gradients that differ by powers of two give the same update, bit for bit: norms from 1e-20 to
// 1e20, alone or among others.
int64_t CheckScaleAndBatch(int64_t rows, int64_t cols) {
  const MuonConfig config = UnscaledConfig();
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
  if (!together.Update(config, 0, 8)) return 1;
  for (int64_t z = 0; z < 8; ++z) {
    if (!alone.Update(config, z, 1)) return 1;
  }
  int64_t different = 0;
  for (int64_t z = 0; z < 8; ++z) {
    const float* const first = together.master_out.get();
    different += DifferentBits(first, together.master_out.get() + z * together.slot, rows * cols);
    different += DifferentBits(first, alone.master_out.get() + z * alone.slot, rows * cols);
  }
  return Row("scaled by 2^-66 .. 2^66, batch 1 and 8", rows, cols, 0, different);
}

// A zero gradient gives decay and nothing else; an inactive matrix keeps every bit, whatever its
// gradient holds; their neighbour is not disturbed.
int64_t CheckZeroAndInactive(int64_t rows, int64_t cols) {
  const MuonConfig config = UnscaledConfig();
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
  if (!batch.Update(config, 0, 3)) return 1;
  int64_t wrong = 0;
  const auto before = batch.master.ToHost(batch.slot, n);
  const auto after = batch.master_out.ToHost(batch.slot, n);
  for (int64_t i = 0; i < n; ++i) wrong += after[i] == before[i] * 0.75F ? 0 : 1;
  wrong += DifferentBits(batch.master.get() + 2 * batch.slot,
                         batch.master_out.get() + 2 * batch.slot, n);
  wrong += DifferentBits(batch.momentum.get() + 2 * batch.slot,
                         batch.momentum_out.get() + 2 * batch.slot, n);
  for (const int64_t z : {0, 1, 2}) {
    const auto master = batch.master_out.ToHost(z * batch.slot, n);
    const auto weight = batch.weight.ToHost(z * batch.slot, n);
    for (int64_t i = 0; i < n; ++i) {
      const bool rounded = static_cast<float>(weight[i]) ==
                           static_cast<float>(static_cast<__nv_bfloat16>(master[i]));
      wrong += rounded && std::isfinite(master[i]) ? 0 : 1;
    }
  }
  return Row("zero, inactive with NaN gradient, neighbour", rows, cols, 0, wrong);
}

int Main(bool brief) {
  std::printf("#%-44s %6s %6s %10s %8s\n", "case", "rows", "cols", "error", "#wrong");
  int64_t wrong = 0;
  // Brief: for compute-sanitizer, every kernel once.
  using Shapes = std::vector<std::pair<int64_t, int64_t>>;
  for (const auto& [rows, cols] :
       brief ? Shapes{{136, 200}, {200, 133}}
             : Shapes{{256, 1024}, {1024, 256}, {511, 513}, {1000, 3000}, {512, 512}}) {
    wrong += CheckSpectrum("gaussian", Spectrum::kGaussian, rows, cols, 0.04);
    wrong += CheckZeroAndInactive(rows, cols);
    if (brief) continue;
    wrong += CheckSpectrum("heavy-tailed", Spectrum::kHeavyTailed, rows, cols, 0.04);
    wrong += CheckSpectrum("half of the rows zero", Spectrum::kHalfZero, rows, cols, 0.11);
    wrong += CheckSpectrum("rows fall to exp(-6)", Spectrum::kExponential, rows, cols, 0.11);
    wrong += CheckSpectrum("rank 10", Spectrum::kRank10, rows, cols, 0.11);
    wrong += CheckScaleAndBatch(rows, cols);
  }
  std::printf("# %s\n", wrong == 0 ? "all right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  return dmuond::bench::Main(argc > 1 && std::string(argv[1]) == "--brief");
}
