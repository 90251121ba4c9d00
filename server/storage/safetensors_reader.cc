#include "server/storage/safetensors_reader.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/storage/checksum.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

// Large enough for a disk to be busy, small enough to stay in the cache until it is copied on.
constexpr size_t kReadBytes = size_t{1} << 18;

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(
    Storage& storage, const std::string& path, const FileSummary& expected) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader);
  reader->name_ = storage.Describe(path);
  reader->expected_ = expected;
  const auto lost = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat(reader->name_, ": ", what));
  };
  ASSIGN_OR_RETURN(reader->file_, storage.Open(path));
  const int64_t size = reader->file_->size();
  if (size != expected.bytes) {
    return lost(absl::StrCat("has ", size, " bytes, the manifest says ", expected.bytes));
  }
  if (expected.header_bytes < kLengthBytes || expected.header_bytes > size ||
      expected.header_bytes > kHeaderJsonBytesMax + kLengthBytes) {
    return lost(absl::StrCat("cannot have a header of ", expected.header_bytes, " bytes"));
  }
  std::vector<std::byte> bytes(expected.header_bytes);
  RETURN_IF_ERROR(reader->file_->ReadAt(0, bytes));
  if (std::string checksum = ChecksumOf(bytes); checksum != expected.header_checksum) {
    return lost(absl::StrCat("header has the checksum ", checksum, ", the manifest says ",
                             expected.header_checksum));
  }
  const std::span<const std::byte> header(bytes);
  absl::StatusOr<int64_t> json_bytes = JsonBytes(header.first<kLengthBytes>(), size);
  if (!json_bytes.ok()) return lost(std::string(json_bytes.status().message()));
  if (*json_bytes != expected.header_bytes - kLengthBytes) {
    return lost(absl::StrCat("header has ", *json_bytes + kLengthBytes,
                             " bytes, the manifest says ", expected.header_bytes));
  }
  absl::StatusOr<SafetensorsHeader> parsed =
      ParseHeader(header.subspan(kLengthBytes), size - expected.header_bytes);
  if (!parsed.ok()) return lost(std::string(parsed.status().message()));
  reader->header_ = *std::move(parsed);
  if (reader->header_.tensors.size() != expected.tensor_checksums.size()) {
    return lost(absl::StrCat("has ", reader->header_.tensors.size(), " tensors, the manifest says ",
                             expected.tensor_checksums.size()));
  }
  return reader;
}

absl::Status SafetensorsReader::ReadTensor(
    size_t tensor, absl::FunctionRef<void(int64_t offset, std::span<const std::byte> data)> take) {
  const TensorInfo& info = header_.tensors[tensor];
  const auto bytes = static_cast<size_t>(info.end - info.begin);
  buffer_.resize(std::max(buffer_.size(), std::min(bytes, kReadBytes)));
  Checksum checksum;
  for (size_t at = 0; at < bytes;) {
    const std::span<std::byte> part = std::span(buffer_).first(std::min(kReadBytes, bytes - at));
    const int64_t offset = expected_.header_bytes + info.begin + static_cast<int64_t>(at);
    RETURN_IF_ERROR(file_->ReadAt(offset, part));
    checksum.Add(part);
    take(static_cast<int64_t>(at), part);
    at += part.size();
  }
  if (const std::string found = checksum.Hex(); found != expected_.tensor_checksums[tensor]) {
    return absl::DataLossError(absl::StrCat(name_, ": tensor ", Quote(info.name),
                                            " has the checksum ", found, ", the manifest says ",
                                            expected_.tensor_checksums[tensor]));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> SafetensorsReader::ReadTensor(size_t tensor) {
  const TensorInfo& info = header_.tensors[tensor];
  std::vector<std::byte> all;
  all.reserve(info.end - info.begin);
  RETURN_IF_ERROR(ReadTensor(tensor, [&](int64_t /*offset*/, std::span<const std::byte> data) {
    all.insert(all.end(), data.begin(), data.end());
  }));
  return all;
}

}  // namespace dmuond::server::storage
