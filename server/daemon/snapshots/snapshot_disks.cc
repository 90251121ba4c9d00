#include "server/daemon/snapshots/snapshot_disks.h"

#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/storage/layout_check.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

constexpr char kHangs[] = "SNAPSHOT_DIR_HANGS";

absl::Status SetAsideAfter(storage::Storage& storage, const std::string& job,
                           const storage::SnapshotId& id) {
  absl::StatusOr<storage::SnapshotStore> store = storage::SnapshotStore::Create(storage, job);
  return store.ok() ? store->SetAsideAfter(id) : store.status();
}

}  // namespace

absl::StatusOr<storage::SnapshotId> FindWayBack(storage::Storage& storage, const std::string& job,
                                                int64_t step, const scheduler::PlanInputs& inputs,
                                                const GroupConfigs& groups,
                                                const std::function<bool()>& unwanted) {
  absl::StatusOr<std::optional<Restorable>> to = std::nullopt;
  if (step == 0) {
    to = FindRestorable(storage, job);
  } else {
    absl::StatusOr<Restorable> exactly = FindRestorable(storage, job, scheduler::StepId(step));
    if (exactly.ok()) {
      to = *std::move(exactly);
    } else {
      to = exactly.status();
    }
  }
  if (to.ok() && !to->has_value()) {
    return Error(absl::StatusCode::kNotFound, "JOB_HAS_NO_STATE",
                 Say("job '", Named("job", job), "' has no snapshot"));
  }
  absl::Status same = to.status();
  if (same.ok()) same = CheckRestorable((*to)->manifest, inputs, groups);
  if (same.ok()) same = VerifyWhole(storage, **to, unwanted);
  if (same.ok()) return (*to)->id;
  return ReasonOf(same).empty() ? WithReason(same, "SNAPSHOT_BROKEN") : same;
}

SnapshotDisks::SnapshotDisks(Options options, storage::Storage* storage, Events events)
    : options_(std::move(options)), events_(std::move(events)) {
  if (storage == nullptr) return;
  writes_ = std::make_unique<Disk>(*storage, options_.timeout);
  reads_ = std::make_unique<Disk>(*storage, options_.timeout);
  if (options_.sweeps) sweeps_ = std::make_unique<Disk>(*storage, options_.timeout);
}

// ---- writing ----

void SnapshotDisks::Write(const scheduler::node::WriteSnapshot& order, const std::string& job,
                          std::shared_ptr<const std::vector<HostState>> lanes) {
  GiveUpCopies("another snapshot is wanted");
  auto progress = std::make_shared<CopyProgress>(lanes->size());
  copying_ = progress;
  if (!order.abandoned.empty()) AbandonCopies(order.abandoned);
  if (writes_ == nullptr) return;
  NodeSnapshot snapshot;
  snapshot.id = {scheduler::Attempt(order.save.attempt()), scheduler::StepId(order.save.step())};
  snapshot.job = job;
  snapshot.node = scheduler::NodeRank(options_.node);
  snapshot.lanes = std::move(lanes);
  snapshot.trainers = order.trainers;
  writes_->Post([this, disk = writes_.get(), snapshot = std::move(snapshot), progress,
                 attempt = order.save.attempt(), number = ++writing_] {
    absl::StatusOr<std::vector<v1::SnapshotFile>> files =
        WriteNodeFiles(disk->storage(), snapshot, *progress);
    events_.enter([&] {
      // Of a job that is no more, or while another one is wanted, nobody waits for it.
      if (writing_ == number) events_.on_written(attempt, files);
    });
  });
}

void SnapshotDisks::OnCopied(const scheduler::node::Copied& order) {
  if (copying_ == nullptr) return;
  copying_->Report(static_cast<size_t>(order.lane.value()), order.report.batches(),
                   {order.report.updates().begin(), order.report.updates().end()});
}

void SnapshotDisks::AbandonCopies(const std::string& why) {
  if (copying_ != nullptr) copying_->Abandon(absl::UnavailableError(why));
}

void SnapshotDisks::GiveUpCopies(const std::string& why) {
  if (copying_ != nullptr) copying_->GiveUp(absl::UnavailableError(why));
}

void SnapshotDisks::WriteManifest(const v1::WriteManifest& order, const Job& job) {
  if (writes_ == nullptr) return;
  v1::SnapshotManifest manifest = order.manifest();
  manifest.mutable_time()->set_seconds(std::time(nullptr));
  manifest.set_version(kBuildVersion);
  manifest.set_group(options_.group);
  // The coordinator leaves to its own node what is long, and what only storage knows the form of.
  absl::Status described;
  if (!manifest.files().empty()) {
    described =
        job.planned.plan == nullptr || job.incarnation != manifest.job_incarnation()
            ? absl::InternalError("the job of this snapshot is not here")
            : storage::SetLayout(job.planned.inputs->layout.parameters, job.groups, manifest);
  }
  if (!described.ok()) manifest.clear_files();
  committing_ = manifest.attempt();
  committing_of_ = manifest.job();
  if (writes_->hangs()) return GiveUpWriting();
  writes_->Post([this, described, disk = writes_.get(), manifest = std::move(manifest)] {
    bool wanted = true;
    // What came before it took its time, and it was given up.
    events_.enter([&] { wanted = committing_ == manifest.attempt() || manifest.files().empty(); });
    if (!wanted) return;
    absl::Status status = described;
    std::vector<absl::Status> warnings;
    if (manifest.files().empty()) {
      // A full disk has no room for what is of no use.
      RemoveUnfinished(disk->storage(), manifest, warnings);
    } else {
      status = CommitSnapshot(disk->storage(), manifest, options_.keep, warnings);
      if (!status.ok()) RemoveUnfinished(disk->storage(), manifest, warnings);
    }
    for (const absl::Status& warning : warnings) {
      log::Warn("old snapshots were not removed", {{"job", manifest.job()}, {"what", warning}});
    }
    events_.enter([&] {
      // It was given up. It may exist now, and is whole if it does.
      if (committing_ != manifest.attempt()) return;
      committing_ = 0;
      TellManifestWritten(manifest.attempt(), status.ok() ? "" : std::string(status.message()));
    });
  });
}

void SnapshotDisks::TellManifestWritten(uint64_t attempt, const std::string& error,
                                        const std::string& reason) {
  v1::MemberMessage message;
  message.set_job(committing_of_);
  v1::ManifestWritten& written = *message.mutable_manifest_written();
  written.set_attempt(attempt);
  written.set_error(error);
  written.set_reason(reason);
  events_.tell(std::move(message));
}

void SnapshotDisks::SetAside(const scheduler::node::SetSnapshotsAside& order,
                             const std::string& job) {
  if (reads_ == nullptr) return;
  committing_ = 0;
  // By the thread that brings the state back, before it does: nobody goes on while newer snapshots
  // count. And by the one that writes, before anything of the new epoch: what it is at may be a
  // manifest.
  for (Disk* disk : {reads_.get(), writes_.get()}) {
    disk->Post([this, disk, job, to = order.after, kept = kept_] {
      bool wanted = false;
      events_.enter([&] { wanted = kept_ == kept; });
      if (!wanted) return;
      const absl::Status aside = SetAsideAfter(disk->storage(), job, to);
      if (!aside.ok()) log::Warn("newer snapshots still count", {{"job", job}, {"what", aside}});
    });
  }
}

void SnapshotDisks::Discard(const v1::DiscardSnapshots& order) {
  discarding_ = order;
  if (writes_ == nullptr) return TellDiscarded(absl::OkStatus());
  if (writes_->hangs()) return TellDiscarded(Hangs(*writes_));
  // By the thread that writes: what the job before is still writing is committed before, or never.
  writes_->Post([this, disk = writes_.get(), order] {
    const auto is_wanted = [&] {
      return discarding_.has_value() && discarding_->job_incarnation() == order.job_incarnation();
    };
    bool wanted = false;
    // Where it hung and was given up, nobody waits for it.
    events_.enter([&] { wanted = is_wanted(); });
    if (!wanted) return;
    absl::StatusOr<storage::SnapshotStore> store =
        storage::SnapshotStore::Create(disk->storage(), order.job());
    const absl::Status done = store.ok() ? store->DiscardAll() : store.status();
    events_.enter([&] {
      if (is_wanted()) TellDiscarded(WithReason(done, "SNAPSHOT_FAILED"));
    });
  });
}

void SnapshotDisks::TellDiscarded(const absl::Status& done) {
  const v1::DiscardSnapshots discard = *std::exchange(discarding_, std::nullopt);
  if (done.ok()) {
    log::Info("the job begins anew; its older snapshots count no more, and stay",
              {{"job", discard.job()}});
  }
  v1::MemberMessage message;
  message.set_job(discard.job());
  v1::SnapshotsDiscarded& discarded = *message.mutable_discarded();
  discarded.set_job(discard.job());
  discarded.set_job_incarnation(discard.job_incarnation());
  discarded.set_error(std::string(done.message()));
  discarded.set_reason(ReasonOf(done));
  events_.tell(std::move(message));
}

// ---- reading ----

void SnapshotDisks::Find(const v1::FindSnapshot& order) {
  if (reads_ == nullptr) return;
  finding_ = order;
  if (reads_->hangs()) return TellNewest(Hangs(*reads_));
  reads_->Post([this, disk = reads_.get(), order] {
    const absl::StatusOr<std::optional<storage::SnapshotId>> newest =
        NewestOf(disk->storage(), order.job());
    events_.enter([&] {
      if (finding_.has_value() && finding_->epoch() == order.epoch()) TellNewest(newest);
    });
  });
}

void SnapshotDisks::TellNewest(const absl::StatusOr<std::optional<storage::SnapshotId>>& found) {
  const v1::FindSnapshot find = *std::exchange(finding_, std::nullopt);
  v1::MemberMessage message;
  message.set_job(find.job());
  v1::NewestSnapshot& newest = *message.mutable_newest_snapshot();
  newest.set_epoch(find.epoch());
  if (found.ok()) {
    if (found->has_value()) *newest.mutable_newest() = ToProto(**found);
  } else {
    log::Error("whether there is a snapshot cannot be said",
               {{"job", find.job()}, {"epoch", find.epoch()}, {"what", found.status()}});
    newest.set_error(std::string(found.status().message()));
  }
  events_.tell(std::move(message));
}

void SnapshotDisks::Restore(const scheduler::node::Restore& order, Job job) {
  StopRestoring();
  if (reads_ == nullptr) {
    return events_.on_restored(Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                                     "this node has no --snapshot_dir"),
                               std::nullopt);
  }
  restoring_ = std::make_shared<Restoring>();
  reads_->Post([this, disk = reads_.get(), wanted = order.from, restoring = restoring_,
                job = std::move(job)] {
    if (restoring->unwanted) return;
    const auto go_on = [&](uint64_t bytes) {
      restoring->read_bytes += bytes;
      return !restoring->unwanted;
    };
    absl::StatusOr<Restorable> from = FindRestorable(disk->storage(), job.name, wanted);
    absl::StatusOr<std::vector<std::vector<uint64_t>>> updates =
        from.ok() ? RestoreHostCopies(disk->storage(), from->manifest, *job.planned.inputs,
                                      job.groups, *job.planned.plan, *job.host, go_on)
                  : from.status();
    if (restoring->unwanted) return;
    const std::optional<storage::SnapshotId> older =
        updates.ok() ? std::nullopt : NewestBefore(disk->storage(), job.name, wanted);
    events_.enter([&] {
      if (restoring->unwanted) return;
      if (!updates.ok()) return events_.on_restored(updates.status(), older);
      events_.on_restored(
          scheduler::NodeJob::Restored{{from->manifest, from->trainers}, *std::move(updates)},
          std::nullopt);
    });
  });
}

void SnapshotDisks::StopRestoring() {
  // Others wait for the thread, and what it reads goes to lanes that are no more.
  if (restoring_ != nullptr) restoring_->unwanted = true;
}

uint64_t SnapshotDisks::read_bytes() const {
  return restoring_ == nullptr ? 0 : restoring_->read_bytes.load();
}

bool SnapshotDisks::Read(Work work, std::shared_ptr<std::atomic<bool>> unwanted,
                         std::function<void()> done) {
  if (reads_ == nullptr || reads_->hangs()) return false;
  reads_->Post([this, work = std::move(work), unwanted = std::move(unwanted),
                done = std::move(done), disk = reads_.get()] {
    // Others wait for the thread.
    if (unwanted->load()) return;
    work(disk->storage(), [unwanted] { return unwanted->load(); });
    events_.enter(done);
  });
  return true;
}

// ---- a directory that hangs ----

DiskWatch::News SnapshotDisks::Watch(Disk& disk, scheduler::TimePoint now, const std::string& job,
                                     uint32_t epoch) {
  const DiskWatch::News news = disk.OnTick(now);
  if (news == DiskWatch::News::kNone) return news;
  const bool hangs = news == DiskWatch::News::kHangs;
  log::Write(hangs ? log::Level::kWarn : log::Level::kInfo,
             hangs ? "the snapshot directory hangs" : "the snapshot directory answers again",
             {{"job", job.empty() ? "none" : job},
              {"epoch", epoch},
              {"what", disk.hang().what},
              {"since", disk.hang().since}});
  return news;
}

void SnapshotDisks::OnTick(scheduler::TimePoint now, const std::string& job, uint32_t epoch) {
  if (writes_ != nullptr && Watch(*writes_, now, job, epoch) == DiskWatch::News::kHangs) {
    GiveUpWriting();
    if (discarding_.has_value()) TellDiscarded(Hangs(*writes_));
  }
  if (sweeps_ != nullptr) Watch(*sweeps_, now, job, epoch);
  if (reads_ == nullptr || Watch(*reads_, now, job, epoch) != DiskWatch::News::kHangs) return;
  events_.changed();
  if (finding_.has_value()) TellNewest(Hangs(*reads_));
}

void SnapshotDisks::GiveUpWriting() {
  const std::string why = writes_->hang().Words();
  if (const uint64_t attempt = std::exchange(committing_, 0); attempt != 0) {
    TellManifestWritten(attempt, why, kHangs);
  }
  events_.on_hangs(why);
}

std::string SnapshotDisks::HangOfWrites() const {
  return writes_ != nullptr && writes_->hangs() ? writes_->hang().Words() : "";
}

absl::Status SnapshotDisks::Hangs(const Disk& disk) const {
  return Error(absl::StatusCode::kUnavailable, kHangs,
               Say("the snapshot directory of node ", Named("node", options_.node),
                   " hangs: ", Named("operation", disk.hang().Words())));
}

std::array<std::unique_ptr<Disk>, 3> SnapshotDisks::TakeDisks() {
  return {std::move(writes_), std::move(reads_), std::move(sweeps_)};
}

}  // namespace dmuond::server
