#include "kernels/cuda/tile_tuner.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "kernels/cuda/tiles.h"

namespace dmuond::kernels::cuda {
namespace {

// The fastest of some rounds counts: others were disturbed. A round's launches follow one another
// as in a captured iteration.
constexpr int kRounds = 3;
constexpr double kRoundMicroseconds = 400;
constexpr int kLaunchesMax = 32;

class Stopwatch {
 public:
  Stopwatch() {
    good_ = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess &&
            cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  ~Stopwatch() {
    if (end_ != nullptr) cudaEventDestroy(end_);
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Microseconds a launch, of `launches` one after another.
  std::optional<double> Time(const Gemm& gemm, int launches) {
    if (!good_ || gemm.Launch(stream_) != cudaSuccess) return std::nullopt;
    if (cudaEventRecord(begin_, stream_) != cudaSuccess) return std::nullopt;
    for (int i = 0; i < launches; ++i) {
      if (gemm.Launch(stream_, /*overlap=*/i > 0) != cudaSuccess) return std::nullopt;
    }
    float milliseconds = 0;
    if (cudaEventRecord(end_, stream_) != cudaSuccess ||
        cudaEventSynchronize(end_) != cudaSuccess ||
        cudaEventElapsedTime(&milliseconds, begin_, end_) != cudaSuccess) {
      return std::nullopt;
    }
    return 1e3 * static_cast<double>(milliseconds) / launches;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  bool good_ = false;
};

std::optional<double> Measure(const GemmProblem& problem, GemmOptions options, GemmTile tile,
                              Stopwatch& stopwatch) {
  options.tile = tile;
  std::string error;
  const std::unique_ptr<Gemm> gemm = Gemm::Create({&problem, 1}, options, &error);
  if (gemm == nullptr) return std::nullopt;
  std::optional<double> best = stopwatch.Time(*gemm, 1);
  if (!best.has_value()) return best;
  const int launches = std::clamp(static_cast<int>(kRoundMicroseconds / *best), 1, kLaunchesMax);
  for (int round = 0; round < kRounds; ++round) {
    const std::optional<double> time = stopwatch.Time(*gemm, launches);
    if (!time.has_value()) return time;
    best = std::min(*best, *time);
  }
  return best;
}

}  // namespace

GemmTile TileTuner::Fastest(const GemmProblem& problem, const GemmOptions& options) {
  const int64_t depth = options.layout == GemmLayout::kTN ? problem.a.rows : problem.a.cols;
  Choice choice{options.type,
                options.layout,
                problem.symmetric,
                (problem.c.data != nullptr ? 1 : 0) + (problem.c2.data != nullptr ? 1 : 0),
                {problem.d.rows, problem.d.cols, depth, problem.batch},
                TileFor(problem),
                0};
  for (const Choice& known : choices_) {
    if (known.type == choice.type && known.layout == choice.layout &&
        known.symmetric == choice.symmetric && known.addends == choice.addends &&
        known.sizes == choice.sizes) {
      return known.tile;
    }
  }
  Stopwatch stopwatch;
  for (const GemmTile tile : kGemmTiles) {
    const std::optional<double> time = Measure(problem, options, tile, stopwatch);
    if (time.has_value() && (choice.microseconds == 0 || *time < choice.microseconds)) {
      choice.tile = tile;
      choice.microseconds = *time;
    }
  }
  choices_.push_back(choice);
  return choice.tile;
}

}  // namespace dmuond::kernels::cuda
