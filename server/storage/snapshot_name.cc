#include "server/storage/snapshot_name.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

constexpr size_t kJobNameMax = 128;

uint32_t CounterOf(scheduler::Attempt attempt) { return static_cast<uint32_t>(attempt.value()); }

}  // namespace

std::string DirectoryName(const SnapshotId& id) {
  return absl::StrFormat("step-%012d.%u.%u", id.step.value(),
                         scheduler::EpochOf(id.attempt).value(), CounterOf(id.attempt));
}

std::optional<SnapshotId> ParseDirectoryName(const std::string& name) {
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, "step-")) return std::nullopt;
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, '.');
  int64_t step = 0;
  uint32_t epoch = 0;
  uint32_t counter = 0;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &step) ||
      !absl::SimpleAtoi(parts[1], &epoch) || !absl::SimpleAtoi(parts[2], &counter) || step < 0) {
    return std::nullopt;
  }
  const SnapshotId id{scheduler::MakeAttempt(scheduler::GroupEpoch(epoch), counter),
                      scheduler::StepId(step)};
  if (DirectoryName(id) != name) return std::nullopt;  // one spelling only
  return id;
}

std::string ToString(const SnapshotId& id) {
  return absl::StrCat("step ", id.step.value(), " (attempt ",
                      scheduler::EpochOf(id.attempt).value(), ".", CounterOf(id.attempt), ")");
}

std::string StateFileName(scheduler::LaneId lane) {
  return absl::StrFormat("lane-%05d.safetensors", lane.value());
}
std::string TrainersFileName(scheduler::NodeRank node) {
  return absl::StrFormat("trainers-%05d.safetensors", node.value());
}

bool IsFileName(const std::string& name) {
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, "lane-") && !absl::ConsumePrefix(&rest, "trainers-")) {
    return false;
  }
  if (!absl::ConsumeSuffix(&rest, ".safetensors")) return false;
  return rest.size() >= 5 && rest.size() <= 10 &&
         std::all_of(rest.begin(), rest.end(),
                     [](unsigned char c) { return absl::ascii_isdigit(c); });
}

absl::Status CheckJobName(const std::string& job) {
  const bool known = std::all_of(job.begin(), job.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
  if (known && !job.empty() && job.size() <= kJobNameMax && job[0] != '.') return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("job ", Quote(job),
                   " cannot have snapshots: a name is 1 to 128 of A-Z a-z 0-9 . _ - and does not "
                   "begin with a dot"));
}

}  // namespace dmuond::server::storage
