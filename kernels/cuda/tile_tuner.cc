#include "kernels/cuda/tile_tuner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/cuda/tiles.h"
#include "kernels/cuda/tuner_data.h"

namespace dmuond::kernels::cuda {
namespace {

// Candidates take turns without a pause, so that a chip that becomes slower under load is slower
// for all of them, and the median of the rounds counts. A turn's launches follow one another as in
// a captured iteration.
constexpr int kRounds = 5;
// After two rounds only those go on that are within so much of the fastest one.
constexpr int kRoundsOfAll = 2;
constexpr double kWithinReach = 1.15;
constexpr double kTurnMicroseconds = 250;
constexpr int kLaunchesMax = 500;
// Products that take longer have so many tiles that the rule's is right.
constexpr double kLongMicroseconds = 1000;
// So much faster than the rule's tile must another be: less is noise.
constexpr double kGainMin = 0.03;
// Who is, in rounds that are too short to heat the chip, and the rule's tile take turns of this
// length once more, in a burst in which it reaches its clock under load. The first third is for
// that alone.
constexpr int kBurstTurns = 36;
constexpr double kBurstTurnMicroseconds = 1800;

struct Candidate {
  GemmTile tile;
  std::unique_ptr<Gemm> gemm;
  double once = 0;  // microseconds
  std::vector<double> times;

  [[nodiscard]] double Median() {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  [[nodiscard]] double Best() const { return *std::min_element(times.begin(), times.end()); }
};

class Stopwatch {
 public:
  Stopwatch() {
    good_ = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess;
    for (cudaEvent_t& event : events_) {
      good_ = good_ && cudaEventCreate(&event) == cudaSuccess;
    }
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  // Microseconds of a launch in each of the turns, at most kBurstTurns, which follow one another.
  std::optional<std::vector<double>> Time(std::span<const Candidate* const> turns,
                                          double turn_microseconds) {
    if (!good_ || cudaEventRecord(events_[0], stream_) != cudaSuccess) return std::nullopt;
    std::vector<int> launches;
    for (size_t turn = 0; turn < turns.size(); ++turn) {
      const double once = turns[turn]->once;
      launches.push_back(
          once == 0 ? 1 : std::clamp(static_cast<int>(turn_microseconds / once), 1, kLaunchesMax));
      for (int i = 0; i < launches.back(); ++i) {
        if (turns[turn]->gemm->Launch(stream_, /*overlap=*/i > 0) != cudaSuccess) {
          return std::nullopt;
        }
      }
      if (cudaEventRecord(events_[turn + 1], stream_) != cudaSuccess) return std::nullopt;
    }
    if (cudaEventSynchronize(events_[turns.size()]) != cudaSuccess) return std::nullopt;
    std::vector<double> times;
    for (size_t turn = 0; turn < turns.size(); ++turn) {
      float milliseconds = 0;
      if (cudaEventElapsedTime(&milliseconds, events_[turn], events_[turn + 1]) != cudaSuccess) {
        return std::nullopt;
      }
      times.push_back(1e3 * static_cast<double>(milliseconds) / launches[turn]);
    }
    return times;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kBurstTurns + 1> events_{};
  bool good_ = false;
};

// The same product of random matrices, with factors that are there: what lies in a workspace before
// its first use may be NaN, which takes less power, and a chip is faster with it.
std::optional<GemmProblem> WithRandomOperands(GemmProblem problem, const GemmOptions& options,
                                              cudaStream_t stream) {
  const auto type = options.type == GemmType::kF16 ? WeightType::kF16 : WeightType::kBF16;
  uint64_t seed = 1;
  for (const MatrixView* view : {&problem.a, &problem.b, &problem.c, &problem.c2}) {
    if (view->data == nullptr) continue;
    const int64_t count = (problem.batch - 1) * view->batch_stride + view->rows * view->ld;
    if (LaunchRandom(stream, type, view->data, count, seed++, 1) != cudaSuccess) {
      return std::nullopt;
    }
  }
  const int64_t depth = options.layout == GemmLayout::kTN ? problem.a.rows : problem.a.cols;
  problem.alpha = {nullptr, static_cast<float>(1 / std::sqrt(static_cast<double>(depth)))};
  problem.beta = problem.beta2 = {nullptr, 1};
  return problem;
}

// A tile that is faster than the rule's, with its time, or the rule's. No time where anything
// fails, and for long products.
std::pair<GemmTile, double> Measure(const GemmProblem& given, GemmOptions options, GemmTile rule) {
  const std::pair<GemmTile, double> unmeasured = {rule, 0};
  Stopwatch stopwatch;
  const std::optional<GemmProblem> problem = WithRandomOperands(given, options, stopwatch.stream());
  if (!problem.has_value()) return unmeasured;
  std::vector<Candidate> candidates;
  for (const GemmTile tile : kGemmTiles) {
    options.tile = tile;
    std::string error;
    GemmProblem as = *problem;
    as.store_lower = ReadsLower(tile, options.layout);  // as its neighbours then do
    Candidate candidate{tile, Gemm::Create({&as, 1}, options, &error), 0, {}};
    if (candidate.gemm == nullptr) return unmeasured;
    const Candidate* const twice[] = {&candidate, &candidate};
    const auto times = stopwatch.Time(twice, 0);
    if (!times.has_value() || times->back() > kLongMicroseconds) return unmeasured;
    candidate.once = times->back();
    candidates.push_back(std::move(candidate));
  }
  double fastest = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    std::vector<const Candidate*> turns;
    std::vector<Candidate*> to;
    for (Candidate& candidate : candidates) {
      if (round >= kRoundsOfAll && candidate.Best() > kWithinReach * fastest) continue;
      turns.push_back(&candidate);
      to.push_back(&candidate);
    }
    const auto times = stopwatch.Time(turns, kTurnMicroseconds);
    if (!times.has_value()) return unmeasured;
    for (size_t i = 0; i < to.size(); ++i) {
      to[i]->times.push_back((*times)[i]);
      fastest = std::min(fastest, (*times)[i]);
    }
  }
  const auto by_median = [](Candidate& a, Candidate& b) { return a.Median() < b.Median(); };
  const auto best = std::min_element(candidates.begin(), candidates.end(), by_median);
  const auto usual = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const Candidate& c) { return c.tile == rule; });
  if (usual == candidates.end()) return unmeasured;
  const auto wins = [&] { return best->Median() < (1 - kGainMin) * usual->Median(); };
  if (!wins()) return {rule, usual->Median()};
  std::vector<const Candidate*> turns;
  while (turns.size() < kBurstTurns) turns.insert(turns.end(), {&*usual, &*best});
  const auto times = stopwatch.Time(turns, kBurstTurnMicroseconds);
  if (!times.has_value()) return unmeasured;
  usual->times.clear();
  best->times.clear();
  for (size_t i = kBurstTurns / 3; i < kBurstTurns; i += 2) {
    usual->times.push_back((*times)[i]);
    best->times.push_back((*times)[i + 1]);
  }
  return wins() ? std::pair(best->tile, best->Median()) : std::pair(rule, usual->Median());
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
        known.addends == choice.addends && known.sizes == choice.sizes) {
      return known.tile;
    }
  }
  choice.tile = TileFor(problem, options.layout);
  if (measures_) {
    std::tie(choice.tile, choice.microseconds) = Measure(problem, options, choice.tile);
  }
  choices_.push_back(choice);
  return choice.tile;
}

}  // namespace dmuond::kernels::cuda
