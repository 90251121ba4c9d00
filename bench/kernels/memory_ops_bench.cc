// Memory-bound operations beside memcpy. Every iteration times one memcpy of kBytes and one call of
// the operation; of_memcpy is (bytes that the operation reads and writes per second) / (those of
// memcpy), from the fastest of each: other programs only ever make them slower.
#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_device.h"

namespace dmuond::kernels {
namespace {

// Far larger than the caches of one core.
constexpr int64_t kElements = int64_t{16} << 20;
constexpr size_t kBytes = kElements * sizeof(float);

// Of this thread alone: what the scheduler gives to others in between does not count.
double Now() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double Seconds(const std::function<void()>& work) {
  const double begin = Now();
  work();
  return Now() - begin;
}

class Memory {
 public:
  explicit Memory(int sources) : device_(*cpu::CpuDevice::Create(1)) {
    stream_ = *device_->CreateStream();
    for (int i = 0; i < sources + 1; ++i) {
      mappings_.push_back(*device_->AllocateScratch(kBytes));
      std::memset(mappings_.back()->data(), 0, kBytes);
    }
  }
  Ops& ops() { return device_->ops(); }
  Stream& stream() { return *stream_; }
  [[nodiscard]] std::byte* dst() const { return mappings_[0]->data(); }
  [[nodiscard]] std::byte* src(int i = 0) const { return mappings_[i + 1]->data(); }

 private:
  std::unique_ptr<cpu::CpuDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
};

void Compare(benchmark::State& state, Memory& memory, double bytes,
             const std::function<absl::Status()>& operation) {
  double own = std::numeric_limits<double>::max();
  double copy = own;
  while (state.KeepRunning()) {
    copy = std::min(copy, Seconds([&] { std::memcpy(memory.dst(), memory.src(), kBytes); }));
    const double seconds = Seconds([&] {
      if (!operation().ok()) state.SkipWithError("operation failed");
    });
    own = std::min(own, seconds);
    state.SetIterationTime(seconds);
  }
  const double rate = bytes / own;
  state.counters["GB/s"] = rate * 1e-9;
  state.counters["of_memcpy"] = rate / (2.0 * kBytes / copy);
}

StridedBox Box(std::byte* data, DType dtype, int64_t rows, int64_t cols, int64_t stride) {
  return {data, dtype, 2, {rows, cols}, {stride, 1}};
}

// Boxes of a tensor with 4096 columns: all of it, some of its rows, some of its columns.
void BM_Copy(benchmark::State& state, int64_t cols, DType dtype) {
  Memory memory(1);
  const int64_t width = 4096;
  const int64_t rows = kElements / width;
  const StridedBox src = Box(memory.src(), DType::kF32, rows, cols, width);
  const StridedBox dst = Box(memory.dst(), dtype, rows, cols, cols);
  const double bytes =
      static_cast<double>(rows * cols) * static_cast<double>(sizeof(float) + SizeOf(dtype));
  Compare(state, memory, bytes, [&] { return memory.ops().Copy(memory.stream(), dst, src); });
}

void BM_Sum(benchmark::State& state, int sources, DType dtype) {
  Memory memory(sources);
  std::vector<StridedBox> boxes;
  for (int i = 0; i < sources; ++i) boxes.push_back(Box(memory.src(i), dtype, 1, kElements, 0));
  std::vector<double> squares(static_cast<size_t>(NormBlocks(0, kElements)));
  SumTask task{Box(memory.dst(), DType::kF32, 1, kElements, 0), boxes, {}, 0.5F};
  task.squares = squares.data();  // as in a step
  const double bytes = static_cast<double>(kElements) *
                       (sizeof(float) + sources * static_cast<double>(SizeOf(dtype)));
  Compare(state, memory, bytes, [&] { return memory.ops().Sum(memory.stream(), {&task, 1}); });
}

void BM_SumsOfSquares(benchmark::State& state) {
  Memory memory(1);
  std::vector<double> sums(static_cast<size_t>(NormBlocks(0, kElements)));
  const NormTask task{reinterpret_cast<const float*>(memory.src()), kElements, 0, sums.data()};
  Compare(state, memory, kBytes, [&] {
    return memory.ops().SumsOfSquares(memory.stream(), {&task, 1});
  });
}

void BM_AdamW(benchmark::State& state) {
  Memory memory(7);
  const auto floats = [&](int i) { return reinterpret_cast<float*>(memory.src(i)); };
  UpdateScalars scalars;
  scalars.learning_rate = 1e-3;
  scalars.beta1 = 0.9;
  scalars.beta2 = 0.999;
  scalars.eps = 1e-8;
  const AdamWPiece piece{kElements, DType::kBF16, floats(0), floats(1),    floats(2), floats(3),
                         floats(4), floats(5),    floats(6), memory.dst(), &scalars};
  Compare(state, memory, 7.5 * kBytes, [&] {
    return memory.ops().UpdateAdamW(memory.stream(), {&piece, 1});
  });
}

BENCHMARK_CAPTURE(BM_Copy, whole_or_rows, 4096, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Copy, half_of_columns, 2048, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Copy, quarter_of_columns, 1024, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Copy, eighth_of_columns, 512, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Copy, whole_to_bf16, 4096, DType::kBF16)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 1_fp32, 1, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 1_bf16, 1, DType::kBF16)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 2_fp32, 2, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 4_fp32, 4, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 8_fp32, 8, DType::kF32)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 8_bf16, 8, DType::kBF16)->UseManualTime();
BENCHMARK_CAPTURE(BM_Sum, 8_fp16, 8, DType::kF16)->UseManualTime();
BENCHMARK(BM_SumsOfSquares)->UseManualTime();
BENCHMARK(BM_AdamW)->UseManualTime();

}  // namespace
}  // namespace dmuond::kernels
