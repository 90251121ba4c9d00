// dmuonctl snapshot list|verify: what lies in a snapshot directory, and whether it is whole. Needs
// no daemon: it reads the files.
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "server/ctl/command.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"
#include "server/storage/manifest.h"
#include "server/storage/posix_storage.h"
#include "server/storage/snapshot_reader.h"
#include "server/storage/snapshot_store.h"

namespace dmuond::server::ctl {
namespace {

using storage::SnapshotEntry;
using storage::SnapshotState;
using storage::SnapshotStore;
using storage::Storage;

struct Listed {
  std::string job;
  SnapshotEntry entry;
};

std::string TimeOf(const v1::SnapshotManifest& manifest) {
  if (!manifest.has_time()) return "";
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(manifest.time().seconds()),
                          absl::UTCTimeZone());
}

std::string TookOf(const v1::SnapshotManifest& manifest) {
  const std::optional<double> took = storage::TookSeconds(manifest);
  return took.has_value() ? absl::StrFormat("%.1f s", *took) : "";
}

std::string AttemptOf(const SnapshotEntry& entry) {
  return absl::StrCat(scheduler::EpochOf(entry.id.attempt).value(), ".",
                      static_cast<uint32_t>(entry.id.attempt.value()));
}

// All snapshots of one job, or of all.
absl::StatusOr<std::vector<Listed>> ListAll(Storage& storage, const std::string& only_job) {
  std::vector<std::string> jobs = {only_job};
  if (only_job.empty()) {
    ASSIGN_OR_RETURN(jobs, storage::JobsIn(storage));
  }
  std::vector<Listed> listed;
  for (const std::string& job : jobs) {
    ASSIGN_OR_RETURN(SnapshotStore store, SnapshotStore::Create(storage, job));
    ASSIGN_OR_RETURN(std::vector<SnapshotEntry> entries, store.List());
    for (SnapshotEntry& entry : entries) listed.push_back({job, std::move(entry)});
  }
  return listed;
}

Json ListedToJson(const Listed& listed) {
  const SnapshotEntry& entry = listed.entry;
  Json json = {{"job", listed.job},
               {"step", entry.id.step.value()},
               {"attempt", entry.id.attempt.value()},
               {"epoch", scheduler::EpochOf(entry.id.attempt).value()},
               {"directory", absl::StrCat(listed.job, "/", storage::DirectoryName(entry.id))},
               {"state", storage::Name(entry.state)}};
  if (entry.state == SnapshotState::kDurable) {
    json["time"] = TimeOf(entry.manifest);
    json["bytes"] = storage::BytesOf(entry.manifest);
    if (const auto took = storage::TookSeconds(entry.manifest)) json["took_s"] = *took;
    if (entry.manifest.has_owner_uid()) json["owner_uid"] = entry.manifest.owner_uid();
    if (!entry.manifest.group().empty()) json["group"] = entry.manifest.group();
    json["files"] = entry.manifest.files_size();
    json["world_size"] = entry.manifest.world_size();
    json["nodes"] = entry.manifest.plan().nodes();
    json["lanes_per_node"] = entry.manifest.plan().lanes_per_node();
    json["parameters"] = entry.manifest.parameters_size();
    json["version"] = entry.manifest.version();
  }
  if (!entry.problem.ok()) json["problem"] = std::string(entry.problem.message());
  return json;
}

int List(const Options& options, Storage& storage, const std::string& job) {
  absl::StatusOr<std::vector<Listed>> listed = ListAll(storage, job);
  if (!listed.ok()) return Fail(listed.status());
  if (options.json) {
    Json json = Json::array();
    for (const Listed& one : *listed) json.push_back(ListedToJson(one));
    PrintJson(json);
    return kExitOk;
  }
  Table table({"job", ">owner", ">step", ">attempt", "state", "time", ">took", ">size", ">world",
               ">lanes"});
  for (const auto& [name, entry] : *listed) {
    const v1::SnapshotManifest& manifest = entry.manifest;
    const bool durable = entry.state == SnapshotState::kDurable;
    table.Add(
        {name, manifest.has_owner_uid() ? absl::StrCat(manifest.owner_uid()) : "",
         absl::StrCat(entry.id.step.value()), AttemptOf(entry), storage::Name(entry.state),
         TimeOf(manifest), TookOf(manifest), durable ? HumanBytes(storage::BytesOf(manifest)) : "",
         durable ? absl::StrCat(manifest.world_size()) : "",
         durable ? absl::StrCat(manifest.plan().nodes() * manifest.plan().lanes_per_node()) : ""});
  }
  std::cout << (listed->empty() ? "no snapshot\n" : table.Text());
  for (const auto& [name, entry] : *listed) {
    if (!entry.problem.ok()) std::cout << entry.problem.message() << "\n";
  }
  return kExitOk;
}

// Reads every byte. Unfinished, set-aside and discarded ones are no snapshots: nothing is said of
// them.
absl::Status VerifyOne(Storage& storage, const SnapshotEntry& entry) {
  if (!entry.problem.ok()) return entry.problem;
  ASSIGN_OR_RETURN(auto reader, storage::SnapshotReader::Open(storage, entry.manifest));
  return reader->VerifyAll([](int64_t /*bytes*/) { return true; });
}

int Verify(const Options& options, Storage& storage, const std::string& job,
           std::optional<int64_t> step) {
  absl::StatusOr<std::vector<Listed>> listed = ListAll(storage, job);
  if (!listed.ok()) return Fail(listed.status());
  bool all_whole = true;
  bool found = false;
  Json json = Json::array();
  for (Listed& one : *listed) {
    SnapshotEntry& entry = one.entry;
    if (step.has_value() && entry.id.step.value() != *step) continue;
    if (entry.state != SnapshotState::kDurable && entry.state != SnapshotState::kBroken) continue;
    found = true;
    entry.problem = VerifyOne(storage, entry);
    if (!entry.problem.ok()) {
      entry.state = SnapshotState::kBroken;
      all_whole = false;
    }
    if (options.json) {
      json.push_back(ListedToJson(one));
    } else {
      std::cout << one.job << " " << storage::ToString(entry.id) << ": "
                << (entry.problem.ok()
                        ? absl::StrCat("whole, ", HumanBytes(storage::BytesOf(entry.manifest)))
                        : std::string(entry.problem.message()))
                << std::endl;  // one may take minutes: shown when it is known
    }
  }
  if (options.json) PrintJson(json);
  if (!found) {
    return Fail(absl::NotFoundError(
        absl::StrCat("no snapshot", step.has_value() ? absl::StrCat(" of step ", *step) : "",
                     " in ", storage.Describe(job))));
  }
  return all_whole ? kExitOk : kExitFailed;
}

}  // namespace

int RunSnapshot(const Options& options, const Arguments& arguments) {
  constexpr char kUsage[] =
      "snapshot list DIRECTORY [JOB], snapshot verify DIRECTORY [JOB [STEP]], snapshot save, or "
      "snapshot load [STEP]";
  if (arguments.size() == 1 && arguments[0] == "save") return RunSnapshotSave(options);
  if (!arguments.empty() && arguments.size() <= 2 && arguments[0] == "load") {
    int64_t step = 0;
    if (arguments.size() == 2 && (!absl::SimpleAtoi(arguments[1], &step) || step < 1)) {
      return FailUsage(absl::StrCat("'", arguments[1], "' is no step"));
    }
    return RunSnapshotLoad(options, step);
  }
  if (arguments.size() < 2 || arguments.size() > 4) return FailUsage(kUsage);
  const std::string job = arguments.size() > 2 ? arguments[2] : "";
  std::optional<int64_t> step;
  if (arguments.size() > 3) {
    step.emplace();
    if (!absl::SimpleAtoi(arguments[3], &*step)) {
      return FailUsage(absl::StrCat("'", arguments[3], "' is no step; ", kUsage));
    }
  }
  const bool verify = arguments[0] == "verify";
  if (!verify && (arguments[0] != "list" || step.has_value())) return FailUsage(kUsage);
  absl::StatusOr<std::unique_ptr<Storage>> storage = storage::OpenPosixStorage(arguments[1]);
  if (!storage.ok()) return Fail(storage.status());
  return verify ? Verify(options, **storage, job, step) : List(options, **storage, job);
}

}  // namespace dmuond::server::ctl
