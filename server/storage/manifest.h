// manifest.json: a SnapshotManifest in protobuf's JSON, with a checksum of its own text. Pure.
#ifndef DMUOND_SERVER_STORAGE_MANIFEST_H_
#define DMUOND_SERVER_STORAGE_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "server/storage/safetensors_writer.h"
#include "server/storage/snapshot_name.h"

namespace dmuond::server::storage {

inline constexpr int32_t kManifestFormat = 1;
// Some 100 bytes for each tensor and parameter: millions of them.
inline constexpr int64_t kManifestBytesMax = int64_t{512} << 20;

[[nodiscard]] SnapshotId IdOf(const v1::SnapshotManifest& manifest);
// Of all files.
[[nodiscard]] int64_t BytesOf(const v1::SnapshotManifest& manifest);
// How long the snapshot took to write; nullopt: the manifest does not say.
[[nodiscard]] std::optional<double> TookSeconds(const v1::SnapshotManifest& manifest);

// The record of a file that a writer has finished, and back.
[[nodiscard]] v1::SnapshotFile ToRecord(std::string name, v1::SnapshotFile::Kind kind,
                                        int32_t owner, const FileSummary& summary);
[[nodiscard]] FileSummary SummaryOf(const v1::SnapshotFile& file);

// What a manifest must be, whoever made it: INVALID_ARGUMENT naming the field and its value.
// Numbers in range, files named and numbered uniquely, a state file for each lane, checksums
// well-formed, parameters valid, the layout hash that of the parameters.
[[nodiscard]] absl::Status CheckManifest(const v1::SnapshotManifest& manifest);

// Checks, fills in format and checksum, and writes it down.
absl::StatusOr<std::string> EncodeManifest(v1::SnapshotManifest manifest);

// DATA_LOSS: the checksum is not the text's, or what it says is no manifest.
// FAILED_PRECONDITION: of a newer format; both are named.
absl::StatusOr<v1::SnapshotManifest> ParseManifest(const std::string& text);

// Puts the right checksum into a text that has a place for one. For tests and tools that change
// manifests.
absl::Status SealManifest(std::string& text);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_MANIFEST_H_
