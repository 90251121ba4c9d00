#include "bench/step/baselines.h"

#include <cblas.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/newton_schulz.h"
#include "kernels/presets.h"

namespace dmuond::bench {
namespace {

using kernels::NewtonSchulzProgram;
using kernels::Product;
using kernels::ProductKind;

double SecondsOnThreads(int threads, const std::function<void(int thread)>& work) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) workers.emplace_back(work, i);
  work(0);
  for (std::thread& worker : workers) worker.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

NewtonSchulzProgram DefaultProgram(int64_t rows, int64_t cols) {
  const auto preset = kernels::FindPreset(kernels::kDefaultPreset);
  auto program =
      preset.ok() ? kernels::BuildNewtonSchulz(preset->newton_schulz, rows, cols) : preset.status();
  if (!program.ok()) {
    std::cerr << program.status() << "\n";
    std::exit(1);
  }
  return *std::move(program);
}

// Values like a matrix's: on equal ones a processor at its power limit would run faster.
std::vector<float> Values(int64_t n) {
  std::minstd_rand random(1);
  std::normal_distribution<float> normal(0, 1e-2F);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

struct Buffers {
  explicit Buffers(const NewtonSchulzProgram& program)
      : square(Values(program.p * program.p)),
        square_out(program.p * program.p),
        wide(Values(program.p * program.q)),
        wide_out(program.p * program.q) {}
  std::vector<float> square, square_out, wide, wide_out;
};

// Of a symmetric result, what lies on and below the diagonal, by blocks of columns: OpenBLAS has no
// such product of two matrices.
void MultiplyLowerBlocks(int p, Buffers& buffers) {
  constexpr int kBlock = 128;
  for (int begin = 0; begin < p; begin += kBlock) {
    const int width = std::min(kBlock, p - begin);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, p - begin, width, p, 1,
                buffers.square.data() + (int64_t{begin} * p), p, buffers.square.data() + begin, p,
                0, buffers.square_out.data() + (int64_t{begin} * p) + begin, p);
  }
}

void Multiply(const NewtonSchulzProgram& program, const Product& product, ProductWork work,
              Buffers& buffers) {
  const auto p = static_cast<int>(program.p);
  const auto q = static_cast<int>(program.q);
  switch (product.kind) {
    case ProductKind::kGram:
      cblas_ssyrk(CblasRowMajor, CblasLower, CblasNoTrans, p, q, 1, buffers.wide.data(), q, 0,
                  buffers.square_out.data(), p);
      break;
    case ProductKind::kSymmetric:
      if (work == ProductWork::kLowerBlocks) return MultiplyLowerBlocks(p, buffers);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, p, p, p, 1, buffers.square.data(), p,
                  buffers.square.data(), p, 0, buffers.square_out.data(), p);
      break;
    case ProductKind::kApply:
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, p, q, p, 1, buffers.square.data(), p,
                  buffers.wide.data(), q, 0, buffers.wide_out.data(), q);
      break;
  }
}

std::byte* SharedMemory(int64_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::cerr << "cannot map " << bytes << " bytes\n";
    std::exit(1);
  }
  std::memset(memory, 1, bytes);
  return static_cast<std::byte*>(memory);
}

}  // namespace

double ProductSeconds(const Matrices& matrices, int threads, int repeats, ProductWork work) {
  const NewtonSchulzProgram program = DefaultProgram(matrices.rows, matrices.cols);
  std::vector<Buffers> buffers(threads, Buffers(program));
  double least = 1e9;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::atomic<int> next{0};
    least = std::min(least, SecondsOnThreads(threads, [&](int thread) {
                       while (next.fetch_add(1) < matrices.count) {
                         for (const Product& product : program.products) {
                           Multiply(program, product, work, buffers[thread]);
                         }
                       }
                     }));
  }
  return least;
}

double ProductSeconds(const std::vector<Matrices>& matrices, int threads, int repeats,
                      ProductWork work) {
  double seconds = 0;
  for (const Matrices& equal : matrices) seconds += ProductSeconds(equal, threads, repeats, work);
  return seconds;
}

double MemcpyBytesPerSecond(int64_t bytes, int threads, int repeats) {
  std::byte* from = SharedMemory(bytes);
  std::byte* to = SharedMemory(bytes);
  const int64_t share = bytes / threads;
  kernels::cpu::ThreadPool pool(threads);
  double least = 1e9;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    pool.ParallelFor(threads, [&](int64_t part, int) {
      std::memcpy(to + (part * share), from + (part * share), share);
    });
    const auto end = std::chrono::steady_clock::now();
    least = std::min(least, std::chrono::duration<double>(end - begin).count());
  }
  ::munmap(from, bytes);
  ::munmap(to, bytes);
  return static_cast<double>(share * threads) / least;
}

}  // namespace dmuond::bench
