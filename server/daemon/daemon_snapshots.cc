// Snapshots: lanes copy, this node's thread for disks writes, the coordinator's node makes them
// exist. Nothing here waits for a disk under the daemon's lock.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/daemon.h"
#include "server/daemon/errors.h"
#include "server/daemon/log.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

constexpr char kWeightsNotFinite[] = "WEIGHTS_NOT_FINITE";

}  // namespace

void Daemon::PlaceHostCopies() {
  auto host = std::make_shared<std::vector<HostState>>();
  for (int32_t i = 0; i < options_.lanes; ++i) {
    HostState& state = host->emplace_back();
    const scheduler::LaneProgram& program = job_->lanes[i].program;
    state.lane = program.lane;
    state.layout = storage::PlaceHostCopy(*job_->plan, program);
    state.units = storage::StateUnitsOf(job_->inputs->layout, *job_->plan, state.layout.units);
    state.memory = job_->memory->host_copy(scheduler::LaneIndex(i));
  }
  job_->snapshots.host = std::move(host);
}

void Daemon::HandleSave(const v1::SaveState& save) {
  if (job_ == nullptr || job_->snapshots.host == nullptr || writes_ == nullptr) return;
  job_->ending = job_->ending || save.last();
  if (save.attempt() == job_->snapshots.attempt) {
    // Said again after a new epoch. While it is being written the answer comes by itself.
    if (!job_->snapshots.written.has_value()) return;
    v1::MemberMessage message;
    *message.mutable_snapshot_written() = *job_->snapshots.written;
    return Tell(std::move(message));
  }
  NodeSnapshot snapshot;
  snapshot.id = {scheduler::Attempt(save.attempt()), scheduler::StepId(save.step())};
  snapshot.job = job_->name;
  snapshot.node = scheduler::NodeRank(options_.node);
  snapshot.lanes = job_->snapshots.host;
  for (const auto& [rank, state] : job_->trainer_states) {
    if (!state.bytes.empty()) snapshot.trainers[scheduler::TrainerRank(rank)] = state.bytes;
  }
  auto progress = std::make_shared<CopyProgress>(job_->lanes.size());
  job_->snapshots.copying = progress;
  job_->snapshots.attempt = save.attempt();
  job_->snapshots.non_finite.clear();
  job_->snapshots.written.reset();
  if (writes_->hangs()) return GiveUpSnapshot();
  // While lanes are replaced there is nobody to ask, and nobody who would ever answer.
  const bool able = std::all_of(job_->lanes.begin(), job_->lanes.end(), [](const LaneState& lane) {
    return lane.process != nullptr && lane.ready && !lane.gone;
  });
  if (!able) {
    job_->snapshots.Abandon("the node's lanes are being replaced");
  } else if (save.attempt() != job_->applied_attempt) {
    // It was said when the link was down, and the state has gone on.
    job_->snapshots.Abandon("the node heard of it too late");
  } else {
    v1::LaneCommand command;
    command.mutable_snapshot()->set_attempt(save.attempt());
    ToLanes(command);
  }
  writes_->Post([this, disk = writes_.get(), snapshot = std::move(snapshot), progress,
                 attempt = save.attempt()] {
    absl::StatusOr<std::vector<v1::SnapshotFile>> files =
        WriteNodeFiles(disk->storage(), snapshot, *progress);
    StateLock lock(mutex_);
    // It hung, and was answered for. What there is of it has no manifest.
    if (!progress->given_up().ok()) return;
    if (!files.ok()) return TellWritten(attempt, {}, std::string(files.status().message()));
    if (job_ != nullptr && job_->snapshots.attempt == attempt &&
        !job_->snapshots.non_finite.empty()) {
      return TellWritten(attempt, {}, job_->snapshots.non_finite, kWeightsNotFinite);
    }
    TellWritten(attempt, *files);
  });
}

void Daemon::TellWritten(uint64_t attempt, const std::vector<v1::SnapshotFile>& files,
                         const std::string& error, const std::string& reason) {
  v1::MemberMessage message;
  v1::SnapshotWritten& written = *message.mutable_snapshot_written();
  written.set_attempt(attempt);
  written.set_node(options_.node);
  written.mutable_files()->Add(files.begin(), files.end());
  written.set_error(error);
  written.set_reason(reason);
  if (job_ != nullptr && job_->snapshots.attempt == attempt) job_->snapshots.written = written;
  Tell(std::move(message));
}

void Daemon::HandleCopied(int32_t lane, const v1::LaneReport::Copied& copied) {
  if (job_->snapshots.copying == nullptr || copied.attempt() != job_->snapshots.attempt) return;
  for (const int32_t unit : copied.non_finite()) {
    if (unit < 0 || unit >= static_cast<int32_t>(job_->plan->units.size())) continue;
    job_->snapshots.non_finite =
        absl::StrCat("the weights of parameter '",
                     job_->inputs->layout.parameters[job_->plan->units[unit].parameter].name,
                     "' are infinite or NaN; the job ends with its next step");
  }
  job_->snapshots.copying->Report(static_cast<size_t>(lane), copied.batches(),
                                  {copied.updates().begin(), copied.updates().end()});
  if (copied.complete()) {
    log::Debug("state copied", {{"job", job_->name},
                                {"epoch", epoch_},
                                {"lane", absl::StrCat(lane)},
                                {"held_us", absl::StrCat(copied.held_us())}});
  }
}

void Daemon::HandleWriteManifest(const v1::WriteManifest& write) {
  if (writes_ == nullptr) return;
  v1::SnapshotManifest manifest = write.manifest();
  manifest.mutable_time()->set_seconds(std::time(nullptr));
  manifest.set_version(kBuildVersion);
  committing_ = manifest.attempt();
  if (writes_->hangs()) return GiveUpSnapshot();
  writes_->Post([this, disk = writes_.get(), manifest = std::move(manifest)] {
    {
      // What came before it took its time, and it was given up.
      StateLock lock(mutex_);
      if (committing_ != manifest.attempt() && !manifest.files().empty()) return;
    }
    absl::Status status;
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
  JobSnapshots& snapshots = job_->snapshots;
  if (done.has_durable_step()) snapshots.durable_step = done.durable_step();
  snapshots.done = done;
  if (done.error().empty()) snapshots.saved_attempt = done.attempt();
  if (done.attempt() == snapshots.attempt) {
    snapshots.copying.reset();
    // The same state may be asked for again, and then it is written again.
    if (!done.error().empty()) snapshots.attempt = 0;
  }
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
    job_->snapshots.done.clear_attempt();
    v1::MemberMessage message;
    message.mutable_snapshot_request()->set_node(options_.node);
    Tell(std::move(message));
    come = wait([&]() DMUOND_REQUIRES(mutex_) {
      return job_->snapshots.done.attempt() >= wanted || epoch_ != epoch || job_->reforming;
    });
    if (!come.ok()) return come;
    const v1::SnapshotDone& end = job_->snapshots.done;
    const bool done = end.attempt() >= wanted;
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
  return job_ != nullptr && job_->applied_attempt != 0 &&
         job_->snapshots.saved_attempt == job_->applied_attempt;
}

}  // namespace dmuond::server
