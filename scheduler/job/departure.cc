#include "scheduler/job/departure.h"

#include <algorithm>
#include <utility>

#include "scheduler/reason.h"

namespace dmuond::scheduler {

node::Actions Departure::Begin(NodeJob& job, TimePoint deadline, std::chrono::milliseconds patience,
                               bool saves) {
  if (begun()) {
    deadline_ = std::min(deadline_, deadline);
    return {};
  }
  deadline_ = deadline;
  patience_ = patience;
  saves_ = saves;
  job.SetLeaves();
  // Before it has state there is nothing to lose, and after it was lost nothing to save.
  if (!job.exists() || !job.has_state() || !job.failure().ok()) {
    state_ = State::kPublishing;
    return {};
  }
  number_ = job.number();
  state_ = State::kHalting;
  return OnFormed(job);
}

node::Actions Departure::OnFormed(NodeJob& job) const {
  if (!begun() || job.epoch() == 0) return {};
  return job.AskToHalt(patience_);
}

void Departure::End(absl::Status saved) {
  saved_ = std::move(saved);
  request_.reset();
  state_ = State::kPublishing;
}

// The group may be broken: by others who leave too. What is saved needs no group, nor does what is
// saved nowhere. While this node's part of a parked job has no lanes, nothing can be committed.
bool Departure::NeedsNoHalt(const NodeJob& job) const {
  if (job.epoch() == 0) return job.Saved() || !saves_;
  return job.exists() && job.parked() && job.Saved();
}

bool Departure::NothingIsPublished(const NodeJob& job) {
  return job.epoch() == 0 || !job.failure().ok() || (job.exists() && job.parked());
}

bool Departure::HasNews(const NodeJob& job) const {
  switch (state_) {
    case State::kHalting:
      return !job.CheckStill(number_).ok() || job.halted() || NeedsNoHalt(job);
    case State::kSaving:
      return !job.CheckStill(number_).ok() || !job.halted() || request_->HasNews(job);
    case State::kPublishing:
      return NothingIsPublished(job) || job.Published();
    case State::kServing:
    case State::kPrepared:
      return true;
  }
  return true;
}

node::Actions Departure::Advance(TimePoint now, NodeJob& job) {
  node::Actions actions;
  if (state_ == State::kHalting || state_ == State::kSaving) {
    if (absl::Status still = job.CheckStill(number_); !still.ok()) {
      // One that has ended has nothing that could be lost.
      End(job.failure());
    }
  }
  if (state_ == State::kSaving && !job.halted()) {  // the group broke
    request_.reset();
    state_ = State::kHalting;
  }
  if (state_ == State::kHalting) {
    if (NeedsNoHalt(job)) {
      End(absl::OkStatus());
    } else if (job.halted() && !saves_) {
      End(absl::OkStatus());
    } else if (job.halted()) {
      request_.emplace(job);
      state_ = State::kSaving;
    } else if (now >= deadline_) {
      End(Error(absl::StatusCode::kDeadlineExceeded, "NOT_DRAINED",
                Say(job.epoch() == 0 ? "the group is broken, and has not formed in time"
                                     : "the job could not be halted in time")));
    }
  }
  if (state_ == State::kSaving) {
    const auto done = request_->Advance(job, actions);
    if (done.has_value()) {
      End(done->status());
    } else if (now >= deadline_) {
      End(Error(absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_FAILED",
                Say(job.settled() ? "the snapshot is still being written"
                                  : "the group has not formed, or its lanes are being replaced")));
    }
  }
  // Trainers of this node have their weights, and their answer.
  if (state_ == State::kPublishing &&
      (NothingIsPublished(job) || job.Published() || now >= deadline_)) {
    state_ = State::kPrepared;
  }
  return actions;
}

}  // namespace dmuond::scheduler
