// Collects the gradients of an attempt (or the weights of a push). It reads local trainers' arenas
// as they become ready, sends along the rail what other nodes' owners need, and leaves the reduced
// gradient of every owned unit, with its sums of squares, in staging memory. Arenas are only read,
// so an aborted attempt can be collected again from the same bytes.
//
// On a device whose processes take turns it launches no kernel until the quiet: every trainer at
// home there has stored `submitted`, so that it has nothing more to run for the attempt. Before, it
// only has copy engines bring what becomes ready on other devices to where it may land. They have a
// stream of their own: what comes last, as a rule the gradient of an embedding, is on its way while
// kernels add up what has landed.
//
// Links between GPUs take power of their products while they carry anything. So gradients of other
// GPUs come late in the backward pass, all at once (LateStart).
//
// Threads: the lane's dispatching thread. Nothing allocates in the steady state of a step.
#ifndef DMUOND_SERVER_LANE_COLLECTOR_H_
#define DMUOND_SERVER_LANE_COLLECTOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "scheduler/step.h"
#include "server/lane/collect_work.h"
#include "server/lane/lane_job.h"
#include "server/lane/late_start.h"
#include "server/lane/rail.h"
#include "server/lane/timing.h"
#include "server/lane/trainer_memory.h"

namespace dmuond::server::lane {

class Collector {
 public:
  // All arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<Collector>> Create(const LaneJob& job,
                                                           const TrainerMemory& trainers,
                                                           Rail& rail, kernels::Device& device,
                                                           kernels::Stream& stream);

  // Forgets everything and collects `attempt` from now on.
  void Arm(scheduler::Attempt attempt);
  void Disarm() { armed_ = false; }
  // Whether the device has done everything that was enqueued, for aborted attempts too.
  [[nodiscard]] absl::StatusOr<bool> Idle() const;
  absl::Status Synchronize();  // waits for that
  // Whether the device works on the armed attempt.
  [[nodiscard]] bool device_busy() const { return armed_ && in_flight_ > 0; }
  [[nodiscard]] bool armed() const { return armed_; }
  [[nodiscard]] scheduler::Attempt attempt() const { return attempt_; }

  // A local trainer's submission of the armed attempt.
  void OnSubmission(const scheduler::Submission& submission);
  // The trainer's arenas are about to be unmapped: this attempt reads nothing more from them.
  void OnDetach(int32_t rank);
  // The rail may exchange buckets in which this lane has a part.
  absl::Status OnGo(const scheduler::Go& go);

  // Does what can be done now. True: it did something; read the command socket and call again. A
  // bucket that was seen ready is read at the next call only: absences that belong to it were in
  // the socket before its ready word was written.
  absl::StatusOr<bool> Progress();

  // Whether the gradients of everything that this lane owns are reduced, under the loss scale that
  // its trainers have submitted.
  [[nodiscard]] bool complete() const;
  // Whether a timeline has to be polled, since its next word comes without a message.
  [[nodiscard]] bool watches_words() const;
  // Adds the local trainers that have submitted a step and whose gradients have not come.
  void AddAwaitedRanks(std::vector<int32_t>& ranks) const;
  // Whether something lies ready to cross, or crosses.
  [[nodiscard]] bool awaits_rail() const;
  [[nodiscard]] bool started() const { return started_; }        // a bucket was seen ready
  [[nodiscard]] bool all_ready() const { return unseen_ == 0; }  // every bucket was
  [[nodiscard]] scheduler::AttemptKind kind() const {
    return kind_.value_or(scheduler::AttemptKind::kStep);
  }
  void AddNorms(v1::UnitNorms& norms) const;
  // Of the armed attempt.
  [[nodiscard]] const WorkTime& sum_time() const { return sum_time_; }
  [[nodiscard]] const WorkTime& norm_time() const { return norm_time_; }

 private:
  struct BucketState {
    bool seen = false;      // contributors are ready
    bool fetching = false;  // copy engines bring what may land
    bool fetched = false;   // it has landed
    bool packing = false;   // the device works on what others need
    bool packed = false;    // it lies packed
    bool reported = false;  // to those who say when it crosses; once in an attempt
    bool gone = false;      // they have said so before it was packed anew
    bool started = false;   // on the rail
    bool received = false;  // nothing of it is on the rail
    bool summing = false;   // the device works on what is owned here
    bool norming = false;   // and then on sums of squares, where they did not come with the sums
    bool reduced = false;   // done
    Clock::time_point enqueued;
  };
  struct UnitSums {
    scheduler::UnitId unit;
    size_t first = 0;  // into sums_
    size_t count = 0;
  };

  Collector(const LaneJob& job, const TrainerMemory& trainers, Rail& rail, kernels::Device& device,
            kernels::Stream& stream);
  void ReserveScratch(const std::vector<CollectBucket>& work);

  [[nodiscard]] const std::vector<CollectBucket>& work() const {
    return kind() == scheduler::AttemptKind::kPush ? weights_ : gradients_;
  }
  // Gradients were collected in an attempt that turns out to be a push: forgets them.
  void StartOver();
  absl::Status StartRail(int32_t bucket, scheduler::AttemptKind kind_of_go);
  [[nodiscard]] bool ContributorsReady(int32_t bucket) const;
  [[nodiscard]] bool IsAbsent(const CollectBucket& bucket, const CollectSource& source) const;
  [[nodiscard]] bool StartsLate() const;
  absl::StatusOr<bool> ProgressBucket(int32_t bucket);
  [[nodiscard]] bool LooksQuiet() const;
  // Whether no bucket's gradients are to come yet.
  [[nodiscard]] bool IsTooEarly() const;
  [[nodiscard]] bool IsToLand(int32_t bucket) const;
  // Whether nothing that is still to be added up lies in the bucket's part of the landing.
  [[nodiscard]] bool HasRoomToLand(int32_t bucket) const;
  [[nodiscard]] bool HasLanded(const CollectBucket& bucket, const CollectSource& source) const;
  absl::Status Fetch(int32_t bucket);
  absl::Status Pack(const CollectBucket& bucket);
  absl::StatusOr<bool> ProgressReduce(int32_t bucket);
  [[nodiscard]] bool NeedsRail(int32_t bucket) const;
  // Enqueues the sums of all buckets of to_sum_ together, as a launch for each bucket of a large
  // model would leave the device half idle, and records their events.
  absl::Status SumOwned();
  absl::Status Norms(const CollectBucket& bucket);
  // Enqueues a part of a bucket's work on stream_ if it is not under way. Whether it is done.
  absl::StatusOr<bool> Through(int32_t bucket, bool& under_way,
                               absl::Status (Collector::*enqueue)(const CollectBucket&));
  // Records the bucket's event behind what was enqueued for it since `begun`.
  absl::Status Follow(int32_t bucket, bool& under_way, Clock::time_point begun);
  // Whether what was begun, and has this event, is through.
  absl::StatusOr<bool> Finished(kernels::Event& event);
  // Counts what the device works on.
  void Begin();
  void End();
  // Adds to sum_tasks_; Sum() enqueues these, and forgets them.
  void AddSums(const CollectBucket& bucket, const std::vector<CollectTask>& tasks, double divisor);
  absl::Status Sum();
  [[nodiscard]] kernels::StridedBox Resolve(const CollectBucket& bucket,
                                            const CollectSource& source) const;

  const LaneJob& job_;
  const TrainerMemory& trainers_;
  Rail& rail_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  std::vector<CollectBucket> gradients_;
  std::vector<CollectBucket> weights_;
  std::vector<UnitSums> unit_sums_;  // per staged unit
  std::unique_ptr<kernels::Mapping> sums_memory_;
  double* sums_ = nullptr;
  std::vector<std::unique_ptr<kernels::Event>> events_;  // per bucket, of stream_
  // Copies to the landing; empty and null where nothing lands. The stream is destroyed first, and
  // not before its work is done.
  std::vector<std::unique_ptr<kernels::Event>> landing_events_;  // per bucket
  std::unique_ptr<kernels::Stream> landing_stream_;
  std::optional<LateStart> start_;  // none: buckets are collected as soon as they are ready
  WorkTime sum_time_;
  WorkTime norm_time_;

  // Per bucket of gradients_ and source: it has landed, or is about to.
  std::vector<std::vector<uint8_t>> landed_;
  // Buckets that have landed, or are about to, and are not reduced. One whose trainer detached
  // stays: what reads it may be under way.
  std::vector<int32_t> landing_in_use_;

  bool armed_ = false;
  bool started_ = false;
  bool quiet_ = false;
  scheduler::Attempt attempt_;
  std::optional<scheduler::AttemptKind> kind_;
  bool submitted_ = false;            // by one local trainer at least
  std::vector<bool> rank_submitted_;  // per rank
  std::optional<double> loss_scale_;  // submitted, or assumed to be as in the last step
  std::vector<scheduler::AbsentFragment> absent_;  // sorted
  std::vector<BucketState> states_;
  int32_t unseen_ = 0;  // buckets that are not ready
  int32_t unfinished_ = 0;
  int32_t in_flight_ = 0;  // buckets that the device works on

  // Each call fills these anew and leaves them empty; they are members so that a step allocates
  // nothing.
  std::vector<int32_t> to_sum_;  // buckets
  std::vector<kernels::StridedBox> boxes_;
  std::vector<uint8_t> levels_;
  std::vector<kernels::SumTask> sum_tasks_;
  std::vector<kernels::NormTask> norm_tasks_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_COLLECTOR_H_
