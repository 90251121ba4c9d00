// A lane's side of its rail. For the buckets of an attempt it reports that this lane's parts are
// ready, starts the exchanges on GO, and tells when they have ended. Threads: the lane's
// dispatching thread.
#ifndef DMUOND_SERVER_LANE_RAIL_H_
#define DMUOND_SERVER_LANE_RAIL_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/step.h"
#include "scheduler/transfers.h"
#include "server/lane/channel.h"
#include "server/lane/lane_job.h"
#include "server/lane/peer_group.h"
#include "server/lane/timing.h"

namespace dmuond::server::lane {

class Rail {
 public:
  // `group` null: a single node, where no bucket has transfers. All must outlive the object.
  Rail(const LaneJob& job, Channel& channel, PeerGroup* group)
      : job_(job), channel_(channel), group_(group) {}

  // Reported by the next SendReports(), in one message with others of the same operation.
  absl::Status ReportReady(scheduler::Attempt attempt, scheduler::RailOperation operation,
                           int32_t bucket, scheduler::AttemptKind kind);
  absl::Status SendReports();
  // Starts those of `transfers` for which `crosses(transfer)` holds, in their order.
  template <typename Crosses>
  absl::Status Start(scheduler::RailOperation operation, int32_t bucket,
                     const std::vector<scheduler::Transfer>& transfers, Crosses crosses) {
    messages_.clear();
    for (const scheduler::Transfer& transfer : transfers) {
      if (transfer.bytes > 0 && crosses(transfer)) Add(transfer);
    }
    return StartMessages(operation, bucket);
  }
  // What the group has yet to start begins, where it is its turn. Call it often.
  absl::Status Advance();
  // Whether the bucket's operation, which was started before, has ended.
  [[nodiscard]] absl::StatusOr<bool> Done(scheduler::RailOperation operation, int32_t bucket);
  // Whether an operation was started whose end Done() has not said yet.
  [[nodiscard]] bool active() const { return !started_.empty(); }
  // From now on what crosses is added to `trace`, which must outlive the object or the next call;
  // null: not any more.
  void Trace(v1::LaneTrace* trace) { trace_ = trace; }
  // How many bytes this lane has begun to send since this was asked last.
  [[nodiscard]] int64_t TakeSentBytes() { return std::exchange(sent_bytes_, 0); }
  // Whether nothing is under way. After an abort, messages of that attempt still arrive.
  [[nodiscard]] absl::StatusOr<bool> Idle();

 private:
  struct Started {
    scheduler::RailOperation operation;
    int32_t bucket;
    int64_t ticket;
    Clock::time_point began;  // while it is traced
  };

  void Add(const scheduler::Transfer& transfer);
  absl::Status StartMessages(scheduler::RailOperation operation, int32_t bucket);

  const LaneJob& job_;
  Channel& channel_;
  PeerGroup* group_;
  std::vector<PeerGroup::Message> messages_;  // of the call that runs
  std::vector<Started> started_;
  v1::LaneTrace* trace_ = nullptr;
  int64_t sent_bytes_ = 0;
  scheduler::RailReady ready_;  // not reported yet
  v1::LaneReport report_;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_RAIL_H_
