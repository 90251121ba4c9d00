// Planned departures: the group halts the job, what it has come to is saved, and only then the node
// goes. For the others it is a daemon that is gone, whose successor finds everything on the disk.
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {
namespace {

// Time for the threads of disks and memory to see that nobody wants what they do any more.
constexpr std::chrono::seconds kThreadsEndWithin{2};

}  // namespace

absl::StatusOr<v1::DrainReply> Daemon::PrepareToLeave(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  StateLock lock(mutex_);
  draining_ = true;
  leaving_ = timeout / 2;  // for the attempt in flight: the rest is to save
  mutex_.Changed();
  absl::Status saved;
  v1::DrainReply reply;
  // Before it has state there is nothing to lose, and after it was lost nothing to save.
  if (job_ != nullptr && job_->has_state && JobFailure().ok()) {
    const std::string name = job_->name;
    saved = HaltAndSave(deadline);
    if (saved.ok() && options_.storage == nullptr) {
      log::Warn("the job's state goes with this daemon: there is no --snapshot_dir",
                {{"job", name}, {"last_step", absl::StrCat(LastCommitted())}});
    }
    if (!saved.ok()) {
      const int64_t durable = job_ == nullptr ? 0 : job_->snapshots.part.durable_step().value_or(0);
      log::Error("the last steps are not in a snapshot",
                 {{"job", name},
                  {"after_step", absl::StrCat(durable)},
                  {"last_step", absl::StrCat(LastCommitted())},
                  {"what", saved}});
      saved = Error(saved.code(), ReasonOf(saved),
                    Say("steps ", Named("first_lost", durable + 1), " to ",
                        Named("last_lost", LastCommitted()), " of job '", Named("job", name),
                        "' are in no snapshot: ", scheduler::MessageOf(saved)));
    }
  }
  // Trainers of this node have their weights, and their answer.
  ++waiting_for_published_;
  (void)Wait(
      [this]() DMUOND_REQUIRES(mutex_) { return epoch_ == 0 || Published() || !JobFailure().ok(); },
      deadline, [] { return false; });
  --waiting_for_published_;
  reply.set_last_committed_step(LastCommitted());
  if (job_ != nullptr) {
    if (const auto step = job_->snapshots.part.durable_step()) reply.set_durable_step(*step);
  }
  prepared_ = saved.ok() ? absl::StatusOr<v1::DrainReply>(std::move(reply)) : saved;
  mutex_.Changed();
  return *prepared_;
}

absl::Status Daemon::HaltAndSave(Deadline deadline) {
  const std::string name = job_->name;
  const auto over = [&]() DMUOND_REQUIRES(mutex_) {
    return job_ == nullptr || job_->name != name || !JobFailure().ok();
  };
  if (epoch_ != 0) TellLeaving();
  for (;;) {
    // The group may be broken: by others who leave too. What is saved needs no group.
    const absl::StatusOr<bool> halted = Wait(
        [&]() DMUOND_REQUIRES(mutex_) { return over() || halted_ || (epoch_ == 0 && Saved()); },
        deadline, [] { return false; });
    if (!halted.ok()) return halted.status();
    if (over()) return JobFailure();
    if (!*halted) {
      return Error(absl::StatusCode::kDeadlineExceeded, "NOT_DRAINED",
                   epoch_ == 0 ? "the group is broken, and has not formed in time"
                               : "the job could not be halted in time");
    }
    if (!halted_ || options_.storage == nullptr) return absl::OkStatus();
    absl::Status saved =
        SaveNow(
            deadline, [] { return false; },
            [this]() DMUOND_REQUIRES(mutex_) {
              return halted_ ? absl::OkStatus() : absl::UnavailableError("the group broke");
            })
            .status();
    if (saved.ok() || halted_) return saved;
    if (over()) return JobFailure();
  }
}

void Daemon::TellLeaving() {
  v1::MemberMessage message;
  message.mutable_leaving()->set_node(options_.node);
  message.mutable_leaving()->set_patience_ms(leaving_->count());
  Tell(std::move(message));
}

void Daemon::HandleHalted(const v1::Halted& halted) {
  log::Info("a daemon is leaving",
            {{"node", absl::StrCat(halted.node())}, {"step", absl::StrCat(halted.step())}});
  if (halted.node() != options_.node) return;
  halted_ = true;
  mutex_.Changed();
}

absl::StatusOr<v1::DrainReply> Daemon::WaitUntilPrepared(const Cancelled& cancelled) {
  StateLock lock(mutex_);
  const absl::StatusOr<bool> prepared =
      Wait([this]() DMUOND_REQUIRES(mutex_) { return prepared_.has_value(); }, Deadline::max(),
           cancelled);
  if (!prepared.ok()) return prepared.status();
  return *prepared_;
}

bool Daemon::Leave() {
  std::array<std::unique_ptr<Disk>, 2> disks;
  std::unique_ptr<WorkThread> worker;
  {
    StateLock lock(mutex_);
    draining_ = true;  // also where nothing was prepared
    if (job_ != nullptr) {
      if (job_->failed.ok()) {
        job_->failed =
            Error(absl::StatusCode::kUnavailable, "DRAINING",
                  Say("the daemon of node ", Named("node", options_.node), " is leaving"));
      }
      job_->snapshots.GiveUp("the daemon is leaving");
      EndJob("the daemon is leaving");
    }
    disks = {std::move(writes_), std::move(reads_)};
    worker = std::move(worker_);
    mutex_.Changed();
  }
  Tick();
  // Their last work takes the lock. A thread that hangs in the directory cannot be ended, and one
  // that is joined would hold up the process for as long: it stays, with all that it uses, and the
  // process ends with it. (exit_group() kills a thread that waits for a file server, as SIGKILL
  // does.)
  const auto deadline = std::chrono::steady_clock::now() + kThreadsEndWithin;
  bool ended = worker == nullptr || worker->Stop(deadline);
  // It makes memory that nobody wants any more, gigabytes of it perhaps.
  if (!ended) (void)worker.release();
  for (std::unique_ptr<Disk>& disk : disks) {
    if (disk == nullptr || disk->Stop(deadline)) continue;
    log::Error("leaving while the snapshot directory hangs: what is being written there is lost",
               {{"what", disk->Current().value_or("between two operations")}});
    (void)disk.release();
    ended = false;
  }
  return ended;
}

}  // namespace dmuond::server
