// Digests what a lane holds of some extracts, for a comparison of all copies: of the units that it
// owns the state and the weights that the master rounds to, and the weights that lie in the arenas
// of the node's trainers.
//
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_EXTRACT_CHECK_H_
#define DMUOND_SERVER_LANE_EXTRACT_CHECK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "kernels/device.h"
#include "server/lane/lane_job.h"
#include "server/lane/slots.h"
#include "server/lane/trainer_memory.h"

namespace dmuond::server::lane {

class ExtractCheck {
 public:
  // All arguments must outlive the object.
  ExtractCheck(const LaneJob& job, const Slots& slots, const TrainerMemory& trainers,
               kernels::Device& device, kernels::Stream& stream)
      : job_(job), slots_(slots), trainers_(trainers), device_(device), stream_(stream) {}

  // REQUIRES: !active().
  void Start(v1::CheckExtracts order);
  [[nodiscard]] bool active() const { return order_.has_value(); }
  // Digests one state tensor of an extract, a part of its master rounded to weights, or one
  // trainer's weights: 4 MiB at most, for which it waits for the device. `has_weights` says of a
  // rank whether all weights of this lane were written into its arenas since it attached. Returns
  // the answer when all are digested. REQUIRES: active().
  std::optional<v1::ExtractsChecked> Progress(absl::FunctionRef<bool(int32_t)> has_weights);
  // State is about to be written. Returns the answer, which says so. REQUIRES: active().
  v1::ExtractsChecked Spoil();

 private:
  struct Extract {
    const scheduler::LaneUnit* of = nullptr;
    scheduler::Box box;
    std::vector<scheduler::Box> held;
    size_t next_holder = 0;      // into `of->holders`
    v1::ExtractDigests digests;  // of the parts before
  };
  // Each returns false where nothing is left to digest.
  absl::StatusOr<bool> DigestNext(absl::FunctionRef<bool(int32_t)> has_weights);
  absl::StatusOr<bool> Begin(const v1::Extract& wire);
  absl::StatusOr<bool> DigestState();
  absl::StatusOr<bool> DigestCopy(absl::FunctionRef<bool(int32_t)> has_weights);
  // Digests the elements of `box`, which lie at `from`. Floats are rounded to `as` first.
  absl::StatusOr<uint64_t> DigestOf(const kernels::StridedBox& from, const scheduler::Box& box,
                                    kernels::DType as);

  const LaneJob& job_;
  const Slots& slots_;
  const TrainerMemory& trainers_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  std::unique_ptr<kernels::Mapping> scratch_;  // made for the first check
  std::optional<v1::CheckExtracts> order_;
  int next_ = 0;                    // into its extracts
  std::optional<Extract> extract_;  // that one, when it has begun
  v1::ExtractsChecked answer_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_EXTRACT_CHECK_H_
