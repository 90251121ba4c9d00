#include "server/lane/rail.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"

namespace dmuond::server::lane {

absl::Status Rail::ReportReady(scheduler::Attempt attempt, scheduler::RailOperation operation,
                               int32_t bucket, scheduler::AttemptKind kind) {
  if (ready_.attempt != attempt || ready_.operation != operation || ready_.kind != kind) {
    RETURN_IF_ERROR(SendReports());
    ready_.attempt = attempt;
    ready_.rail = job_.program.rail;
    ready_.operation = operation;
    ready_.kind = kind;
  }
  scheduler::Append(ready_.buckets, {scheduler::BucketId(bucket), 1});
  return absl::OkStatus();
}

absl::Status Rail::SendReports() {
  if (ready_.buckets.empty()) return absl::OkStatus();
  ToProto(ready_, *report_.mutable_rail_ready());
  ready_.buckets.clear();
  return channel_.Send(report_);
}

void Rail::Add(const scheduler::Transfer& transfer) {
  const bool send = transfer.from == job_.program.lane;
  const int32_t peer_lane = send ? transfer.to.value() : transfer.from.value();
  messages_.push_back({send, peer_lane / job_.program.lanes_per_node,
                       job_.staging->data() + transfer.offset_bytes,
                       static_cast<size_t>(transfer.bytes)});
}

absl::Status Rail::StartMessages(scheduler::RailOperation operation, int32_t bucket) {
  if (group_ == nullptr) {
    return absl::InternalError(absl::StrCat("bucket ", bucket, " crosses nodes without a rail"));
  }
  const uint64_t tag = (static_cast<uint64_t>(operation) << 32) |
                       static_cast<uint64_t>(static_cast<uint32_t>(bucket));
  ASSIGN_OR_RETURN(int64_t ticket, group_->Start(tag, messages_));
  for (const PeerGroup::Message& message : messages_) {
    if (message.send) sent_bytes_ += static_cast<int64_t>(message.bytes);
  }
  started_.push_back({operation, bucket, ticket, {}});
  if (trace_ != nullptr) started_.back().began = Clock::now();
  return absl::OkStatus();
}

absl::Status Rail::Advance() {
  if (started_.empty() || !group_->needs_polls()) return absl::OkStatus();
  return group_->Done(started_.front().ticket).status();
}

absl::StatusOr<bool> Rail::Done(scheduler::RailOperation operation, int32_t bucket) {
  for (size_t i = 0; i < started_.size(); ++i) {
    if (started_[i].operation != operation || started_[i].bucket != bucket) continue;
    absl::StatusOr<bool> done = group_->Done(started_[i].ticket);
    if (!done.ok() || !*done) return done;
    if (trace_ != nullptr && started_[i].began != Clock::time_point()) {
      v1::LaneTrace::Transfer& transfer = *trace_->add_transfers();
      transfer.set_begin_us(MonotonicMicroseconds(started_[i].began));
      transfer.set_end_us(MonotonicMicroseconds(Clock::now()));
      transfer.set_bucket(bucket);
      transfer.set_publishes(operation == scheduler::RailOperation::kPublish);
    }
    started_.erase(started_.begin() + static_cast<int64_t>(i));
    return done;
  }
  return absl::InternalError(absl::StrCat("bucket ", bucket, " was not started on the rail"));
}

absl::StatusOr<bool> Rail::Idle() {
  while (!started_.empty()) {
    absl::StatusOr<bool> done = Done(started_.back().operation, started_.back().bucket);
    if (!done.ok() || !*done) return done;
  }
  return true;
}

}  // namespace dmuond::server::lane
