// Executes attempts: arms them, collects, reports what is gathered, applies decisions, publishes.
// What the daemon says while a decided attempt is still being published waits for its turn.
//
// Threads: the lane's dispatching thread. No call blocks on another process.
#ifndef DMUOND_SERVER_LANE_ENGINE_H_
#define DMUOND_SERVER_LANE_ENGINE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "scheduler/step.h"
#include "server/lane/channel.h"
#include "server/lane/collector.h"
#include "server/lane/extract_check.h"
#include "server/lane/lane_job.h"
#include "server/lane/publisher.h"
#include "server/lane/rail.h"
#include "server/lane/slots.h"
#include "server/lane/snapshot_copy.h"
#include "server/lane/timing.h"
#include "server/lane/trainer_memory.h"
#include "server/lane/updater.h"

namespace dmuond::server::lane {

class Engine {
 public:
  // All arguments must outlive the object; `group` null: one node.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const LaneJob& job, Channel& channel,
                                                        kernels::Device& device, PeerGroup* group);

  // Each answers with reports through the channel. An error ends the lane.
  absl::Status OnAttach(const v1::LaneCommand::AttachTrainer& attach,
                        const std::vector<wire::UniqueFd>& fds);
  absl::Status OnDetach(const v1::LaneCommand::DetachTrainer& detach);
  void OnTrainerGone(const v1::LaneCommand::TrainerGone& gone) {
    trainers_.OnGone(gone.rank(), gone.incarnation());
  }
  absl::Status OnOpen(const scheduler::OpenAttempt& open);
  absl::Status OnSubmitted(const scheduler::Submission& submission);
  absl::Status OnGo(const scheduler::Go& go);
  absl::Status OnDecision(scheduler::Decision decision);
  absl::Status OnReadUnit(const v1::LaneCommand::ReadUnit& read,
                          const std::vector<wire::UniqueFd>& fds);
  absl::Status OnWriteUnit(const v1::LaneCommand::WriteUnit& write,
                           const std::vector<wire::UniqueFd>& fds);
  absl::Status OnCopyUpdate(const v1::LaneCommand::CopyUpdate& copy,
                            const std::vector<wire::UniqueFd>& fds);
  absl::Status OnRepublish(const v1::LaneCommand::Republish& republish);
  absl::Status OnSnapshot(const v1::LaneCommand::TakeSnapshot& snapshot);
  absl::Status OnLoadState(const v1::LaneCommand::LoadState& load);
  absl::Status OnCheck(const v1::CheckExtracts& check);
  // Steps that are published are reported with all that the lane did in them.
  void OnTrace(const v1::LaneCommand::Trace& trace);

  // Does what can be done now. True: it did something; read the command socket and call again.
  absl::StatusOr<bool> Progress();
  // Whether trainers' timelines have to be polled, since their next word comes without a message.
  [[nodiscard]] bool watches_words() const;
  // Whether the device works on something, whose end sends no message either.
  [[nodiscard]] bool device_busy() const;
  // Fills in what the lane is busy with and what it waits for.
  absl::Status Describe(v1::LaneReport::Pong& pong);

 private:
  Engine(const LaneJob& job, Channel& channel, kernels::Device& device, PeerGroup* group)
      : job_(job),
        channel_(channel),
        device_(device),
        rail_(job, channel, group),
        trainers_(job, device) {}

  absl::Status LeaveTrainersMemory();
  absl::StatusOr<bool> ProgressAttempt();
  absl::StatusOr<bool> ProgressSnapshot();
  absl::StatusOr<bool> ProgressCheck();
  // State is about to be written otherwise than by a step: what is to be digested is not.
  absl::Status SpoilChecks();
  absl::Status Send(v1::ExtractsChecked&& checked);
  // Weights are about to be written to these ranks; empty: to all that are attached.
  void NoteWriting(const std::vector<int32_t>& ranks);
  absl::Status StartSnapshot(scheduler::Attempt attempt);
  absl::StatusOr<bool> ArmNext();
  absl::StatusOr<bool> StartNext();
  absl::Status ReportGathered();
  absl::StatusOr<bool> ProgressPublish();
  // Whether the next batch's state may be written: what a snapshot wants of it has been copied.
  bool MayUpdateNext();
  absl::Status ReportPublished();
  absl::Status ReportCopied();
  void BeginTrace(scheduler::Attempt attempt);
  void TraceBatch(const scheduler::Batch& batch);
  void AddTrace(const scheduler::Decision& decision, v1::LaneReport::Published& published);

  const LaneJob& job_;
  Channel& channel_;
  kernels::Device& device_;
  Rail rail_;
  TrainerMemory trainers_;
  std::unique_ptr<Slots> slots_;
  std::unique_ptr<Collector> collector_;
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<Publisher> publisher_;
  std::unique_ptr<SnapshotCopy> snapshot_;
  std::unique_ptr<ExtractCheck> check_;
  // So that collecting, updating and copying overlap where the device can, as publishing does.
  // Destroyed before what their work uses, and not before that work is done.
  std::unique_ptr<kernels::Stream> collect_stream_;
  std::unique_ptr<kernels::Stream> update_stream_;
  std::unique_ptr<kernels::Stream> snapshot_stream_;

  std::optional<scheduler::OpenAttempt> opened_;    // not armed yet
  std::vector<scheduler::Submission> submissions_;  // of attempts that are not armed yet
  bool gathered_ = false;                           // reported for the armed attempt

  // What the daemon wants published, in order; the first one is under way when publishing_.
  struct Republish {
    scheduler::Attempt attempt;
    std::vector<int32_t> ranks;
  };
  struct Task {
    std::optional<scheduler::Decision> decision;
    std::optional<Republish> republish;
    bool redo = false;  // `decision` is of an older epoch: updated, not published
    std::optional<scheduler::Attempt> snapshot;  // that it is named by
    std::optional<v1::CheckExtracts> check;
  };
  std::deque<Task> tasks_;
  bool publishing_ = false;
  // An unfinished push has overwritten what other nodes' weights lay in.
  bool received_weights_valid_ = false;

  // Of the snapshot that is being copied.
  scheduler::Attempt snapshot_attempt_;
  int32_t snapshot_batches_ = 0;  // reported
  std::optional<Clock::time_point> held_since_;
  double held_us_ = 0;

  // By rank: the incarnation into whose arenas all weights of this lane were written, and into
  // which they are being written. 0: none.
  std::vector<uint64_t> written_to_;
  std::vector<uint64_t> writing_to_;
  std::optional<Clock::time_point> checked_since_;  // a step has waited for the check
  double check_part_us_ = 0;  // the longest that it has kept this thread from all else at once

  int64_t copy_request_ = 0;  // that the updater copies for

  v1::LaneCommand::Trace trace_next_;  // has not begun
  int32_t to_trace_ = 0;               // steps, with the one that is under way
  v1::LaneTrace trace_;                // of that one

  AttemptTimes times_;
  WorkTime summed_;  // of the attempt that is decided
  WorkTime normed_;
  v1::LaneReport report_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_ENGINE_H_
