// Measures what Muon updates cost on this device and which way of computing them is fastest: what
// the planner's cost table is made of.
//
// Engine and form are the device's and the program's, functions of the shape alone. Where bits may
// depend on what was measured (--numerics=fastest), the candidates for each shape are the engines
// that are there, in the configured form and, where that is Gram, in the standard one. A candidate
// may win only if its result agrees with the same polynomial in fp32, and, unless bits may depend
// on it, if they are the same in every batch.
// Candidates of all shapes take turns under sustained load; those much slower alone are left out.
// The winners of all shapes are then timed, whole updates, for each batch, in turns and without a
// pause: a chip at its power limit is faster for some tenths of a second after any.
#ifndef DMUOND_KERNELS_CUDA_UPDATE_TUNER_H_
#define DMUOND_KERNELS_CUDA_UPDATE_TUNER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/tile_tuner.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

struct TuningTask {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<int32_t> batches;  // ascending; those that do not fit the memory are left out
};

struct TuningOptions {
  MuonConfig config;
  DType weight = DType::kBF16;
  double seconds = 20;   // for all tasks, about: preparing takes 0.4 to 1 s a shape, more than that
                         // is not cut short
  bool fastest = false;  // --numerics=fastest: bits may depend on the batch, and on times
  size_t memory_bytes_max = 0;  // 0: two thirds of what is free
};

struct TunedCandidate {
  KernelChoice choice;
  double error = 0;         // relative Frobenius difference from fp32
  double microseconds = 0;  // a batch of `batch`; 0: refused
  int32_t batch = 0;
  std::string refused;  // why it may not win
};

struct TunedShape {
  int64_t rows = 0;
  int64_t cols = 0;
  size_t winner = 0;  // in candidates
  std::vector<TunedCandidate> candidates;
  std::vector<std::pair<int32_t, double>> times;  // (batch, microseconds) of the winner
};

// Why a way of computing may not win; empty if it may. `error` against fp32, values that are not
// finite, and elements whose bits are others in a larger batch.
[[nodiscard]] std::string RefusalOf(double error, uint64_t not_finite, uint64_t different,
                                    bool fastest);

// One shape for each task. The device is the current one. UNAVAILABLE where no candidate is right;
// or neither engine is there; RESOURCE_EXHAUSTED where not even one matrix fits.
absl::StatusOr<std::vector<TunedShape>> TuneUpdates(std::span<const TuningTask> tasks,
                                                    const TuningOptions& options);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_UPDATE_TUNER_H_
