#include "server/storage/snapshot_store.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "server/storage/manifest.h"

namespace dmuond::server::storage {
namespace {

bool Has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Where a directory is gone, somebody else has removed it: nothing is left to do.
absl::Status UnlessGone(const absl::Status& status) {
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace

const char* Name(SnapshotState state) {
  switch (state) {
    case SnapshotState::kDurable:
      return "durable";
    case SnapshotState::kUnfinished:
      return "unfinished";
    case SnapshotState::kSetAside:
      return "set aside";
    case SnapshotState::kBroken:
      return "broken";
    case SnapshotState::kDiscarded:
      return "discarded";
  }
  return "?";
}

absl::StatusOr<SnapshotStore> SnapshotStore::Create(Storage& storage, std::string job) {
  RETURN_IF_ERROR(CheckJobName(job));
  return SnapshotStore(storage, std::move(job));
}

std::string SnapshotStore::PathOf(const SnapshotId& id) const {
  return absl::StrCat(job_, "/", DirectoryName(id));
}

absl::Status SnapshotStore::Prepare(const SnapshotId& id) {
  // Synced even where it was there: another daemon that made it may not have come so far.
  absl::Status status = storage_->MakeDirectory(job_);
  if (status.ok()) status = storage_->SyncDirectory("");
  if (status.ok()) status = storage_->MakeDirectory(PathOf(id));
  if (status.ok()) status = storage_->SyncDirectory(job_);
  return status;
}

absl::Status SnapshotStore::Commit(const v1::SnapshotManifest& manifest) {
  if (manifest.job() != job_) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: of job ", manifest.job(), ", committed to job ", job_));
  }
  const std::string directory = PathOf(IdOf(manifest));
  ASSIGN_OR_RETURN(std::string text, EncodeManifest(manifest));
  RETURN_IF_ERROR(CheckFiles(manifest));

  const std::string path = absl::StrCat(directory, "/", kManifestName);
  const std::string temporary = absl::StrCat(path, kTemporarySuffix);
  absl::Status status = UnlessGone(storage_->Remove(temporary));
  if (!status.ok()) return status;
  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, storage_->Create(temporary));
  status = file->Append(std::as_bytes(std::span<const char>(text)));
  if (status.ok()) status = file->Sync();
  if (status.ok()) status = file->Close();
  if (status.ok()) status = storage_->Rename(temporary, path);
  if (status.ok()) status = storage_->SyncDirectory(directory);
  return status;
}

absl::StatusOr<std::vector<SnapshotEntry>> SnapshotStore::List() {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  std::vector<SnapshotEntry> entries;
  for (const SnapshotId& id : ids) entries.push_back(Look(id));
  return entries;
}

absl::StatusOr<std::optional<SnapshotEntry>> SnapshotStore::Newest(
    std::vector<SnapshotEntry>* broken) {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  for (const SnapshotId& id : ids) {
    SnapshotEntry entry = Look(id);
    if (entry.state == SnapshotState::kDurable) return entry;
    if (entry.state == SnapshotState::kBroken && broken != nullptr) {
      broken->push_back(std::move(entry));
    }
  }
  return std::nullopt;
}

absl::StatusOr<SnapshotEntry> SnapshotStore::Find(scheduler::StepId step) {
  ASSIGN_OR_RETURN(std::vector<SnapshotEntry> entries, List());
  std::vector<int64_t> steps;
  for (SnapshotEntry& entry : entries) {
    if (entry.id.step == step && entry.state == SnapshotState::kBroken) return entry.problem;
    if (entry.state != SnapshotState::kDurable) continue;
    if (entry.id.step == step) return std::move(entry);
    steps.push_back(entry.id.step.value());
  }
  return absl::NotFoundError(absl::StrCat(
      "job ", job_, " has no snapshot of step ", step.value(), " in ", storage_->Describe(job_),
      steps.empty() ? "; it has none"
                    : absl::StrCat("; it has steps ", absl::StrJoin(steps, ", "))));
}

absl::StatusOr<SnapshotEntry> SnapshotStore::Find(const SnapshotId& id) {
  SnapshotEntry entry = Look(id);
  if (entry.state == SnapshotState::kBroken) return entry.problem;
  if (entry.state == SnapshotState::kDurable) return entry;
  return absl::NotFoundError(absl::StrCat("job ", job_, " has no snapshot of ", ToString(id),
                                          " in ", storage_->Describe(job_)));
}

absl::StatusOr<SnapshotOwners> SnapshotStore::Owners() {
  ASSIGN_OR_RETURN(std::vector<SnapshotEntry> entries, List());
  SnapshotOwners owners;
  std::vector<uint32_t>& uids = owners.uids;
  for (const SnapshotEntry& entry : entries) {
    if (entry.unread()) owners.unread.Update(entry.problem);
    if (!entry.manifest.has_owner_uid()) continue;
    const uint32_t uid = entry.manifest.owner_uid();
    if (std::find(uids.begin(), uids.end(), uid) == uids.end()) uids.push_back(uid);
  }
  return owners;
}

std::string SnapshotStore::GroupOf(const SnapshotEntry& entry) {
  if (!entry.manifest.job().empty()) return entry.manifest.group();
  const bool renamed =
      entry.state == SnapshotState::kSetAside || entry.state == SnapshotState::kDiscarded;
  if (!renamed) return "";
  const bool set_aside = entry.state == SnapshotState::kSetAside;
  const auto manifest = ReadManifest(entry.id, set_aside ? kSetAsideName : kDiscardedName);
  return manifest.ok() ? manifest->group() : "";
}

absl::StatusOr<std::optional<SnapshotId>> SnapshotStore::Largest() {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  return ids.empty() ? std::nullopt : std::optional(ids.front());
}

absl::Status SnapshotStore::Retain(int32_t keep) {
  ASSIGN_OR_RETURN(std::vector<SnapshotEntry> entries, List());
  int32_t kept = 0;
  for (const SnapshotEntry& entry : entries) {
    if (entry.state == SnapshotState::kDurable && kept < keep) {
      ++kept;
      continue;
    }
    // Broken and discarded ones stay for a person to look at. Those set aside go like others: when
    // enough newer ones are there.
    const bool counted =
        entry.state == SnapshotState::kDurable || entry.state == SnapshotState::kSetAside;
    if (!counted || kept < keep) continue;
    RETURN_IF_ERROR(RemoveSnapshot(entry.id));
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::RemoveUpTo(const SnapshotId& newest,
                                       const std::function<bool()>& go_on) {
  ASSIGN_OR_RETURN(std::vector<SnapshotEntry> entries, List());
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (newest < entry->id || entry->state == SnapshotState::kBroken) continue;
    if (!go_on()) return absl::OkStatus();
    RETURN_IF_ERROR(RemoveSnapshot(entry->id));
  }
  // What stays lies there, and files of other people may, too.
  absl::StatusOr<std::vector<std::string>> left = storage_->List(job_);
  if (!left.ok()) return UnlessGone(left.status());
  if (!left->empty() || !go_on()) return absl::OkStatus();
  return UnlessGone(storage_->RemoveDirectory(job_));
}

absl::Status SnapshotStore::RemoveLeftovers(scheduler::Attempt oldest_live) {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  for (const SnapshotId& id : ids) {
    if (id.attempt >= oldest_live) continue;
    ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(id));
    const bool kept =
        Has(names, kManifestName) || Has(names, kSetAsideName) || Has(names, kDiscardedName);
    if (kept) continue;
    RETURN_IF_ERROR(RemoveSnapshot(id));
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::SetAsideAfter(const SnapshotId& id) {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  for (const SnapshotId& other : ids) {  // newest first: those left are always older
    if (other <= id) continue;
    RETURN_IF_ERROR(RenameManifest(other, kSetAsideName));
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::DiscardAll() {
  ASSIGN_OR_RETURN(std::vector<SnapshotId> ids, Directories());
  for (const SnapshotId& id : ids) {
    RETURN_IF_ERROR(RenameManifest(id, kDiscardedName));
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::RenameManifest(const SnapshotId& id, const char* to) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(id));
  if (!Has(names, kManifestName)) return absl::OkStatus();
  const std::string directory = PathOf(id);
  absl::Status status = UnlessGone(storage_->Rename(absl::StrCat(directory, "/", kManifestName),
                                                    absl::StrCat(directory, "/", to)));
  // Also where somebody else has renamed it, who may not have come so far.
  if (status.ok()) status = UnlessGone(storage_->SyncDirectory(directory));
  return status;
}

absl::StatusOr<std::vector<SnapshotId>> SnapshotStore::Directories() {
  absl::StatusOr<std::vector<std::string>> names = storage_->List(job_);
  if (absl::IsNotFound(names.status())) return std::vector<SnapshotId>();
  if (!names.ok()) return names.status();
  std::vector<SnapshotId> ids;
  for (const std::string& name : *names) {
    if (std::optional<SnapshotId> id = ParseDirectoryName(name)) ids.push_back(*id);
  }
  std::sort(ids.rbegin(), ids.rend());
  return ids;
}

absl::StatusOr<std::vector<std::string>> SnapshotStore::NamesIn(const SnapshotId& id) {
  absl::StatusOr<std::vector<std::string>> names = storage_->List(PathOf(id));
  if (absl::IsNotFound(names.status())) return std::vector<std::string>();
  return names;
}

SnapshotEntry SnapshotStore::Look(const SnapshotId& id) {
  SnapshotEntry entry{.id = id};
  const auto broken = [&](const absl::Status& problem) {
    entry.state = SnapshotState::kBroken;
    entry.problem = problem;
    return entry;
  };
  absl::StatusOr<std::vector<std::string>> names = NamesIn(id);
  absl::StatusOr<v1::SnapshotManifest> manifest = absl::NotFoundError("it has no manifest");
  if (names.ok() && Has(*names, kManifestName)) {
    manifest = ReadManifest(id, kManifestName);
    // Somebody has renamed or removed it since its name was listed.
    if (absl::IsNotFound(manifest.status())) names = NamesIn(id);
  }
  if (!names.ok()) return broken(names.status());
  if (!Has(*names, kManifestName)) {
    if (Has(*names, kSetAsideName)) entry.state = SnapshotState::kSetAside;
    if (Has(*names, kDiscardedName)) entry.state = SnapshotState::kDiscarded;
    return entry;
  }
  if (!manifest.ok()) return broken(manifest.status());
  entry.manifest = *std::move(manifest);
  if (absl::Status status = CheckFiles(entry.manifest); !status.ok()) return broken(status);
  entry.state = SnapshotState::kDurable;
  return entry;
}

absl::StatusOr<v1::SnapshotManifest> SnapshotStore::ReadManifest(const SnapshotId& id,
                                                                 const char* name) {
  const std::string path = absl::StrCat(PathOf(id), "/", name);
  const auto named = [&](absl::StatusCode code, const std::string& what) {
    return absl::Status(code, absl::StrCat(storage_->Describe(path), ": ", what));
  };
  ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, storage_->Open(path));
  const int64_t size = file->size();
  if (size > kManifestBytesMax) {
    return named(absl::StatusCode::kDataLoss, absl::StrCat("has ", size, " bytes; at most ",
                                                           kManifestBytesMax, " are possible"));
  }
  std::string text(size, '\0');
  absl::Status status = file->ReadAt(0, std::as_writable_bytes(std::span<char>(text)));
  if (!status.ok()) return status;
  absl::StatusOr<v1::SnapshotManifest> manifest = ParseManifest(text);
  if (!manifest.ok()) {
    return named(manifest.status().code(), std::string(manifest.status().message()));
  }
  if (manifest->job() != job_ || IdOf(*manifest) != id) {
    return named(absl::StatusCode::kDataLoss,
                 absl::StrCat("is of job ", manifest->job(), ", ", ToString(IdOf(*manifest))));
  }
  return manifest;
}

absl::Status SnapshotStore::CheckFiles(const v1::SnapshotManifest& manifest) {
  const std::string directory = PathOf(IdOf(manifest));
  for (const v1::SnapshotFile& expected : manifest.files()) {
    const std::string path = absl::StrCat(directory, "/", expected.name());
    absl::StatusOr<std::unique_ptr<ReadableFile>> file = storage_->Open(path);
    if (absl::IsNotFound(file.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(storage_->Describe(path), " is named by the manifest and not there"));
    }
    if (!file.ok()) return file.status();
    if ((*file)->size() != expected.bytes()) {
      return absl::DataLossError(absl::StrCat(storage_->Describe(path), ": has ", (*file)->size(),
                                              " bytes, the manifest says ", expected.bytes()));
    }
  }
  return absl::OkStatus();
}

absl::Status SnapshotStore::RemoveSnapshot(const SnapshotId& id) {
  const std::string directory = PathOf(id);
  ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(id));
  // The manifest first, and durably: what is half removed must not be taken for a snapshot.
  for (const char* manifest : {kManifestName, kSetAsideName}) {
    if (!Has(names, manifest)) continue;
    absl::Status status = UnlessGone(storage_->Remove(absl::StrCat(directory, "/", manifest)));
    if (status.ok()) status = UnlessGone(storage_->SyncDirectory(directory));
    if (!status.ok()) return status;
  }
  for (const std::string& name : names) {
    if (name == kManifestName || name == kSetAsideName) continue;
    RETURN_IF_ERROR(UnlessGone(storage_->Remove(absl::StrCat(directory, "/", name))));
  }
  return UnlessGone(storage_->RemoveDirectory(directory));
}

absl::StatusOr<std::vector<std::string>> JobsIn(Storage& storage) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, storage.List(""));
  std::vector<std::string> jobs;
  for (const std::string& name : names) {
    if (!CheckJobName(name).ok()) continue;
    absl::StatusOr<std::vector<std::string>> inside = storage.List(name);
    // Files of other people may lie there too.
    if (inside.ok() && std::any_of(inside->begin(), inside->end(), [](const std::string& entry) {
          return ParseDirectoryName(entry).has_value();
        })) {
      jobs.push_back(name);
    }
  }
  return jobs;
}

}  // namespace dmuond::server::storage
