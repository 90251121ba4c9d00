// Applies a committed attempt to the owned units, batch by batch: reads current slots, writes free
// ones, flips the state table, and leaves the new weights in staging memory. A lane that starts in
// the middle of a committed step redoes what the state table does not show as done.
//
// Threads: the lane's dispatching thread. Nothing allocates in the steady state of a step.
#ifndef DMUOND_SERVER_LANE_UPDATER_H_
#define DMUOND_SERVER_LANE_UPDATER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "scheduler/step.h"
#include "server/lane/lane_job.h"
#include "server/lane/slots.h"

namespace dmuond::server::lane {

class Updater {
 public:
  // All arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<Updater>> Create(const LaneJob& job, Slots& slots,
                                                         kernels::Device& device,
                                                         kernels::Stream& stream);

  // A committed step, push or load. `decision` must stay until done().
  void Start(const scheduler::Decision& decision);
  // Writes the weights of the current masters into staging memory, and updates nothing.
  void StartRefresh();
  [[nodiscard]] bool done() const { return next_batch_ == job_.program.batches.size(); }
  // REQUIRES: !done().
  [[nodiscard]] size_t next_batch() const { return next_batch_; }
  // Starts the next batch. REQUIRES: !done(), none is under way.
  absl::Status BeginBatch();
  // Starts the next batch, if none is under way. Returns the batch when it is complete, null until
  // then. REQUIRES: !done().
  absl::StatusOr<const scheduler::Batch*> RunBatch();
  // Copies a matrix's master before and after the next step that updates it into `memory` of the
  // host, one after the other.
  void CopyNext(scheduler::UnitId unit, std::unique_ptr<kernels::Mapping> memory) {
    to_copy_ = {unit, std::move(memory)};
  }
  struct Copied {
    scheduler::StepId step;
    double keep = 0;  // as v1::LaneReport::UpdateCopied has them
    double rate = 0;
    double scale = 0;
    double held_us = 0;
  };
  // Returns what was copied for CopyNext(), once; nothing: no step has come yet.
  std::optional<Copied> TakeCopied() { return std::exchange(copied_, std::nullopt); }
  [[nodiscard]] bool device_busy() const { return running_; }
  [[nodiscard]] int32_t matrices() const { return matrices_; }  // orthogonalised since Start()
  // Returns what was done to the matrices of the batches that are complete, since Start().
  [[nodiscard]] const std::vector<scheduler::UnitUpdate>& updates() const { return updates_; }

 private:
  Updater(const LaneJob& job, Slots& slots, kernels::Device& device, kernels::Stream& stream)
      : job_(job), slots_(slots), device_(device), stream_(stream) {}

  struct Told {                 // by the device, of a unit's update
    double update_squares = 0;  // of a matrix
    uint32_t non_finite = 0;
  };
  struct Place {  // of a unit of the running batch
    scheduler::UnitId unit;
    int32_t slot = 0;
    uint64_t updates = 0;  // after the flip
    scheduler::StepId step;
    const Told* told = nullptr;  // null: the device was not asked
  };

  absl::Status Step(const scheduler::Batch& batch);
  absl::Status Push(const scheduler::Batch& batch);
  absl::Status Refresh(scheduler::UnitId id, int32_t slot);
  absl::Status CopyMasters(const Place& place);
  [[nodiscard]] bool Active(scheduler::UnitId id) const;
  [[nodiscard]] kernels::UpdateScalars ScalarsOf(scheduler::UnitId id, uint64_t updates) const;
  // With the matrices that are in matrices_args_.
  [[nodiscard]] kernels::MuonBatch ToMuon(const scheduler::Batch& batch) const;
  [[nodiscard]] void* Workspace() const;  // null: no batch needs any
  [[nodiscard]] float* Gradient(scheduler::UnitId id) const;
  [[nodiscard]] void* Weight(scheduler::UnitId id) const;

  const LaneJob& job_;
  Slots& slots_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  absl::Status StartBatch(const scheduler::Batch& batch);

  std::unique_ptr<kernels::Mapping> workspace_;
  std::unique_ptr<kernels::Mapping> scalars_memory_;  // the device reads it
  std::unique_ptr<kernels::Mapping> told_memory_;     // the device writes it
  std::unique_ptr<kernels::Event> event_;

  const scheduler::Decision* decision_ = nullptr;  // null: refresh only
  size_t next_batch_ = 0;
  bool running_ = false;  // the device works on next_batch_
  int32_t matrices_ = 0;
  std::vector<scheduler::UnitUpdate> updates_;
  struct ToCopy {
    scheduler::UnitId unit;
    std::unique_ptr<kernels::Mapping> memory;  // null: nothing
  };
  ToCopy to_copy_;
  std::optional<Copied> copied_;

  // Of the batch that runs.
  std::vector<Place> places_;
  kernels::UpdateScalars* scalars_ = nullptr;  // in scalars_memory_, one for each unit of a batch
  Told* told_ = nullptr;                       // in told_memory_, likewise
  size_t scalars_used_ = 0;
  std::vector<kernels::MuonMatrix> matrices_args_;
  std::vector<kernels::AdamWPiece> pieces_args_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_UPDATER_H_
