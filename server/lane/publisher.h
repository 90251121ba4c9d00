// Brings new weights to their holders: copies what local trainers hold, batch by batch as the
// update goes on, packs what other nodes need, and raises the trainers' `published` words bucket by
// bucket, together with the other lanes of the node.
//
// Copies within a device are kernels, for which the update leaves no room now and then. They have a
// stream of their own, so that copies to other devices, which copy engines do, never wait for them.
//
// On devices whose processes take turns no word is raised until every lane of the node has brought
// all of its weights: the first one that a trainer sees starts its next forward pass, which would
// then take turns with what is left of the update.
//
// Threads: the lane's dispatching thread. Nothing allocates in the steady state of a step.
#ifndef DMUOND_SERVER_LANE_PUBLISHER_H_
#define DMUOND_SERVER_LANE_PUBLISHER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "scheduler/lane_program.h"
#include "server/lane/lane_job.h"
#include "server/lane/rail.h"
#include "server/lane/timing.h"
#include "server/lane/trainer_memory.h"
#include "server/shared/publish_board.h"

namespace dmuond::server::lane {

class Publisher {
 public:
  // All arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<Publisher>> Create(const LaneJob& job,
                                                           const TrainerMemory& trainers,
                                                           Rail& rail, kernels::Device& device);
  absl::Status Synchronize();  // waits until the device has done what was enqueued

  struct Job {
    scheduler::Attempt attempt;
    bool submitted_first = false;  // write no weight before its trainer's `submitted` word
    bool poison = false;           // overwrite weights with NaN before the update, where asked
    bool rail = true;              // false: other nodes' weights lie in staging from before
    bool republish = false;        // counted apart on the board
    const std::vector<int32_t>* ranks = nullptr;  // to these trainers alone; null or empty: to all
  };
  void Start(const Job& job);
  // Without copies: weights are as they were (a skip). Complete when it returns.
  void AnnounceAll(scheduler::Attempt attempt);

  // The units of a batch have their new weights in staging memory. Batches come in their order.
  void OnBatch(const scheduler::Batch& batch);
  absl::Status OnGo(const scheduler::Go& go);
  // Does what can be done. True: something was.
  absl::StatusOr<bool> Progress();

  [[nodiscard]] bool running() const { return unfinished_ > 0; }
  [[nodiscard]] bool watches_words() const { return running() && !gate_open_; }
  // Local trainers whose `submitted` word is to come before their weights may be written.
  void AddAwaitedRanks(std::vector<int32_t>& ranks) const;
  // Whether something lies ready to cross, or crosses.
  [[nodiscard]] bool awaits_rail() const;
  [[nodiscard]] bool device_busy() const { return in_flight_ > 0; }
  // Of the copies into local trainers' arenas since Start().
  [[nodiscard]] const WorkTime& copy_time() const { return copy_time_; }

 private:
  struct CopyOut {  // to a local trainer
    int32_t rank = 0;
    uint32_t arena = 0;
    int64_t offset_bytes = 0;
    kernels::StridedBox dst;  // without address
    kernels::StridedBox src;  // in staging memory
    int64_t bytes = 0;        // read and written
  };
  struct Pack {  // for another node
    kernels::StridedBox dst;
    kernels::StridedBox src;
  };
  struct Copies {                    // that are enqueued together
    std::vector<CopyOut> here;       // to trainers at home on the lane's device
    std::vector<CopyOut> elsewhere;  // to the node's other trainers
    Clock::time_point enqueued;      // those under way
    std::unique_ptr<kernels::Event> here_event;
    std::unique_ptr<kernels::Event> elsewhere_event;
  };
  struct BatchCopies {  // of units owned here
    Copies copies;
    std::vector<int32_t> buckets;  // of its units, each once
  };
  struct Bucket {
    Copies others;  // from what came along the rail
    std::vector<Pack> packs;
    int32_t owned_units = 0;
    int32_t batches = 0;  // with units of it
    bool part = false;    // local trainers get something from this lane
    // State of the attempt.
    int32_t waiting = 0;   // owned units without new weights
    int32_t uncopied = 0;  // batches whose copies are not through
    bool packing = false;
    bool packed = false;
    bool started = false;
    bool received = false;
    bool copying_others = false;
    bool finished = false;
    std::unique_ptr<kernels::Event> pack_event;  // what the device works on
  };
  Publisher(const LaneJob& job, const TrainerMemory& trainers, Rail& rail, kernels::Device& device);

  // `own`: where copies go of what is owned here; null: it is not.
  void AddUnit(const scheduler::LaneUnit& of, Copies* own);
  void AddPacks(Bucket& bucket, scheduler::UnitId id);
  absl::Status StartRail(int32_t b);
  absl::Status PoisonWeights();
  absl::StatusOr<bool> OpenGate();
  absl::StatusOr<bool> ProgressBucket(int32_t b);
  absl::StatusOr<bool> ProgressPack(int32_t b);
  absl::StatusOr<bool> ProgressBatches();
  // Enqueues the copies, if that has not been done; true: they are through.
  absl::StatusOr<bool> ProgressOthers(Bucket& bucket);
  absl::Status Enqueue(Copies& copies);
  absl::Status Copy(kernels::Stream& stream, const std::vector<CopyOut>& copies);
  [[nodiscard]] static absl::StatusOr<bool> AreThrough(const Copies& copies);
  [[nodiscard]] bool Wanted(int32_t rank) const;
  // This lane's part of the bucket is there.
  void Announce(int32_t b);
  void AnnounceEach();
  [[nodiscard]] bool AllHaveAnnounced(int32_t b) const;
  [[nodiscard]] std::atomic<uint64_t>& Mark(int32_t b, int32_t lane) const;
  [[nodiscard]] uint64_t mark_value() const {
    return current_.republish ? republished_ : current_.attempt.value();
  }

  const LaneJob& job_;
  const TrainerMemory& trainers_;
  Rail& rail_;
  kernels::Device& device_;
  PublishBoard board_;
  std::vector<BatchCopies> batches_;
  std::vector<Bucket> buckets_;

  Job current_;
  uint64_t republished_ = 0;  // how many republishes this node has had, this one included
  bool gate_open_ = false;
  int32_t unfinished_ = 0;
  // How many batches have new weights, have their copies enqueued, and have them through.
  size_t updated_ = 0;
  size_t sent_ = 0;
  size_t arrived_ = 0;
  Clock::time_point arrived_at_;  // of the last one
  int32_t in_flight_ = 0;
  WorkTime copy_time_;

  // Destroyed first, and not before their work is done.
  std::unique_ptr<kernels::Stream> kernels_;  // packs, and copies within the device
  std::unique_ptr<kernels::Stream> engines_;  // copies to other devices
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_PUBLISHER_H_
