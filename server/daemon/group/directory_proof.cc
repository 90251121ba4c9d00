#include "server/daemon/group/directory_proof.h"

#include <sys/random.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"
#include "server/storage/shared_directory.h"

namespace dmuond::server {
namespace {

// Less than the silence after which the member gives the stream up.
constexpr std::chrono::seconds kShownWithin{3};
constexpr std::chrono::milliseconds kBetweenLooks{50};

uint64_t RandomNumber() {
  uint64_t number = 0;
  while (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
  }
  return number;
}

absl::Status Differs(const std::string& what) {
  return Error(absl::StatusCode::kFailedPrecondition, "SNAPSHOT_DIR_DIFFERS", what);
}

}  // namespace

absl::Status ProveDirectory(
    storage::Storage* storage, const v1::JoinRequest& join,
    const std::function<std::optional<v1::DirectoryAnswer>(const v1::DirectoryProof&)>& ask) {
  const scheduler::NodeRank node(join.node());
  if (join.snapshots() != (storage != nullptr)) {
    return Differs(absl::StrCat("node ", node.value(), " has ", join.snapshots() ? "a" : "no",
                                " --snapshot_dir, and node 0 has ",
                                storage != nullptr ? "one" : "none"));
  }
  if (storage == nullptr) return absl::OkStatus();
  absl::StatusOr<storage::DirectoryProof> proof =
      storage::BeginProof(*storage, RandomNumber(), RandomNumber());
  if (!proof.ok()) return proof.status();
  v1::DirectoryProof question;
  question.set_name(proof->name);
  question.set_directory(storage->Describe(""));
  const std::optional<v1::DirectoryAnswer> answer = ask(question);
  absl::Status shown;
  if (!answer.has_value()) {
    shown = absl::UnavailableError(absl::StrCat("node ", node.value(), " went while it joined"));
  } else if (!answer->error().empty()) {
    shown = Differs(answer->error());
  } else {
    // A network file system may show a new file late.
    const auto deadline = std::chrono::steady_clock::now() + kShownWithin;
    shown = storage::CheckAnswer(*storage, *proof, node);
    while (!shown.ok() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kBetweenLooks);
      shown = storage::CheckAnswer(*storage, *proof, node);
    }
    if (!shown.ok()) shown = Differs(std::string(shown.message()));
  }
  storage::EndProof(*storage, *proof, node);
  return shown;
}

v1::DirectoryAnswer AnswerDirectory(storage::Storage* storage, int32_t node,
                                    const v1::DirectoryProof& proof) {
  v1::DirectoryAnswer answer;
  if (storage == nullptr) {
    answer.set_error(absl::StrCat("node ", node, " has no --snapshot_dir"));
    return answer;
  }
  const auto deadline = std::chrono::steady_clock::now() + kShownWithin;
  const auto look = [&] {
    return storage::AnswerProof(*storage, proof.name(), scheduler::NodeRank(node),
                                proof.directory());
  };
  absl::Status found = look();
  while (absl::IsFailedPrecondition(found) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenLooks);
    found = look();
  }
  if (!found.ok()) answer.set_error(std::string(found.message()));
  return answer;
}

}  // namespace dmuond::server
