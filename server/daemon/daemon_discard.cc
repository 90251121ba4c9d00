// Jobs that somebody ends, and jobs that begin anew over one that has state (RESUME_DISCARD). The
// coordinator decides; this is a node's part.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {

std::string LaunchOf(const v1::OpenSessionRequest& request) {
  if (request.resume() != v1::OpenSessionRequest::RESUME_DISCARD) return "";
  // A trainer that is alone begins anew each time; its nonce is its own.
  return request.launch().empty() ? absl::BytesToHexString(request.nonce()) : request.launch();
}

bool Daemon::MustDiscard(const v1::OpenSessionRequest& request) const {
  return request.resume() == v1::OpenSessionRequest::RESUME_DISCARD && job_ != nullptr &&
         job_->name == request.job() && job_->launch != LaunchOf(request);
}

absl::Status Daemon::DiscardOlder(const v1::OpenSessionRequest& request,
                                  const Cancelled& cancelled) {
  // A start may be faster than the news of the end of the one before.
  constexpr std::chrono::seconds kNewsTravel{1};
  constexpr std::chrono::milliseconds kPause{50};
  const Deadline begun = std::chrono::steady_clock::now();
  const int32_t rank = request.rank();
  const auto over = [&]() DMUOND_REQUIRES(mutex_) { return !MustDiscard(request) || draining_; };
  while (!over()) {
    absl::Status refused;
    if (!sessions_.empty()) {
      const Session& live = sessions_.begin()->second;
      refused =
          scheduler::JobInUse(job_->name, rank, live.rank, absl::StrCat("(pid ", live.pid, ")"));
    } else {
      discard_refusals_.erase(rank);
      const uint32_t epoch = epoch_;
      v1::RankSession discard;
      discard.set_rank(rank);
      discard.set_node(options_.node);
      discard.set_job(job_->name);
      discard.set_discard(true);
      discard.set_launch(LaunchOf(request));
      TellEndJob(absl::StrCat("rank ", rank, " begins it anew"), &discard);
      absl::StatusOr<bool> answered = Wait(
          [&]() DMUOND_REQUIRES(mutex_) {
            return over() || discard_refusals_.contains(rank) || epoch_ != epoch ||
                   !sessions_.empty();
          },
          begun + options_.coordinator.register_timeout, cancelled);
      if (!answered.ok()) return answered.status();
      if (!*answered) return NotReadyToOpen(rank);
      const auto told = discard_refusals_.find(rank);
      if (over() || told == discard_refusals_.end()) continue;
      refused = told->second;
    }
    const Deadline now = std::chrono::steady_clock::now();
    if (now >= begun + kNewsTravel) return refused;
    absl::StatusOr<bool> waited = Wait(over, now + kPause, cancelled);
    if (!waited.ok()) return waited.status();
  }
  return absl::OkStatus();
}

void Daemon::TellEndJob(const std::string& why, const v1::RankSession* discard) {
  v1::MemberMessage message;
  v1::EndJob& end = *message.mutable_end_job();
  end.set_job(job_->name);
  end.set_why(why);
  end.set_node(options_.node);
  if (discard != nullptr) *end.mutable_discard() = *discard;
  Tell(std::move(message));
}

absl::StatusOr<v1::EndJobReply> Daemon::EndJobNamed(const v1::EndJobRequest& request,
                                                    const Cancelled& cancelled) {
  StateLock lock(mutex_);
  if (job_ == nullptr || job_->name != request.name()) {
    return Error(absl::StatusCode::kNotFound, "NO_JOB",
                 Say("no job '", Named("job", request.name()), "' is here: ",
                     Named("holder", job_ == nullptr ? "there is none at all"
                                                     : absl::StrCat("it is '", job_->name, "'"))));
  }
  const uint64_t generation = job_->number;
  const auto gone = [&]() DMUOND_REQUIRES(mutex_) {
    return job_ == nullptr || job_->number != generation;
  };
  if (request.save()) {
    absl::StatusOr<v1::SnapshotDone> saved =
        SaveNow(Deadline::max(), cancelled, [] { return absl::OkStatus(); });
    if (!saved.ok()) return saved.status();
  }
  v1::EndJobReply reply;
  const Deadline deadline =
      std::chrono::steady_clock::now() + options_.coordinator.register_timeout;
  while (!gone()) {
    reply.set_last_committed_step(LastCommitted());
    if (const auto step = job_->snapshots.part.durable_step()) reply.set_durable_step(*step);
    const uint32_t epoch = epoch_;
    constexpr char kWhy[] = "`dmuonctl job end` has ended it";
    if (job_->abandoned) {  // the coordinator knows it no longer
      EndJob(kWhy, scheduler::JobWasEnded(job_->name, LastCommitted(), kWhy));
      break;
    }
    TellEndJob(kWhy);
    absl::StatusOr<bool> ended = Wait(
        [&]() DMUOND_REQUIRES(mutex_) { return gone() || epoch_ != epoch; }, deadline, cancelled);
    if (!ended.ok()) return ended.status();
    if (!*ended) {
      return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                   Say("job '", Named("job", request.name()),
                       "' has not ended in time: the group is broken; `dmuonctl status` on every "
                       "node says who is missing"));
    }
  }
  return reply;
}

void Daemon::HandleDiscard(const v1::DiscardSnapshots& discard) {
  discarding_ = discard;
  if (writes_ == nullptr) return TellDiscarded(absl::OkStatus());
  if (writes_->hangs()) return TellDiscarded(DirectoryHangs(*writes_));
  // By the thread that writes: what the job before is still writing is committed before, or never.
  writes_->Post([this, disk = writes_.get(), discard] {
    const auto wanted = [&]() DMUOND_REQUIRES(mutex_) {
      return discarding_.has_value() && discarding_->job_incarnation() == discard.job_incarnation();
    };
    {
      // Where it hung and was given up, nobody waits for it.
      StateLock lock(mutex_);
      if (!wanted()) return;
    }
    absl::StatusOr<storage::SnapshotStore> store =
        storage::SnapshotStore::Create(disk->storage(), discard.job());
    const absl::Status done = store.ok() ? store->DiscardAll() : store.status();
    StateLock lock(mutex_);
    if (wanted()) TellDiscarded(WithReason(done, "SNAPSHOT_FAILED"));
  });
}

void Daemon::TellDiscarded(const absl::Status& done) {
  const v1::DiscardSnapshots discard = *std::exchange(discarding_, std::nullopt);
  if (done.ok()) {
    log::Info("the job begins anew; its older snapshots count no more, and stay",
              {{"job", discard.job()}, {"epoch", epoch_}});
  }
  v1::MemberMessage message;
  v1::SnapshotsDiscarded& discarded = *message.mutable_discarded();
  discarded.set_job(discard.job());
  discarded.set_job_incarnation(discard.job_incarnation());
  discarded.set_error(std::string(done.message()));
  discarded.set_reason(ReasonOf(done));
  Tell(std::move(message));
}

}  // namespace dmuond::server
