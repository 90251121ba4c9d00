// Newton-Schulz in fp64 on the GPU, standard form: what updates are compared with.
#ifndef DMUOND_BENCH_CUDA_NEWTON_SCHULZ_REFERENCE_CUH_
#define DMUOND_BENCH_CUDA_NEWTON_SCHULZ_REFERENCE_CUH_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "bench/cuda/harness.cuh"
#include "kernels/cuda/muon_graph.h"
#include "kernels/presets.h"

namespace dmuond::bench {

using kernels::MuonConfig;
using kernels::NewtonSchulzConfig;

// out = alpha A B + beta C in fp64; A by strides, as ReferenceProduct.
__global__ void Product64(double* out, const double* a, const double* b, const double* c, int64_t m,
                          int64_t n, int64_t k, int64_t ar, int64_t ak, int64_t bk, int64_t bn,
                          double alpha, double beta) {
  __shared__ double sa[16][65];
  __shared__ double sb[16][65];
  const int64_t row0 = blockIdx.y * 64LL;
  const int64_t col0 = blockIdx.x * 64LL;
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  double sum[4][4] = {};
  for (int64_t k0 = 0; k0 < k; k0 += 16) {
    for (int i = threadIdx.x; i < 16 * 64; i += 256) {
      // Consecutive threads read consecutive addresses, whichever way the operand lies.
      const int ka = ak == 1 ? i % 16 : i / 64;
      const int xa = ak == 1 ? i / 16 : i % 64;
      sa[ka][xa] = row0 + xa < m && k0 + ka < k ? a[(row0 + xa) * ar + (k0 + ka) * ak] : 0.0;
      const int kb = bk == 1 ? i % 16 : i / 64;
      const int xb = bk == 1 ? i / 16 : i % 64;
      sb[kb][xb] = col0 + xb < n && k0 + kb < k ? b[(k0 + kb) * bk + (col0 + xb) * bn] : 0.0;
    }
    __syncthreads();
    for (int kk = 0; kk < 16; ++kk) {
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) sum[i][j] += sa[kk][ty + i * 16] * sb[kk][tx + j * 16];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t r = row0 + ty + i * 16;
      const int64_t s = col0 + tx + j * 16;
      if (r < m && s < n) {
        out[r * n + s] = alpha * sum[i][j] + (c == nullptr ? 0.0 : beta * c[r * n + s]);
      }
    }
  }
}
inline void Multiply(double* out, const double* a, const double* b, const double* c, int64_t m,
                     int64_t n, int64_t k, int64_t ar, int64_t ak, int64_t bk, int64_t bn,
                     double alpha, double beta) {
  const dim3 grid(static_cast<unsigned>((n + 63) / 64), static_cast<unsigned>((m + 63) / 64));
  Product64<<<grid, 256>>>(out, a, b, c, m, n, k, ar, ak, bk, bn, alpha, beta);
  CUDA_CHECK(cudaGetLastError());
}

__global__ void Widen(double* out, const float* in, int64_t count, double scale) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = scale * static_cast<double>(in[i]);
  }
}
__global__ void SumSquares(const double* in, int64_t count, double* out) {
  double sum = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    sum += in[i] * in[i];
  }
  atomicAdd(out, sum);
}

// O = NS(g) in fp64, standard form: out has rows x cols elements.
inline void Reference(const float* g, int64_t rows, int64_t cols, const NewtonSchulzConfig& options,
                      double* out) {
  const int64_t count = rows * cols;
  const int64_t p = std::min(rows, cols);
  const int64_t q = std::max(rows, cols);
  Buffer<double> norm(1);
  norm.Fill(0);
  Widen<<<1024, 256>>>(out, g, count, 1.0);
  SumSquares<<<1024, 256>>>(out, count, norm.get());
  const double squared = norm.ToHost(0, 1)[0];
  Widen<<<1024, 256>>>(out, g, count, squared > 0 ? 1 / std::sqrt(squared) : 0.0);
  Buffer<double> other(count);
  Buffer<double> a(p * p);
  Buffer<double> b(p * p);
  const bool tall = rows > cols;
  double* x = out;
  double* y = other.get();
  if (options.norm == kernels::NormRule::kSchatten4 && squared > 0) {
    Multiply(a.get(), x, x, nullptr, p, p, q, tall ? 1 : cols, tall ? cols : 1, tall ? cols : 1,
             tall ? 1 : cols, 1, 0);
    norm.Fill(0);
    SumSquares<<<1024, 256>>>(a.get(), p * p, norm.get());
    const double schatten = std::pow(norm.ToHost(0, 1)[0], 0.25);
    Widen<<<1024, 256>>>(out, g, count, 1 / (std::sqrt(squared) * schatten));
  }
  for (const auto& [ca, cb, cc] : options.coefficients) {
    // X is p x q with strides (xr, xc).
    const int64_t xr = tall ? 1 : cols;
    const int64_t xc = tall ? cols : 1;
    Multiply(a.get(), x, x, nullptr, p, p, q, xr, xc, xc, xr, 1, 0);
    Multiply(b.get(), a.get(), a.get(), a.get(), p, p, p, p, 1, p, 1, cc, cb);
    if (tall) {
      Multiply(y, x, b.get(), x, rows, cols, p, cols, 1, p, 1, 1, ca);
    } else {
      Multiply(y, b.get(), x, x, rows, cols, p, p, 1, cols, 1, 1, ca);
    }
    std::swap(x, y);
  }
  if (x != out) {
    CUDA_CHECK(cudaMemcpy(out, x, count * sizeof(double), cudaMemcpyDeviceToDevice));
  }
}

// Squared difference and squared reference of -factor * ref against values.
__global__ void Difference(const float* values, const double* ref, int64_t count, double factor,
                           double* sums) {
  double error = 0;
  double norm = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const double e = static_cast<double>(values[i]) + factor * ref[i];
    error += e * e;
    norm += factor * ref[i] * factor * ref[i];
  }
  atomicAdd(&sums[0], error);
  atomicAdd(&sums[1], norm);
}

// A preset's name, or one with another norm or type: "dmuon,schatten4", "torch,fp16".
inline MuonConfig PresetConfig(const std::string& preset) {
  std::stringstream words(preset);
  std::string word;
  std::getline(words, word, ',');
  auto found = kernels::FindPreset(word);
  absl::Status status = found.status();
  while (status.ok() && std::getline(words, word, ',')) {
    if (word == "schatten4") {
      found->newton_schulz.norm = kernels::NormRule::kSchatten4;
    } else if (word == "fp16") {
      found->newton_schulz.dtype = kernels::DType::kF16;
    } else {
      status = absl::InvalidArgumentError("preset '" + preset + "': '" + word + "' is unknown");
    }
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(2);
  }
  return *found;
}

// A prepared batch and the workspace that it runs in.
struct PreparedUpdate {
  std::unique_ptr<Buffer<uint8_t>> workspace;
  std::unique_ptr<kernels::cuda::MuonGraph> graph;

  [[nodiscard]] const kernels::cuda::MuonUpdate& update() const { return graph->update(); }
};
inline PreparedUpdate Prepare(const MuonConfig& config, int64_t rows, int64_t cols, int64_t batch,
                              kernels::cuda::TileTuner* tuner = nullptr,
                              kernels::ProductEngine engine = kernels::ProductEngine::kOwn,
                              bool separate = false,
                              kernels::DType weight = kernels::DType::kBF16) {
  const auto program = kernels::BuildNewtonSchulz(config.newton_schulz, rows, cols);
  if (!program.ok()) {
    std::printf("# %s\n", std::string(program.status().message()).c_str());
    return {};
  }
  const kernels::cuda::MuonGraphBatch one{&config, &*program, weight, batch, engine, separate};
  PreparedUpdate prepared;
  prepared.workspace =
      std::make_unique<Buffer<uint8_t>>(kernels::cuda::MuonGraph::WorkspaceBytes(one));
  prepared.workspace->Fill(0xFF);
  std::string error;
  prepared.graph = kernels::cuda::MuonGraph::Create(one, prepared.workspace->get(), tuner, &error);
  if (prepared.graph == nullptr) std::printf("# %s\n", error.c_str());
  return prepared;
}

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_CUDA_NEWTON_SCHULZ_REFERENCE_CUH_
