// Copies the state of a lane's units, while training goes on, into the host copy from which the
// daemon writes a snapshot. It copies in the order of updates, a chunk at a time, from the slots
// that are current when it starts. Such a slot is written again only after the unit's next update,
// so an update of a batch waits for that batch's copy and for nothing else.
//
// Where the device has memory of its own, chunks go through a ring of pinned memory, because the
// device writes that faster than the host copy; else they are copied directly.
//
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_SNAPSHOT_COPY_H_
#define DMUOND_SERVER_LANE_SNAPSHOT_COPY_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "scheduler/types.h"
#include "server/lane/lane_job.h"
#include "server/lane/slots.h"

namespace dmuond::server::lane {

class SnapshotCopy {
 public:
  // All arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<SnapshotCopy>> Create(const LaneJob& job,
                                                              const Slots& slots,
                                                              kernels::Device& device,
                                                              kernels::Stream& stream);

  // Starts a copy of the state as it is now. Fills `updates` with how many each unit has had, in
  // the order of the host copy. FAILED_PRECONDITION: a unit has no state, or another copy is under
  // way.
  absl::Status Start(std::vector<uint64_t>& updates);
  [[nodiscard]] bool active() const { return active_; }
  // Starts a chunk, or moves one on. True: it did something.
  absl::StatusOr<bool> Progress();
  // Whether the batch's slots may be written again.
  [[nodiscard]] bool Left(size_t batch) const {
    return !active_ || left_ >= job_.host_copy.batch_offset_bytes[batch + 1];
  }
  // Works until this holds for all batches.
  absl::Status Leave();
  // How many batches lie in the host copy.
  [[nodiscard]] int32_t batches() const { return batches_; }
  [[nodiscard]] bool device_busy() const { return !flying_.empty(); }

 private:
  // Consecutive bytes of the host copy.
  struct Chunk {
    int64_t begin = 0;
    int64_t end = 0;
    size_t place = 0;  // of its event, and in the ring
  };
  SnapshotCopy(const LaneJob& job, const Slots& slots, kernels::Device& device,
               kernels::Stream& stream)
      : job_(job), slots_(slots), device_(device), stream_(stream) {}
  absl::Status StartChunk();
  absl::Status CopyPart(int64_t begin, int64_t end, std::byte* to);
  void Deliver(const Chunk& chunk);

  const LaneJob& job_;
  const Slots& slots_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  std::unique_ptr<kernels::Mapping> ring_;               // null: straight
  std::vector<std::unique_ptr<kernels::Event>> events_;  // one for each place

  bool active_ = false;
  std::vector<int32_t> slot_;  // per unit of the host copy: where its state lies
  size_t next_unit_ = 0;       // that the next chunk begins in
  int64_t started_ = 0;        // bytes of the host copy that chunks were started for
  int64_t left_ = 0;           // … that have left the device
  std::deque<Chunk> flying_;   // out of the device
  std::deque<Chunk> ringed_;   // in the ring, to be delivered
  size_t next_place_ = 0;
  int32_t batches_ = 0;
};

// The reverse, in one call: the host copy's contents become the state of all units. `updates`, in
// its order, says how many each has had up to `step`.
absl::Status LoadHostCopy(const LaneJob& job, Slots& slots, kernels::Device& device,
                          kernels::Stream& stream, scheduler::StepId step,
                          const std::vector<uint64_t>& updates);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_SNAPSHOT_COPY_H_
