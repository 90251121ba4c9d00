// What the GPU benchmarks and checks share: CUDA error checks, random data, reference products in
// fp64, the chip's clock and power (NVML), and timing under sustained load. No framework.
#ifndef DMUOND_BENCH_CUDA_HARNESS_CUH_
#define DMUOND_BENCH_CUDA_HARNESS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/gemm_schedule.h"

namespace dmuond::bench {

#define CUDA_CHECK(expression)                                                 \
  do {                                                                         \
    const cudaError_t check_result = (expression);                             \
    if (check_result != cudaSuccess) {                                         \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, \
                   cudaGetErrorString(check_result));                          \
      std::exit(2);                                                            \
    }                                                                          \
  } while (0)

// Device memory that frees itself.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    CUDA_CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  size_t count() const { return count_; }
  void Fill(int byte) { CUDA_CHECK(cudaMemset(data_, byte, count_ * sizeof(T))); }
  std::vector<T> ToHost(size_t first, size_t count) const {
    std::vector<T> host(count);
    CUDA_CHECK(cudaMemcpy(host.data(), data_ + first, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Counter-based random bits: the same everywhere.
__host__ __device__ inline uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
// Standard normal from one counter.
__device__ inline float Normal(uint64_t counter) {
  const uint64_t bits = Mix(counter);
  const float u = (static_cast<float>(bits >> 40) + 0.5F) * (1.0F / 16777216.0F);
  const float v = static_cast<float>(bits & 0xFFFFFF) * (1.0F / 16777216.0F);
  return sqrtf(-2.0F * logf(u)) * cospif(2.0F * v);
}

enum class Fill { kNormal, kSmallIntegers };

// values[z][r][c]; symmetric: element (r, c) is that of (max, min). Padding beyond cols gets NaN,
// which nothing may read into a result.
template <typename T>
__global__ void FillMatrix(T* values, int64_t rows, int64_t cols, int64_t ld, int64_t batch_stride,
                           uint64_t seed, bool symmetric, Fill fill, float scale) {
  const int64_t z = blockIdx.z;
  const int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
    if (c >= ld) return;
    const int64_t hi = symmetric ? max(r, c) : r;
    const int64_t lo = symmetric ? min(r, c) : c;
    const uint64_t counter = Mix(seed + z) + static_cast<uint64_t>(hi) * 1000003ULL + lo;
    float x = fill == Fill::kNormal ? scale * Normal(counter)
                                    : static_cast<float>(static_cast<int>(Mix(counter) % 5) - 2);
    if (c >= cols) x = nanf("");
    values[z * batch_stride + r * ld + c] = static_cast<T>(x);
  }
}
template <typename T>
void FillRandom(T* values, int64_t rows, int64_t cols, int64_t ld, int64_t batch_stride,
                int64_t batch, uint64_t seed, bool symmetric, Fill fill, float scale) {
  const dim3 grid(static_cast<unsigned>((ld + 255) / 256),
                  static_cast<unsigned>(std::min<int64_t>(rows, 4096)),
                  static_cast<unsigned>(batch));
  FillMatrix<T><<<grid, 256>>>(values, rows, cols, ld, batch_stride, seed, symmetric, fill, scale);
  CUDA_CHECK(cudaGetLastError());
}

// out (fp64) = alpha A B + beta C + beta2 C2 + diagonal I, one matrix; (ar, ak): strides of A along
// rows and k; (bk, bn): of B along k and columns.
template <typename T>
__global__ void ReferenceProduct(double* out, const T* a, const T* b, const T* c, const T* c2,
                                 int64_t m, int64_t n, int64_t k, int64_t ar, int64_t ak,
                                 int64_t bk, int64_t bn, int64_t c_ld, double alpha, double beta,
                                 double beta2, double diagonal) {
  __shared__ float sa[16][65];
  __shared__ float sb[16][65];
  const int64_t row0 = blockIdx.y * 64LL;
  const int64_t col0 = blockIdx.x * 64LL;
  const int tx = threadIdx.x % 16;
  const int ty = threadIdx.x / 16;
  double sum[4][4] = {};
  for (int64_t k0 = 0; k0 < k; k0 += 16) {
    for (int i = threadIdx.x; i < 16 * 64; i += 256) {
      const int kk = i / 64;
      const int x = i % 64;
      sa[kk][x] = row0 + x < m && k0 + kk < k
                      ? static_cast<float>(a[(row0 + x) * ar + (k0 + kk) * ak])
                      : 0.0F;
      sb[kk][x] = col0 + x < n && k0 + kk < k
                      ? static_cast<float>(b[(k0 + kk) * bk + (col0 + x) * bn])
                      : 0.0F;
    }
    __syncthreads();
    for (int kk = 0; kk < 16; ++kk) {
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          sum[i][j] += static_cast<double>(sa[kk][ty * 4 + i]) * sb[kk][tx * 4 + j];
        }
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t r = row0 + ty * 4 + i;
      const int64_t s = col0 + tx * 4 + j;
      if (r >= m || s >= n) continue;
      double x = alpha * sum[i][j];
      if (c != nullptr) x += beta * static_cast<double>(static_cast<float>(c[r * c_ld + s]));
      if (c2 != nullptr) x += beta2 * static_cast<double>(static_cast<float>(c2[r * c_ld + s]));
      if (r == s) x += diagonal;
      out[r * n + s] = x;
    }
  }
}

struct Comparison {
  double error = 0;        // ||d - ref||_F / ||ref||_F, over the lower triangle if symmetric
  int64_t wrong = 0;       // elements off by more than the type's rounding and accumulation allow
  int64_t asymmetric = 0;  // elements that differ from their mirror image in any bit
};

// sums: [0] squared error, [1] squared reference
template <typename T>
__global__ void CompareKernel(const T* d, int64_t ld, const double* ref, int64_t m, int64_t n,
                              bool symmetric, double relative, double absolute, double* sums,
                              unsigned long long* counts) {
  double error = 0;
  double norm = 0;
  unsigned long long wrong = 0;
  unsigned long long asymmetric = 0;
  const int64_t total = m * n;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t r = i / n;
    const int64_t c = i % n;
    if (symmetric && c > r) continue;
    const T value = d[r * ld + c];
    const double x = static_cast<double>(static_cast<float>(value));
    const double e = x - ref[i];
    if (!(fabs(e) <= relative * fabs(ref[i]) + absolute)) ++wrong;
    error += e * e;
    norm += ref[i] * ref[i];
    if (symmetric) {
      const T mirrored = d[c * ld + r];
      if (*reinterpret_cast<const uint16_t*>(&mirrored) !=
          *reinterpret_cast<const uint16_t*>(&value)) {
        ++asymmetric;
      }
    }
  }
  atomicAdd(&sums[0], error);
  atomicAdd(&sums[1], norm);
  if (wrong != 0) atomicAdd(&counts[0], wrong);
  if (asymmetric != 0) atomicAdd(&counts[1], asymmetric);
}

// `absolute_of_rms`: allowed absolute error as a fraction of the reference's root mean square.
template <typename T>
Comparison Compare(const T* d, int64_t ld, const double* ref, int64_t m, int64_t n, bool symmetric,
                   double relative, double absolute_of_rms) {
  Buffer<double> sums(2);
  Buffer<unsigned long long> counts(2);
  Comparison result;
  double absolute = 0;
  for (int pass = 0; pass < 2; ++pass) {
    sums.Fill(0);
    counts.Fill(0);
    CompareKernel<T>
        <<<1024, 256>>>(d, ld, ref, m, n, symmetric, relative, absolute, sums.get(), counts.get());
    CUDA_CHECK(cudaGetLastError());
    const auto s = sums.ToHost(0, 2);
    const auto c = counts.ToHost(0, 2);
    const double elements = symmetric ? 0.5 * n * (n + 1) : static_cast<double>(m) * n;
    absolute = absolute_of_rms * std::sqrt(s[1] / elements);
    result.error = s[1] > 0 ? std::sqrt(s[0] / s[1]) : std::sqrt(s[0]);
    result.wrong = static_cast<int64_t>(c[0]);
    result.asymmetric = static_cast<int64_t>(c[1]);
  }
  return result;
}

template <typename W>
__global__ void CountDifferent(const W* a, const W* b, int64_t count, unsigned long long* out) {
  unsigned long long different = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    if (a[i] != b[i]) ++different;
  }
  if (different != 0) atomicAdd(out, different);
}
// Elements (of 2 or 4 bytes) whose bits differ.
template <typename T>
int64_t DifferentBits(const T* a, const T* b, int64_t count) {
  Buffer<unsigned long long> out(1);
  out.Fill(0);
  if constexpr (sizeof(T) == 2) {
    CountDifferent<<<1024, 256>>>(reinterpret_cast<const uint16_t*>(a),
                                  reinterpret_cast<const uint16_t*>(b), count, out.get());
  } else {
    CountDifferent<<<1024, 256>>>(reinterpret_cast<const uint32_t*>(a),
                                  reinterpret_cast<const uint32_t*>(b), count, out.get());
  }
  CUDA_CHECK(cudaGetLastError());
  return static_cast<int64_t>(out.ToHost(0, 1)[0]);
}

// Blocks of 64 x 64 that are no part of the lower form of a symmetric matrix of 2-byte elements
// (gemm_schedule.h).
__device__ __forceinline__ bool IsAboveBand(int64_t row, int64_t col) {
  return col / 64 > row / 64 + kernels::cuda::kBandBlocks;
}
// Puts NaN (in fp16 and in bf16) where the lower form has nothing: no kernel may use it.
__global__ static void DropAboveBand(uint16_t* matrices, int64_t n, int64_t ld, int64_t stride) {
  const int64_t row = blockIdx.x;
  uint16_t* const at = matrices + blockIdx.y * stride + row * ld;
  for (int64_t col = threadIdx.x; col < n; col += blockDim.x) {
    if (IsAboveBand(row, col)) at[col] = 0x7FFF;
  }
}
// Puts there what lies below the diagonal, and counts what was not 0xFFFF, and so was written.
__global__ static void CompleteAboveBand(uint16_t* matrices, int64_t n, int64_t ld, int64_t stride,
                                         unsigned long long* written) {
  const int64_t row = blockIdx.x;
  uint16_t* const matrix = matrices + blockIdx.y * stride;
  for (int64_t col = threadIdx.x; col < n; col += blockDim.x) {
    if (!IsAboveBand(row, col)) continue;
    if (matrix[row * ld + col] != 0xFFFF) atomicAdd(written, 1);
    matrix[row * ld + col] = matrix[col * ld + row];
  }
}
template <typename T>
void ToLowerForm(T* matrices, int64_t n, int64_t ld, int64_t stride, int64_t batch) {
  const dim3 grid(static_cast<unsigned>(n), static_cast<unsigned>(batch));
  DropAboveBand<<<grid, 256>>>(reinterpret_cast<uint16_t*>(matrices), n, ld, stride);
  CUDA_CHECK(cudaGetLastError());
}
// Completes matrices of which a product has stored the lower form; they were filled with 0xFF
// before. Returns how many elements the product stored beyond that form.
template <typename T>
int64_t FromLowerForm(T* matrices, int64_t n, int64_t ld, int64_t stride, int64_t batch) {
  Buffer<unsigned long long> written(1);
  written.Fill(0);
  const dim3 grid(static_cast<unsigned>(n), static_cast<unsigned>(batch));
  CompleteAboveBand<<<grid, 256>>>(reinterpret_cast<uint16_t*>(matrices), n, ld, stride,
                                   written.get());
  CUDA_CHECK(cudaGetLastError());
  return static_cast<int64_t>(written.ToHost(0, 1)[0]);
}

// The chip's own account of itself. Reads only.
class Nvml {
 public:
  Nvml() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    const auto init = Symbol<int (*)()>("nvmlInit_v2");
    const auto handle = Symbol<int (*)(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
    clock_ = Symbol<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
    power_ = Symbol<int (*)(void*, unsigned*)>("nvmlDeviceGetPowerUsage");
    if (init == nullptr || handle == nullptr || init() != 0 || handle(0, &device_) != 0) {
      device_ = nullptr;
    }
  }
  int SmMhz() const {
    unsigned value = 0;
    if (device_ == nullptr || clock_ == nullptr || clock_(device_, 1, &value) != 0) return -1;
    return static_cast<int>(value);
  }
  int Watts() const {
    unsigned value = 0;
    if (device_ == nullptr || power_ == nullptr || power_(device_, &value) != 0) return -1;
    return static_cast<int>(value / 1000);
  }

 private:
  template <typename F>
  F Symbol(const char* name) const {
    return reinterpret_cast<F>(dlsym(library_, name));
  }
  void* library_ = nullptr;
  void* device_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
};

struct Timing {
  double p50_us = 0;
  double p99_us = 0;
  int sm_mhz = -1;
  int watts = -1;
};

// Runs `launch` (which enqueues one unit of work) for `warm_seconds`, then times it. Short units
// are timed several at a time, captured into a graph, so that the host's launches stay out.
inline Timing TimeSustained(const std::function<void(cudaStream_t)>& launch, double warm_seconds,
                            const Nvml& nvml) {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t start;
  cudaEvent_t stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  launch(stream);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaEventRecord(start, stream));
  for (int i = 0; i < 5; ++i) launch(stream);
  CUDA_CHECK(cudaEventRecord(stop, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
  const double once_us = ms * 200.0;
  const int group = std::clamp(static_cast<int>(1000.0 / once_us), 1, 100);

  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < group; ++i) launch(stream);
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));

  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  while (elapsed() < warm_seconds) {
    for (int i = 0; i < 8; ++i) CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  const double group_us = once_us * group;
  const int samples = std::clamp(static_cast<int>(400e3 / group_us), 15, 200);
  std::vector<cudaEvent_t> events(samples + 1);
  for (auto& event : events) CUDA_CHECK(cudaEventCreate(&event));
  for (int i = 0; i < 4; ++i) CUDA_CHECK(cudaGraphLaunch(executable, stream));
  CUDA_CHECK(cudaEventRecord(events[0], stream));
  for (int i = 0; i < samples; ++i) {
    CUDA_CHECK(cudaGraphLaunch(executable, stream));
    CUDA_CHECK(cudaEventRecord(events[i + 1], stream));
  }
  Timing timing;
  CUDA_CHECK(cudaEventSynchronize(events[samples / 2]));
  timing.sm_mhz = nvml.SmMhz();
  timing.watts = nvml.Watts();
  CUDA_CHECK(cudaStreamSynchronize(stream));
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) {
    CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
    times.push_back(ms * 1000.0 / group);
  }
  std::sort(times.begin(), times.end());
  timing.p50_us = times[times.size() / 2];
  timing.p99_us = times[times.size() * 99 / 100];
  for (auto& event : events) cudaEventDestroy(event);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  return timing;
}

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_CUDA_HARNESS_CUH_
