// Snapshots: lanes copy, this node's thread for disks writes, the coordinator's node makes them
// exist. Nothing here waits for a disk under the daemon's lock.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/registrations.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"
#include "server/storage/layout_check.h"
#include "server/version.h"

namespace dmuond::server {
void Daemon::HandleSave(const v1::SaveState& save) {
  if (job_ == nullptr || job_->snapshots.host == nullptr || writes_ == nullptr) return;
  job_->ending = job_->ending || save.last();
  const scheduler::SnapshotPart::Order order = job_->snapshots.part.OnSave(
      save, {.lanes_ready = job_->lanes.all_ready(),
             .applied_attempt = job_->applied_attempt,
             .disk_hangs = writes_->hangs() ? writes_->hang().Words() : ""});
  if (const auto* answer = std::get_if<v1::SnapshotWritten>(&order)) return TellWritten(*answer);
  if (const auto* write = std::get_if<scheduler::SnapshotPart::Write>(&order)) {
    WriteSnapshot(save, write->abandoned);
  }
}

void Daemon::WriteSnapshot(const v1::SaveState& save, const std::string& abandoned) {
  NodeSnapshot snapshot;
  snapshot.id = {scheduler::Attempt(save.attempt()), scheduler::StepId(save.step())};
  snapshot.job = job_->name;
  snapshot.node = scheduler::NodeRank(options_.node);
  snapshot.lanes = job_->snapshots.host;
  for (const auto& [rank, state] : job_->trainer_states) {
    if (!state.bytes.empty()) snapshot.trainers[scheduler::TrainerRank(rank)] = state.bytes;
  }
  job_->snapshots.GiveUp("another snapshot is wanted");
  auto progress = std::make_shared<CopyProgress>(job_->lanes.size());
  job_->snapshots.copying = progress;
  if (abandoned.empty()) {
    v1::LaneCommand command;
    command.mutable_snapshot()->set_attempt(save.attempt());
    ToLanes(command);
  } else {
    job_->snapshots.Abandon(abandoned);
  }
  writes_->Post([this, disk = writes_.get(), snapshot = std::move(snapshot), progress,
                 attempt = save.attempt(), number = job_->number] {
    absl::StatusOr<std::vector<v1::SnapshotFile>> files =
        WriteNodeFiles(disk->storage(), snapshot, *progress);
    StateLock lock(mutex_);
    if (job_ == nullptr || job_->number != number) return;
    const std::optional<v1::SnapshotWritten> answer = job_->snapshots.part.OnWritten(
        attempt, files.ok() ? *files : std::vector<v1::SnapshotFile>(),
        std::string(files.status().message()));
    if (answer.has_value()) TellWritten(*answer);
  });
}

void Daemon::TellWritten(const v1::SnapshotWritten& written) {
  v1::MemberMessage message;
  *message.mutable_snapshot_written() = written;
  Tell(std::move(message));
}

void Daemon::HandleCopied(scheduler::LaneIndex lane, const v1::LaneReport::Copied& copied) {
  if (job_->snapshots.copying == nullptr || copied.attempt() != job_->snapshots.part.attempt()) {
    return;
  }
  for (const int32_t unit : copied.non_finite()) {
    if (unit < 0 || unit >= static_cast<int32_t>(job_->plan->units.size())) continue;
    job_->snapshots.part.OnNonFinite(
        copied.attempt(),
        absl::StrCat("the weights of parameter '",
                     job_->inputs->layout.parameters[job_->plan->units[unit].parameter].name,
                     "' are infinite or NaN; the job ends with its next step"));
  }
  job_->snapshots.copying->Report(static_cast<size_t>(lane.value()), copied.batches(),
                                  {copied.updates().begin(), copied.updates().end()});
  if (copied.complete()) {
    log::Debug("state copied", {{"job", job_->name},
                                {"epoch", epoch_},
                                {"lane", lane.value()},
                                {"held_us", absl::StrCat(copied.held_us())}});
  }
}

void Daemon::HandleWriteManifest(const v1::WriteManifest& write) {
  if (writes_ == nullptr) return;
  v1::SnapshotManifest manifest = write.manifest();
  manifest.mutable_time()->set_seconds(std::time(nullptr));
  manifest.set_version(kBuildVersion);
  // The coordinator leaves to its own node what is long, and what only storage knows the form of.
  absl::Status described;
  if (!manifest.files().empty()) {
    described = job_ == nullptr || job_->plan == nullptr ||
                        job_->wire.job_incarnation() != manifest.job_incarnation()
                    ? absl::InternalError("the job of this snapshot is not here")
                    : storage::SetLayout(job_->inputs->layout.parameters,
                                         AnyOf(job_->wire).groups(), manifest);
  }
  if (!described.ok()) manifest.clear_files();
  committing_ = manifest.attempt();
  if (writes_->hangs()) return GiveUpSnapshot();
  writes_->Post([this, described, disk = writes_.get(), manifest = std::move(manifest)] {
    {
      // What came before it took its time, and it was given up.
      StateLock lock(mutex_);
      if (committing_ != manifest.attempt() && !manifest.files().empty()) return;
    }
    absl::Status status = described;
    std::vector<absl::Status> warnings;
    if (manifest.files().empty()) {
      // A full disk has no room for what is of no use.
      RemoveUnfinished(disk->storage(), manifest, warnings);
    } else {
      status = CommitSnapshot(disk->storage(), manifest, options_.snapshot_keep, warnings);
      if (!status.ok()) RemoveUnfinished(disk->storage(), manifest, warnings);
    }
    for (const absl::Status& warning : warnings) {
      log::Warn("old snapshots were not removed", {{"job", manifest.job()}, {"what", warning}});
    }
    StateLock lock(mutex_);
    // It was given up. It may exist now, and is whole if it does.
    if (committing_ != manifest.attempt()) return;
    committing_ = 0;
    TellManifestWritten(manifest.attempt(), status.ok() ? "" : std::string(status.message()));
  });
}

void Daemon::TellManifestWritten(uint64_t attempt, const std::string& error,
                                 const std::string& reason) {
  v1::MemberMessage message;
  v1::ManifestWritten& written = *message.mutable_manifest_written();
  written.set_attempt(attempt);
  written.set_error(error);
  written.set_reason(reason);
  Tell(std::move(message));
}

void Daemon::HandleSnapshotDone(const v1::SnapshotDone& done) {
  if (job_ == nullptr) return;
  if (job_->snapshots.part.OnDone(done)) job_->snapshots.copying.reset();
  if (done.error().empty()) {
    log::Info("snapshot written", {{"job", job_->name}, {"epoch", epoch_}, {"step", done.step()}});
  } else if (done.reason() != "JOB_HAS_NO_STATE") {
    log::Warn(
        "a snapshot failed; training goes on",
        {{"job", job_->name},
         {"epoch", epoch_},
         {"step", absl::StrCat(done.step())},
         {"durable_step", done.has_durable_step() ? absl::StrCat(done.durable_step()) : "none"},
         {"what", done.error()}});
  }
  mutex_.Changed();
}

absl::StatusOr<v1::SnapshotDone> Daemon::SaveNow(Deadline deadline, const Cancelled& cancelled,
                                                 const std::function<absl::Status()>& allowed) {
  if (options_.storage == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                 "this daemon has no --snapshot_dir: no snapshots are made");
  }
  if (job_ == nullptr || job_->plan == nullptr || !JobHasState()) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                 "no job has state here: there is nothing to save");
  }
  const std::string name = job_->name;
  const uint64_t incarnation = job_->wire.job_incarnation();
  const auto check = [&]() DMUOND_REQUIRES(mutex_) {
    const absl::Status still = CheckStill(name, incarnation);
    return still.ok() ? allowed() : still;
  };
  const auto wait = [&](const std::function<bool()>& ready) DMUOND_REQUIRES(mutex_) {
    absl::StatusOr<bool> come = Wait(
        [&]() DMUOND_REQUIRES(mutex_) { return !check().ok() || ready(); }, deadline, cancelled);
    if (!come.ok()) return come.status();
    absl::Status valid = check();
    if (!valid.ok() || *come) return valid;
    if (!Settled()) {
      return Error(absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_FAILED",
                   "the group has not formed, or its lanes are being replaced");
    }
    const std::optional<std::string> at = writes_ == nullptr ? std::nullopt : writes_->Current();
    return Error(absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_FAILED",
                 Say("the snapshot is still being written; this node ",
                     at.has_value() ? absl::StrCat("is at: ", *at) : "waits for others"));
  };
  for (;;) {
    absl::Status come = wait([this]() DMUOND_REQUIRES(mutex_) { return Settled(); });
    if (!come.ok()) return come;
    const uint64_t wanted = job_->applied_attempt;
    const uint32_t epoch = epoch_;
    const uint64_t before = job_->snapshots.part.times_done();
    v1::MemberMessage message;
    message.mutable_snapshot_request()->set_node(options_.node);
    Tell(std::move(message));
    come = wait([&]() DMUOND_REQUIRES(mutex_) {
      return Answered(before, wanted) || epoch_ != epoch || job_->reforming;
    });
    if (!come.ok()) return come;
    const v1::SnapshotDone& end = job_->snapshots.part.done();
    const bool done = Answered(before, wanted);
    if (done && end.error().empty()) return end;
    // Lanes that were to copy are gone, or nobody heard: those that come next are asked.
    if (!done || epoch_ != epoch || job_->reforming) continue;
    return Error(absl::StatusCode::kUnavailable, end.reason(),
                 Say("step ", Named("step", end.step()), " was not saved: ", end.error()));
  }
}

absl::Status Daemon::CheckStill(const std::string& name, uint64_t incarnation) const {
  if (job_ == nullptr || job_->name != name || job_->wire.job_incarnation() != incarnation) {
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED", "the job ended meanwhile");
  }
  return JobFailure();
}

bool Daemon::Settled() const {
  return job_ != nullptr && job_->has_state && job_->steps.has_value() && !job_->reforming &&
         epoch_ != 0 && scheduler::EpochOf(job_->steps->open().attempt).value() == epoch_;
}

absl::StatusOr<v1::SaveSnapshotReply> Daemon::SaveSnapshot(const v1::SaveSnapshotRequest& request,
                                                           const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  absl::StatusOr<v1::SnapshotDone> done =
      SaveNow(Deadline::max(), cancelled, [&]() DMUOND_REQUIRES(mutex_) {
        found = Find(request.key());
        return found.ok() ? CheckNotRolledBack(**found) : found.status();
      });
  if (!done.ok()) return done.status();
  v1::SaveSnapshotReply reply;
  reply.set_step(done->step());
  reply.set_path(PathOf(*done));
  return reply;
}

absl::StatusOr<v1::SaveJobReply> Daemon::SaveJob(const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<v1::SnapshotDone> done =
      SaveNow(Deadline::max(), cancelled, [] { return absl::OkStatus(); });
  if (!done.ok()) return done.status();
  v1::SaveJobReply reply;
  reply.set_step(done->step());
  reply.set_path(PathOf(*done));
  return reply;
}

std::string Daemon::PathOf(const v1::SnapshotDone& done) const {
  return options_.storage->Describe(
      absl::StrCat(job_->name, "/",
                   storage::DirectoryName(
                       {scheduler::Attempt(done.attempt()), scheduler::StepId(done.step())})));
}

bool Daemon::Saved() const {
  return job_ != nullptr && job_->snapshots.part.Saved(job_->applied_attempt);
}

bool Daemon::Answered(uint64_t before, uint64_t wanted) const {
  const scheduler::SnapshotPart& part = job_->snapshots.part;
  return part.times_done() > before && part.done().attempt() >= wanted;
}

}  // namespace dmuond::server
