#include "server/storage/shared_directory.h"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

constexpr char kPrefix[] = ".dmuond-proof-";
constexpr size_t kDigits = 16;

std::string AnswerName(const std::string& name, scheduler::NodeRank node) {
  return absl::StrCat(name, ".", node.value());
}

absl::Status WriteSmall(Storage& storage, const std::string& path, const std::string& text) {
  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, storage.Create(path));
  absl::Status status = file->Append(std::as_bytes(std::span<const char>(text)));
  // Synced for the others' eyes: a network file system may keep bytes back until then.
  if (status.ok()) status = file->Sync();
  if (status.ok()) status = file->Close();
  return status;
}

absl::StatusOr<std::string> ReadSmall(Storage& storage, const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, storage.Open(path));
  std::string text(std::min<int64_t>(file->size(), kDigits + 1), '\0');
  RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span<char>(text))));
  return text;
}

bool IsProofName(const std::string& name) {
  return absl::StartsWith(name, kPrefix) && name.size() == sizeof(kPrefix) - 1 + kDigits &&
         std::all_of(name.begin() + (sizeof(kPrefix) - 1), name.end(),
                     [](unsigned char c) { return absl::ascii_isxdigit(c); });
}

}  // namespace

absl::StatusOr<DirectoryProof> BeginProof(Storage& storage, uint64_t nonce, uint64_t secret) {
  DirectoryProof proof{.name = absl::StrFormat("%s%016x", kPrefix, nonce),
                       .secret = absl::StrFormat("%016x", secret)};
  if (absl::Status status = WriteSmall(storage, proof.name, proof.secret); !status.ok()) {
    (void)storage.Remove(proof.name);  // what a full disk has taken of it
    return status;
  }
  return proof;
}

absl::Status AnswerProof(Storage& storage, const std::string& name, scheduler::NodeRank node,
                         const std::string& coordinators) {
  if (!IsProofName(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the coordinator's proof of the snapshot directory is called ", Quote(name)));
  }
  absl::StatusOr<std::string> secret = ReadSmall(storage, name);
  if (absl::IsNotFound(secret.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("node ", node.value(), "'s snapshot directory ", storage.Describe(""),
                     " is not node 0's, ", coordinators,
                     ": what node 0 has just written there is not in it. All daemons need one "
                     "directory, that with the job's snapshots"));
  }
  if (!secret.ok()) return secret.status();
  const std::string answer = AnswerName(name, node);
  if (absl::Status status = storage.Remove(answer); !status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  return WriteSmall(storage, answer, *secret);
}

absl::Status CheckAnswer(Storage& storage, const DirectoryProof& proof, scheduler::NodeRank node) {
  const absl::StatusOr<std::string> answer = ReadSmall(storage, AnswerName(proof.name, node));
  if (answer.ok() && *answer == proof.secret) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the snapshot directory ", storage.Describe(""),
                                                    " is not the same on all nodes: no proof from ",
                                                    node.value(),
                                                    answer.ok() ? " (wrote something else)" : ""));
}

void EndProof(Storage& storage, const DirectoryProof& proof, scheduler::NodeRank node) {
  storage.Remove(proof.name).IgnoreError();
  storage.Remove(AnswerName(proof.name, node)).IgnoreError();
}

absl::Status RemoveOldProofs(Storage& storage) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, storage.List(""));
  for (const std::string& name : names) {
    if (!absl::StartsWith(name, kPrefix)) continue;
    absl::Status status = storage.Remove(name);
    if (!status.ok() && !absl::IsNotFound(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::storage
