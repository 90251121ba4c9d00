#include "server/storage/manifest.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "google/protobuf/util/json_util.h"
#include "server/storage/checksum.h"
#include "server/storage/layout_check.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

// How a manifest begins, up to its checksum.
constexpr char kOpening[] = "{\n \"checksum\": \"";
constexpr size_t kChecksumAt = sizeof(kOpening) - 1;

template <typename... Words>
absl::Status Refuse(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat("manifest: ", words...));
}

bool HasPlaceForChecksum(const std::string& text) {
  return text.rfind(kOpening, 0) == 0 && text.size() > kChecksumAt + kChecksumDigits &&
         text[kChecksumAt + kChecksumDigits] == '"';
}

std::string ChecksumOfManifest(std::string text) {
  text.replace(kChecksumAt, kChecksumDigits, kChecksumDigits, '0');
  return ChecksumOf(text);
}

absl::Status CheckFile(const v1::SnapshotFile& file) {
  const std::string expected = file.kind() == v1::SnapshotFile::KIND_STATE
                                   ? StateFileName(scheduler::LaneId(file.owner()))
                                   : TrainersFileName(scheduler::NodeRank(file.owner()));
  if (file.kind() != v1::SnapshotFile::KIND_STATE &&
      file.kind() != v1::SnapshotFile::KIND_TRAINERS) {
    return Refuse("file ", Quote(file.name()), " is of the unknown kind ", file.kind());
  }
  if (file.owner() < 0 || !IsFileName(file.name()) || file.name() != expected) {
    return Refuse("file ", Quote(file.name()), " of owner ", file.owner(), " must be called ",
                  expected);
  }
  if (file.header_bytes() < kLengthBytes ||
      file.header_bytes() > kHeaderJsonBytesMax + kLengthBytes ||
      file.bytes() < file.header_bytes()) {
    return Refuse("file ", file.name(), " of ", file.bytes(), " bytes with a header of ",
                  file.header_bytes());
  }
  if (!IsChecksum(file.header_checksum())) {
    return Refuse("file ", file.name(), " has the header_checksum ", Quote(file.header_checksum()));
  }
  for (const std::string& checksum : file.tensor_checksums()) {
    if (!IsChecksum(checksum)) {
      return Refuse("file ", file.name(), " has the tensor checksum ", Quote(checksum));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFiles(const v1::SnapshotManifest& manifest) {
  std::set<std::string> names;
  int64_t lanes = 0;
  const int64_t lanes_expected =
      int64_t{manifest.plan().nodes()} * manifest.plan().lanes_per_node();
  for (const v1::SnapshotFile& file : manifest.files()) {
    RETURN_IF_ERROR(CheckFile(file));
    if (!names.insert(file.name()).second) return Refuse("file ", file.name(), " is there twice");
    if (file.kind() != v1::SnapshotFile::KIND_STATE) continue;
    ++lanes;
    if (file.owner() >= lanes_expected) {
      return Refuse("file ", file.name(), " is of lane ", file.owner(), " of ", lanes_expected);
    }
  }
  if (lanes == lanes_expected) return absl::OkStatus();
  for (int32_t lane = 0; lane < lanes_expected; ++lane) {
    const std::string name = StateFileName(scheduler::LaneId(lane));
    if (!names.contains(name)) return Refuse("file ", name, " is missing");
  }
  return absl::OkStatus();
}

}  // namespace

SnapshotId IdOf(const v1::SnapshotManifest& manifest) {
  return {scheduler::Attempt(manifest.attempt()), scheduler::StepId(manifest.step())};
}

int64_t BytesOf(const v1::SnapshotManifest& manifest) {
  int64_t bytes = 0;
  for (const v1::SnapshotFile& file : manifest.files()) bytes += file.bytes();
  return bytes;
}

std::optional<double> TookSeconds(const v1::SnapshotManifest& manifest) {
  if (!manifest.has_took()) return std::nullopt;
  return static_cast<double>(manifest.took().seconds()) + 1e-9 * manifest.took().nanos();
}

v1::SnapshotFile ToRecord(std::string name, v1::SnapshotFile::Kind kind, int32_t owner,
                          const FileSummary& summary) {
  v1::SnapshotFile file;
  file.set_name(std::move(name));
  file.set_kind(kind);
  file.set_owner(owner);
  file.set_bytes(summary.bytes);
  file.set_header_bytes(summary.header_bytes);
  file.set_header_checksum(summary.header_checksum);
  for (const std::string& checksum : summary.tensor_checksums) file.add_tensor_checksums(checksum);
  return file;
}

FileSummary SummaryOf(const v1::SnapshotFile& file) {
  return {.bytes = file.bytes(),
          .header_bytes = file.header_bytes(),
          .header_checksum = file.header_checksum(),
          .tensor_checksums = {file.tensor_checksums().begin(), file.tensor_checksums().end()}};
}

absl::Status CheckManifest(const v1::SnapshotManifest& manifest) {
  if (absl::Status status = CheckJobName(manifest.job()); !status.ok()) {
    return Refuse(std::string(status.message()));
  }
  if (manifest.step() < 0) return Refuse("step ", manifest.step());
  if (manifest.attempt() == 0) return Refuse("attempt 0");
  if (manifest.world_size() < 1 || manifest.world_size() > scheduler::kWorldMax) {
    return Refuse("world_size ", manifest.world_size());
  }
  const v1::SnapshotPlan& plan = manifest.plan();
  if (plan.nodes() < 1 || plan.lanes_per_node() < 1 ||
      int64_t{plan.nodes()} * plan.lanes_per_node() > scheduler::kLanesMax) {
    return Refuse("plan of ", plan.nodes(), " nodes of ", plan.lanes_per_node(), " lanes");
  }
  RETURN_IF_ERROR(CheckFiles(manifest));
  absl::StatusOr<JobLayout> layout = LayoutOf(manifest);
  if (!layout.ok()) return Refuse(std::string(layout.status().message()));
  if (const std::string hash = LayoutHash(*layout); hash != manifest.layout_hash()) {
    return Refuse("layout_hash ", Quote(manifest.layout_hash()), "; its parameters' is ", hash);
  }
  return absl::OkStatus();
}

absl::Status SealManifest(std::string& text) {
  if (!HasPlaceForChecksum(text)) {
    return absl::InvalidArgumentError("manifest: does not begin with its checksum");
  }
  text.replace(kChecksumAt, kChecksumDigits, ChecksumOfManifest(text));
  return absl::OkStatus();
}

absl::StatusOr<std::string> EncodeManifest(v1::SnapshotManifest manifest) {
  manifest.set_format(kManifestFormat);
  manifest.set_checksum(std::string(kChecksumDigits, '0'));
  RETURN_IF_ERROR(CheckManifest(manifest));
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  if (auto status = google::protobuf::util::MessageToJsonString(manifest, &text, options);
      !status.ok()) {
    return Refuse(std::string(status.message()));
  }
  if (static_cast<int64_t>(text.size()) > kManifestBytesMax) {
    return absl::ResourceExhaustedError(absl::StrCat("manifest: ", text.size(), " bytes; at most ",
                                                     kManifestBytesMax, " are possible"));
  }
  RETURN_IF_ERROR(SealManifest(text));
  return text;
}

absl::StatusOr<v1::SnapshotManifest> ParseManifest(const std::string& text) {
  const auto lost = [](const std::string& what) {
    return absl::DataLossError(absl::StrCat("manifest: ", what));
  };
  if (!HasPlaceForChecksum(text)) return lost("does not begin with its checksum");
  const std::string said = text.substr(kChecksumAt, kChecksumDigits);
  if (const std::string found = ChecksumOfManifest(text); said != found) {
    return lost(absl::StrCat("has the checksum ", found, ", it says ", Quote(said)));
  }
  v1::SnapshotManifest manifest;
  google::protobuf::util::JsonParseOptions options;
  // A newer format may have more fields; its number decides whether it can be read.
  options.ignore_unknown_fields = true;
  if (auto status = google::protobuf::util::JsonStringToMessage(text, &manifest, options);
      !status.ok()) {
    return lost(std::string(status.message()));
  }
  if (manifest.format() != kManifestFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("manifest: of format ", manifest.format(), " (dmuond ", manifest.version(),
                     "), this build reads format ", kManifestFormat));
  }
  if (absl::Status status = CheckManifest(manifest); !status.ok()) {
    return absl::DataLossError(status.message());
  }
  return manifest;
}

}  // namespace dmuond::server::storage
