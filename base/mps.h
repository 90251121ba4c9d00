// Calls that a recovering MPS refuses for a while.
// Example:
//   const CUresult result = OnceMpsHasRecovered(kMpsPatience, [&] { return init(0); });
#ifndef DMUOND_BASE_MPS_H_
#define DMUOND_BASE_MPS_H_

#include <cuda.h>

#include <chrono>
#include <thread>

#include "absl/functional/function_ref.h"

namespace dmuond {

// In which all who were there may end. A context is refused only where a fault comes between the
// two calls; another process is then as soon at work.
inline constexpr std::chrono::seconds kMpsPatience(20);
inline constexpr std::chrono::seconds kMpsPatienceForContext(2);

// Repeats a call for as long as MPS refuses it, `patience` at most, and returns its last result.
// After the fault of one client an MPS server turns others away until all that were there have
// ended, and says to nobody when that is. Whoever replaces a lane or a trainer that has ended by
// such a fault comes then.
[[nodiscard]] inline CUresult OnceMpsHasRecovered(std::chrono::milliseconds patience,
                                                  absl::FunctionRef<CUresult()> call) {
  constexpr std::chrono::milliseconds kPause(20);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    const CUresult result = call();
    const bool recovers =
        result == CUDA_ERROR_MPS_SERVER_NOT_READY || result == CUDA_ERROR_MPS_CONNECTION_FAILED;
    if (!recovers || std::chrono::steady_clock::now() > deadline) return result;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace dmuond

#endif  // DMUOND_BASE_MPS_H_
