#include "server/daemon/snapshots/node_snapshot.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/limits.h"
#include "scheduler/restore_plan.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/storage/layout_check.h"
#include "server/storage/manifest.h"
#include "server/storage/restore.h"
#include "server/storage/snapshot_reader.h"

namespace dmuond::server {

using storage::SnapshotStore;
using storage::Storage;

void CopyProgress::Report(size_t lane, int32_t batches, std::vector<uint64_t> updates) {
  MutexLock lock(mutex_);
  Lane& state = lanes_[lane];
  if (!state.begun) state.updates = std::move(updates);
  state.begun = true;
  state.batches = std::max(state.batches, batches);
  changed_.NotifyAll();
}

void CopyProgress::Abandon(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (abandoned_.ok()) abandoned_ = why;
  changed_.NotifyAll();
}

void CopyProgress::GiveUp(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (given_up_.ok()) given_up_ = why;
  changed_.NotifyAll();
}

absl::Status CopyProgress::given_up() {
  MutexLock lock(mutex_);
  return given_up_;
}

absl::StatusOr<std::vector<uint64_t>> CopyProgress::WaitForUpdates(size_t lane) {
  MutexLock lock(mutex_);
  while (!lanes_[lane].begun && abandoned_.ok() && given_up_.ok()) changed_.Wait(mutex_);
  if (!given_up_.ok()) return given_up_;
  if (!lanes_[lane].begun) return abandoned_;
  return lanes_[lane].updates;
}

absl::StatusOr<int32_t> CopyProgress::WaitForMore(size_t lane, int32_t batches) {
  MutexLock lock(mutex_);
  while (lanes_[lane].batches <= batches && abandoned_.ok() && given_up_.ok()) {
    changed_.Wait(mutex_);
  }
  if (!given_up_.ok()) return given_up_;
  // What is there is there, whatever became of the lane.
  if (lanes_[lane].batches <= batches) return abandoned_;
  return lanes_[lane].batches;
}

namespace {

// Between two parts it is seen that nobody wants the file any more.
constexpr int64_t kPartBytes = int64_t{4} << 20;

absl::StatusOr<v1::SnapshotFile> WriteLane(Storage& storage, const NodeSnapshot& snapshot,
                                           size_t index, CopyProgress& progress) {
  const HostState& lane = (*snapshot.lanes)[index];
  absl::StatusOr<std::vector<uint64_t>> updates = progress.WaitForUpdates(index);
  if (!updates.ok()) return updates.status();
  storage::StateFile file{
      .id = snapshot.id, .job = snapshot.job, .lane = lane.lane, .units = lane.units};
  if (updates->size() != file.units.size()) {
    return absl::InternalError(absl::StrCat("lane ", lane.lane.value(), " counted updates of ",
                                            updates->size(), " units, it owns ",
                                            file.units.size()));
  }
  for (size_t i = 0; i < updates->size(); ++i) file.units[i].updates = (*updates)[i];
  auto writer = storage::CreateStateFile(storage, file);
  if (!writer.ok()) return writer.status();
  const std::vector<int64_t>& offsets = lane.layout.batch_offset_bytes;
  const auto batches = static_cast<int32_t>(offsets.size()) - 1;
  for (int32_t written = 0; written < batches;) {
    absl::StatusOr<int32_t> there = progress.WaitForMore(index, written);
    if (!there.ok()) return there.status();
    const int32_t end = std::min(*there, batches);
    for (int64_t at = offsets[written]; at < offsets[end];) {
      if (absl::Status unwanted = progress.given_up(); !unwanted.ok()) return unwanted;
      const int64_t part = std::min(kPartBytes, offsets[end] - at);
      absl::Status appended =
          (*writer)->Append({lane.memory->data() + at, static_cast<size_t>(part)});
      if (!appended.ok()) return appended;
      at += part;
    }
    written = end;
  }
  return (*writer)->Finish();
}

absl::StatusOr<Restorable> Complete(Storage& storage, storage::SnapshotEntry entry) {
  absl::StatusOr<storage::TrainerStates> trainers =
      storage::ReadTrainerStates(storage, entry.manifest);
  if (!trainers.ok()) return trainers.status();
  return Restorable{entry.id, std::move(entry.manifest), *std::move(trainers)};
}

}  // namespace

absl::StatusOr<std::vector<v1::SnapshotFile>> WriteNodeFiles(Storage& storage,
                                                             const NodeSnapshot& snapshot,
                                                             CopyProgress& progress) {
  if (absl::Status unwanted = progress.given_up(); !unwanted.ok()) return unwanted;
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, snapshot.job);
  if (!store.ok()) return store.status();
  if (absl::Status status = store->Prepare(snapshot.id); !status.ok()) return status;
  std::vector<v1::SnapshotFile> files;
  for (size_t lane = 0; lane < snapshot.lanes->size(); ++lane) {
    absl::StatusOr<v1::SnapshotFile> file = WriteLane(storage, snapshot, lane, progress);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
  }
  if (!snapshot.trainers.empty()) {
    absl::StatusOr<v1::SnapshotFile> file = storage::WriteTrainersFile(
        storage, snapshot.job, snapshot.id, snapshot.node, snapshot.trainers);
    if (!file.ok()) return file.status();
    files.push_back(*std::move(file));
  }
  return files;
}

namespace {

// A group's attempts are larger than all that were in the directory when it formed, so that a
// larger one is somebody else's. Retention would take it for the newer one, and remove what is the
// group's.
absl::Status CheckNobodyElseWrites(SnapshotStore& store, const storage::SnapshotId& own,
                                   const std::string& path) {
  absl::StatusOr<std::optional<storage::SnapshotId>> largest = store.Largest();
  if (!largest.ok()) return largest.status();
  if (!largest->has_value() || (*largest)->attempt <= own.attempt) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      path, " has ", storage::DirectoryName(**largest),
      ", which this group has not made and which is newer than its own ",
      storage::DirectoryName(own),
      ": another group writes snapshots of a job of this name there, or a newer process of this "
      "node does. Each group needs a --snapshot_dir, or its jobs names, of their own"));
}

}  // namespace

absl::Status CommitSnapshot(Storage& storage, const v1::SnapshotManifest& manifest, int32_t keep,
                            std::vector<absl::Status>& warnings) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, manifest.job());
  if (!store.ok()) return store.status();
  absl::Status alone =
      CheckNobodyElseWrites(*store, storage::IdOf(manifest), storage.Describe(manifest.job()));
  if (!alone.ok()) return alone;
  if (absl::Status status = store->Commit(manifest); !status.ok()) return status;
  for (const absl::Status& status :
       {store->Retain(keep), store->RemoveLeftovers(storage::IdOf(manifest).attempt)}) {
    if (!status.ok()) warnings.push_back(status);
  }
  return absl::OkStatus();
}

void RemoveUnfinished(Storage& storage, const v1::SnapshotManifest& manifest,
                      std::vector<absl::Status>& warnings) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, manifest.job());
  absl::Status status = store.status();
  if (store.ok()) status = store->RemoveLeftovers(scheduler::Attempt(manifest.attempt() + 1));
  if (!status.ok()) warnings.push_back(status);
}

absl::StatusOr<uint32_t> NewestEpoch(Storage& storage) {
  absl::StatusOr<std::vector<std::string>> jobs = storage::JobsIn(storage);
  if (!jobs.ok()) return jobs.status();
  uint32_t newest = 0;
  for (const std::string& job : *jobs) {
    absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
    if (!store.ok()) return store.status();
    absl::StatusOr<std::optional<storage::SnapshotId>> largest = store->Largest();
    if (!largest.ok()) return largest.status();
    if (!largest->has_value()) continue;
    const uint32_t epoch = scheduler::EpochOf((*largest)->attempt).value();
    if (epoch > scheduler::kEpochMax) {
      return Error(absl::StatusCode::kFailedPrecondition, "EPOCH_EXHAUSTED",
                   Say("the name of the snapshot '",
                       Named("path", storage.Describe(absl::StrCat(
                                         job, "/", storage::DirectoryName(**largest)))),
                       "' has group epoch ", Named("epoch", epoch), "; a group ends at ",
                       Named("epoch_max", scheduler::kEpochMax),
                       ", and none comes so far: move that directory away"));
    }
    newest = std::max(newest, epoch);
  }
  return newest;
}

namespace {

absl::StatusOr<std::optional<storage::SnapshotEntry>> FindNewest(Storage& storage,
                                                                 const std::string& job) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
  if (!store.ok()) return store.status();
  std::vector<storage::SnapshotEntry> broken;
  absl::StatusOr<std::optional<storage::SnapshotEntry>> newest = store->Newest(&broken);
  for (const storage::SnapshotEntry& entry : broken) {
    log::Warn(
        "a broken snapshot is passed over",
        {{"job", job}, {"step", absl::StrCat(entry.id.step.value())}, {"what", entry.problem}});
  }
  // A job that has lost its state must not begin anew as if it had never had any.
  if (newest.ok() && !newest->has_value() && !broken.empty()) return broken.front().problem;
  return newest;
}

}  // namespace

namespace {

// The job that has the directory with the largest attempt; empty: there is no snapshot.
absl::StatusOr<std::string> JobOfLargest(Storage& storage) {
  absl::StatusOr<std::vector<std::string>> jobs = storage::JobsIn(storage);
  if (!jobs.ok()) return jobs.status();
  std::optional<storage::SnapshotId> newest;
  std::string of;
  for (const std::string& job : *jobs) {
    absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
    if (!store.ok()) return store.status();
    absl::StatusOr<std::optional<storage::SnapshotId>> largest = store->Largest();
    if (!largest.ok()) return largest.status();
    if (!largest->has_value() || (newest.has_value() && **largest < *newest)) continue;
    newest = *largest;
    of = job;
  }
  return of;
}

}  // namespace

void LogLastSave(Storage& storage, std::chrono::milliseconds drain_timeout) {
  const absl::StatusOr<std::string> job = JobOfLargest(storage);
  absl::StatusOr<std::optional<storage::SnapshotEntry>> newest = std::nullopt;
  if (!job.ok()) {
    newest = job.status();
  } else if (!job->empty()) {
    newest = FindNewest(storage, *job);
  }
  if (!newest.ok()) {
    return log::Warn("how long the last snapshot took cannot be said", {{"what", newest.status()}});
  }
  if (!newest->has_value()) return;
  const v1::SnapshotManifest& manifest = (*newest)->manifest;
  const std::optional<double> took_s = storage::TookSeconds(manifest);
  const double drain_timeout_s = std::chrono::duration<double>(drain_timeout).count();
  const bool longer = took_s.value_or(0) > drain_timeout_s;
  std::vector<log::Field> fields = {
      {"job", manifest.job()}, {"step", manifest.step()}, {"bytes", storage::BytesOf(manifest)}};
  fields.push_back(took_s.has_value() ? log::Field("took_s", *took_s)
                                      : log::Field("took_s", "unknown"));
  fields.emplace_back("drain_timeout_s", drain_timeout_s);
  log::Write(longer ? log::Level::kWarn : log::Level::kInfo,
             longer ? "the last snapshot took longer than a daemon that leaves has for it "
                      "(--drain_timeout): the last steps may be lost then"
                    : "the last snapshot took so long: a daemon that leaves needs as much",
             fields);
}

absl::StatusOr<storage::SnapshotOwners> OwnersOf(Storage& storage, const std::string& job) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
  return store.ok() ? store->Owners() : store.status();
}

absl::StatusOr<std::optional<Restorable>> FindRestorable(Storage& storage, const std::string& job) {
  absl::StatusOr<std::optional<storage::SnapshotEntry>> newest = FindNewest(storage, job);
  if (!newest.ok()) return newest.status();
  if (!newest->has_value()) return std::nullopt;
  return Complete(storage, *std::move(*newest));
}

absl::StatusOr<std::optional<storage::SnapshotId>> NewestOf(Storage& storage,
                                                            const std::string& job) {
  absl::StatusOr<std::optional<storage::SnapshotEntry>> newest = FindNewest(storage, job);
  if (!newest.ok()) return newest.status();
  if (!newest->has_value()) return std::nullopt;
  return (*newest)->id;
}

std::optional<storage::SnapshotId> NewestBefore(Storage& storage, const std::string& job,
                                                const storage::SnapshotId& id) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
  if (!store.ok()) return std::nullopt;
  absl::StatusOr<std::vector<storage::SnapshotEntry>> entries = store->List();
  if (!entries.ok()) return std::nullopt;
  for (const storage::SnapshotEntry& entry : *entries) {  // newest first
    if (entry.id < id && entry.state == storage::SnapshotState::kDurable) return entry.id;
  }
  return std::nullopt;
}

absl::Status VerifyWhole(Storage& storage, const Restorable& snapshot,
                         const std::function<bool()>& unwanted) {
  absl::StatusOr<std::unique_ptr<storage::SnapshotReader>> reader =
      storage::SnapshotReader::Open(storage, snapshot.manifest);
  if (!reader.ok()) return reader.status();
  return (*reader)->VerifyAll([&](int64_t /*bytes*/) { return !unwanted(); });
}

absl::StatusOr<Restorable> FindRestorable(Storage& storage, const std::string& job,
                                          scheduler::StepId step) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
  if (!store.ok()) return store.status();
  absl::StatusOr<storage::SnapshotEntry> entry = store->Find(step);
  if (absl::IsNotFound(entry.status())) return WithReason(entry.status(), "NO_SUCH_SNAPSHOT");
  if (!entry.ok()) return entry.status();
  return Complete(storage, *std::move(entry));
}

absl::StatusOr<Restorable> FindRestorable(Storage& storage, const std::string& job,
                                          const storage::SnapshotId& id) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job);
  if (!store.ok()) return store.status();
  absl::StatusOr<storage::SnapshotEntry> entry = store->Find(id);
  if (!entry.ok()) return entry.status();
  return Complete(storage, *std::move(entry));
}

absl::Status CheckRestorable(const v1::SnapshotManifest& manifest,
                             const scheduler::PlanInputs& inputs, const GroupConfigs& groups) {
  absl::StatusOr<storage::JobLayout> saved = storage::LayoutOf(manifest);
  if (!saved.ok()) return saved.status();
  absl::StatusOr<storage::JobLayout> registered =
      storage::LayoutOf(inputs.layout.parameters, groups);
  if (!registered.ok()) return registered.status();
  absl::Status compatible = storage::CheckCompatible(*saved, *registered);
  if (compatible.ok()) return compatible;
  return Error(compatible.code(), "LAYOUT_DIFFERS",
               absl::StrCat("the snapshot of step ", manifest.step(), ": ", compatible.message()));
}

absl::StatusOr<std::vector<std::vector<uint64_t>>> RestoreHostCopies(
    Storage& storage, const v1::SnapshotManifest& manifest, const scheduler::PlanInputs& inputs,
    const GroupConfigs& groups, const scheduler::Plan& plan, const std::vector<HostState>& lanes,
    const std::function<bool(uint64_t bytes)>& go_on) {
  if (absl::Status same = CheckRestorable(manifest, inputs, groups); !same.ok()) return same;
  absl::StatusOr<std::unique_ptr<storage::SnapshotReader>> reader =
      storage::SnapshotReader::Open(storage, manifest);
  if (!reader.ok()) return reader.status();
  absl::StatusOr<std::vector<scheduler::SavedUnit>> saved =
      (*reader)->SavedUnits(inputs.layout.parameters);
  if (!saved.ok()) return saved.status();
  absl::StatusOr<scheduler::RestorePlan> reads =
      scheduler::PlanRestore(inputs.layout, plan, *saved);
  if (!reads.ok()) return reads.status();

  std::vector<std::byte*> places(plan.units.size(), nullptr);
  std::vector<scheduler::RestorePart> parts;
  std::vector<std::vector<uint64_t>> updates;
  for (const HostState& lane : lanes) {
    std::vector<uint64_t>& mine = updates.emplace_back();
    for (size_t i = 0; i < lane.layout.units.size(); ++i) {
      const scheduler::UnitId id = lane.layout.units[i];
      places[id.value()] = lane.memory->data() + lane.layout.unit_offset_bytes[i];
      mine.push_back(reads->updates[id.value()]);
    }
    const auto& reading = reads->lanes[lane.lane.value()];
    parts.insert(parts.end(), reading.begin(), reading.end());
  }
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.saved < b.saved; });
  const auto target = [&](scheduler::UnitId id,
                          storage::StateTensor kind) -> absl::StatusOr<std::span<float>> {
    const scheduler::Unit& unit = plan.units[id.value()];
    const auto kinds = storage::TensorsOf(unit.kind);
    const auto index = std::find(kinds.begin(), kinds.end(), kind) - kinds.begin();
    const auto elements = static_cast<size_t>(scheduler::Elements(unit.box));
    if (!go_on(elements * sizeof(float))) {
      return absl::CancelledError("the snapshot is not wanted any more");
    }
    return std::span<float>(
        reinterpret_cast<float*>(places[id.value()]) + (static_cast<size_t>(index) * elements),
        elements);
  };
  absl::Status restored = storage::Restore(**reader, *saved, plan, parts, target);
  if (!restored.ok()) return restored;
  return updates;
}

}  // namespace dmuond::server
