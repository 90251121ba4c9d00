#include "kernels/cuda/tile_tuner.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kernels/cuda/tiles.h"

namespace dmuond::kernels::cuda {
namespace {

// Candidates take turns, so that a chip that becomes slower under load is slower for all of them,
// and the median of the rounds counts. A round's launches follow one another as in a captured
// iteration.
constexpr int kRounds = 5;
// After two rounds only those go on that are within so much of the fastest one.
constexpr int kRoundsOfAll = 2;
constexpr double kWithinReach = 1.15;
constexpr double kRoundMicroseconds = 250;
constexpr int kLaunchesMax = 32;
// Products that take longer have so many tiles that the rule's is right.
constexpr double kLongMicroseconds = 1000;
// So much faster than the rule's tile must another be: less is noise.
constexpr double kGainMin = 0.03;

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

struct Candidate {
  GemmTile tile;
  std::unique_ptr<Gemm> gemm;
  int launches = 1;
  std::vector<double> times;

  [[nodiscard]] double Median() {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  [[nodiscard]] double Best() const { return *std::min_element(times.begin(), times.end()); }
};

// Empty where anything fails, and of long products.
std::vector<Candidate> Measure(const GemmProblem& problem, GemmOptions options) {
  std::vector<Candidate> candidates;
  Stopwatch stopwatch;
  for (const GemmTile tile : kGemmTiles) {
    if (!Fits(tile, problem, options.layout)) continue;
    options.tile = tile;
    std::string error;
    Candidate candidate{tile, Gemm::Create({&problem, 1}, options, &error), 1, {}};
    if (candidate.gemm == nullptr) return {};
    const std::optional<double> once = stopwatch.Time(*candidate.gemm, 1);
    if (!once.has_value()) return {};
    if (*once > kLongMicroseconds) return {};
    candidate.launches = std::clamp(static_cast<int>(kRoundMicroseconds / *once), 1, kLaunchesMax);
    candidates.push_back(std::move(candidate));
  }
  double fastest = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    for (Candidate& candidate : candidates) {
      if (round >= kRoundsOfAll && candidate.Best() > kWithinReach * fastest) continue;
      const std::optional<double> time = stopwatch.Time(*candidate.gemm, candidate.launches);
      if (!time.has_value()) return {};
      candidate.times.push_back(*time);
      fastest = std::min(fastest, *time);
    }
  }
  return candidates;
}

}  // namespace

GemmTile TileTuner::Fastest(const GemmProblem& problem, const GemmOptions& options) {
  const int64_t depth = options.layout == GemmLayout::kTN ? problem.a.rows : problem.a.cols;
  Choice choice{options.type,
                options.layout,
                problem.symmetric,
                ShapeOf(problem, options.layout).same_operands,
                (problem.c.data != nullptr ? 1 : 0) + (problem.c2.data != nullptr ? 1 : 0),
                {problem.d.rows, problem.d.cols, depth, problem.batch},
                GemmTile::k256,
                0};
  for (const Choice& known : choices_) {
    if (known.type == choice.type && known.layout == choice.layout &&
        known.symmetric == choice.symmetric && known.same_operands == choice.same_operands &&
        known.addends == choice.addends && known.sizes == choice.sizes &&
        Fits(known.tile, problem, options.layout)) {
      return known.tile;
    }
  }
  choice.tile = TileFor(problem, options.layout);
  std::vector<Candidate> candidates;
  if (measures_) candidates = Measure(problem, options);
  for (Candidate& candidate : candidates) {
    if (candidate.tile == choice.tile) choice.microseconds = candidate.Median() * (1 - kGainMin);
  }
  for (Candidate& candidate : candidates) {
    if (candidate.Median() < choice.microseconds) {
      choice.tile = candidate.tile;
      choice.microseconds = candidate.Median();
    }
  }
  choices_.push_back(choice);
  return choice.tile;
}

}  // namespace dmuond::kernels::cuda
