// A shared snapshot directory as others have left it: files that are cut, changed, exchanged, gone
// or somebody else's. What a daemon finds in it to go on from is a snapshot as it was written, or
// nothing is found, by name; and what it clears away is not that.
//
// An input: flags (1: manifests are made anew to vouch for the files as they are), then one thing
// after another that befalls the directory: what, to which entry, two bytes of length, and so many
// bytes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/common/log.h"
#include "server/daemon/group/directory_proof.h"
#include "server/daemon/snapshots/node_snapshot.h"
#include "server/storage/manifest.h"
#include "server/storage/safetensors_header.h"
#include "server/storage/shared_directory.h"
#include "server/storage/trainers_file.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage::testing {
namespace {

constexpr int64_t kSteps = 2;  // each with a snapshot

// Never false; abort() is how a fuzzer hears of it.
void Require(bool condition) {
  if (!condition) std::abort();
}

// What the inputs have led to, all together: a target that no longer gets there tests nothing.
struct Reached {
  int64_t inputs = 0;
  int64_t restored = 0;
  int64_t broken = 0;
  int64_t of_others = 0;  // read, under a manifest that vouches for what is not as it was written

  ~Reached() {
    if (inputs < 300) return;
    std::fprintf(stderr, "restored %ld, broken %ld, of others %ld\n", restored, broken, of_others);
    if (restored == 0 || broken == 0 || of_others == 0) std::abort();
  }
};
Reached reached;

// A matrix and an AdamW tensor, with one iteration of Newton-Schulz: quick to check.
const Job& TheJob() {
  using scheduler::testing::AdamW;
  using scheduler::testing::Muon;
  static const Job* const job = [] {
    v1::SnapshotManifest groups;
    v1::GroupConfig& group = *groups.add_groups();
    group.set_preset("torch");
    group.add_coefficients()->set_a(1.5);
    group.mutable_coefficients(0)->set_b(-0.5);
    const scheduler::testing::World world =
        scheduler::testing::World(2, 1, 1).Replicate(Muon("w", {6, 4})).Replicate(AdamW("b", {5}));
    return new Job(JobOf(kJob, world.Inputs().value(), groups.groups()));
  }();
  return *job;
}

std::optional<std::string> Read(Storage& storage, const std::string& path) {
  const auto file = storage.Open(path);
  if (!file.ok()) return std::nullopt;
  std::string text((*file)->size(), '\0');
  if (!(*file)->ReadAt(0, std::as_writable_bytes(std::span<char>(text))).ok()) return std::nullopt;
  return text;
}
void Write(Storage& storage, const std::string& path, const std::string& text) {
  storage.Remove(path).IgnoreError();
  const auto file = storage.Create(path);
  if (!file.ok()) return;  // a place that cannot be
  Require((*file)->Append(std::as_bytes(std::span<const char>(text))).ok() &&
          (*file)->Sync().ok() && (*file)->Close().ok());
}

// What every input begins with.
struct Snapshots {
  Snapshots() {
    FaultStorage storage(1);
    SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
    for (int64_t step = 1; step <= kSteps; ++step) {
      Require(Save(storage, TheJob(), step).ok());
      const std::string directory = store.PathOf(IdAt(step));
      const std::vector<std::string> names = storage.List(directory).value();
      for (const std::string& name : names) {
        const std::string path = absl::StrCat(directory, "/", name);
        files[path] = storage.Contents(path);
      }
      manifests.push_back(store.Find(scheduler::StepId(step))->manifest);
    }
  }
  std::map<std::string, std::string> files;
  std::vector<v1::SnapshotManifest> manifests;  // by step
};

class Directory {
 public:
  Directory() : storage_(1), store_(SnapshotStore::Create(storage_, kJob).value()) {
    for (int64_t step = 1; step <= kSteps; ++step) Require(store_.Prepare(IdAt(step)).ok());
    for (const auto& [path, contents] : AtFirst().files) {
      Write(storage_, path, contents);
      paths_.push_back(path);
    }
    proof_ = *BeginProof(storage_, 7, 8);
    paths_.push_back(proof_.name);
    paths_.push_back(absl::StrCat(proof_.name, ".0"));
    std::sort(paths_.begin(), paths_.end());
  }

  void Befall(uint8_t what, uint8_t entry, const std::string& bytes) {
    const std::string& path = paths_[entry % paths_.size()];
    const std::string directory = path.substr(0, path.rfind('/'));
    std::string text = Read(storage_, path).value_or("");
    switch (what % 8) {
      case 0:
        return Write(storage_, path, bytes);
      case 1: {  // from a place in it on
        if (bytes.size() < 2 || text.empty()) return;
        const size_t at = NumberIn(bytes) % text.size();
        text.replace(at, std::min(bytes.size() - 2, text.size() - at), bytes, 2,
                     std::min(bytes.size() - 2, text.size() - at));
        return Write(storage_, path, text);
      }
      case 2:
        text.resize(NumberIn(bytes) % (text.size() + 1));
        return Write(storage_, path, text);
      case 3:
        return storage_.Remove(path).IgnoreError();
      case 4:  // in another's place
        if (!bytes.empty()) {
          Write(storage_, paths_[static_cast<uint8_t>(bytes[0]) % paths_.size()], text);
        }
        return;
      case 5:
        return storage_.MakeDirectory(absl::StrCat(kJob, "/", bytes)).IgnoreError();
      case 6:
        return Write(storage_, absl::StrCat(directory, "/", bytes), "somebody else's");
      default: {
        v1::DirectoryProof proof;
        proof.set_name(bytes);
        // Only a file beside the snapshots is ever written.
        const bool answered = AnswerDirectory(&storage_, 0, proof).error().empty();
        Require(!answered || (bytes.find('/') == std::string::npos &&
                              Read(storage_, absl::StrCat(bytes, ".0")).has_value()));
      }
    }
  }

  // New manifests, if they can be made, whose records are those of the files as they are.
  void Vouch() {
    for (int64_t step = 1; step <= kSteps; ++step) {
      v1::SnapshotManifest manifest = AtFirst().manifests[step - 1];
      const std::string directory = store_.PathOf(IdAt(step));
      for (v1::SnapshotFile& record : *manifest.mutable_files()) {
        const auto file = Read(storage_, absl::StrCat(directory, "/", record.name()));
        if (!file.has_value()) continue;
        if (auto made = RecordOf(record.name(), record.kind(), record.owner(), *file)) {
          record = *std::move(made);
        }
      }
      const auto text = EncodeManifest(manifest);
      if (text.ok()) Write(storage_, absl::StrCat(directory, "/manifest.json"), *text);
    }
  }

  void Use(bool vouched) {
    NewestEpoch(storage_).IgnoreError();
    const auto newest = FindRestorable(storage_, kJob);
    const auto newest_of = NewestOf(storage_, kJob);
    if (newest.ok() && newest->has_value()) {
      Require(newest_of.ok() && *newest_of == (*newest)->id);
    }
    for (int64_t step = 1; step <= kSteps; ++step) {
      const auto older = NewestBefore(storage_, kJob, IdAt(step));
      Require(!older.has_value() || *older < IdAt(step));
      const auto found = FindRestorable(storage_, kJob, scheduler::StepId(step));
      if (!found.ok()) {
        ++reached.broken;
        continue;
      }
      const bool as_written =
          found->manifest.SerializeAsString() == AtFirst().manifests[step - 1].SerializeAsString();
      Restore(*found, vouched || !as_written);
    }
    CheckProof();
    ClearAway();
  }

 private:
  static const Snapshots& AtFirst() {
    static const auto* const snapshots = new Snapshots();
    return *snapshots;
  }
  static size_t NumberIn(const std::string& bytes) {
    if (bytes.size() < 2) return 0;
    return static_cast<uint8_t>(bytes[0]) + (size_t{static_cast<uint8_t>(bytes[1])} << 8);
  }
  // What can be read under the manifest that was written is what was written.
  void Restore(const Restorable& found, bool of_others) {
    const absl::Status whole = VerifyWhole(storage_, found, [] { return false; });
    CheckRestorable(found.manifest, TheJob().inputs, found.manifest.groups()).IgnoreError();
    const absl::Status same = RestoreAndCompare(storage_, found.manifest, TheJob());
    if (of_others) {
      reached.of_others += whole.ok() ? 1 : 0;
      return;
    }
    reached.restored += same.ok() ? 1 : 0;
    Require(!absl::IsInternal(same));  // read, and another state
    Require(!whole.ok() || same.ok());
  }
  void CheckProof() {
    const scheduler::NodeRank node(0);
    const auto answer = Read(storage_, absl::StrCat(proof_.name, ".0"));
    Require(CheckAnswer(storage_, proof_, node).ok() == (answer == proof_.secret));
    EndProof(storage_, proof_, node);
    RemoveOldProofs(storage_).IgnoreError();
  }
  // The newest that counts stays; of those that do not, none begins to.
  void ClearAway() {
    const auto before = store_.Newest();
    std::vector<absl::Status> warnings;
    store_.Retain(1).IgnoreError();
    store_.RemoveLeftovers(scheduler::Attempt(UINT64_MAX)).IgnoreError();
    const auto after = store_.Newest();
    if (before.ok() && before->has_value()) {
      Require(after.ok() && after->has_value() && (*after)->id == (*before)->id);
      Require(store_.SetAsideAfter({scheduler::Attempt(0), scheduler::StepId(0)}).ok());
      Require(!store_.Newest()->has_value());
    }
  }

  FaultStorage storage_;
  SnapshotStore store_;
  std::vector<std::string> paths_;  // of what is there at first
  DirectoryProof proof_;
};

void Run(const std::string& input) {
  ++reached.inputs;
  if (input.empty()) return;
  Directory directory;
  for (size_t at = 1; at + 4 <= input.size();) {
    const size_t length =
        static_cast<uint8_t>(input[at + 2]) + (size_t{static_cast<uint8_t>(input[at + 3])} << 8);
    directory.Befall(input[at], input[at + 1], input.substr(at + 4, length));
    at += 4 + length;
  }
  const bool vouched = (input[0] & 1) != 0;
  if (vouched) directory.Vouch();
  directory.Use(vouched);
}

}  // namespace
}  // namespace dmuond::server::storage::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace log = dmuond::server::log;
  static const log::Level before = log::SetLevel(log::Level::kError);
  (void)before;
  dmuond::server::storage::testing::Run(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
