#include "server/storage/safetensors_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

// Checksum and write take turns on parts that stay in the cache between them.
constexpr size_t kWriteBytes = size_t{1} << 18;

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    Storage& storage, std::string path, std::map<std::string, std::string> metadata,
    std::vector<TensorInfo> tensors) {
  RETURN_IF_ERROR(PlaceTensors(tensors));
  SafetensorsHeader header{.metadata = std::move(metadata), .tensors = std::move(tensors)};
  ASSIGN_OR_RETURN(std::string text, EncodeHeader(header));

  std::unique_ptr<SafetensorsWriter> writer(
      new SafetensorsWriter(storage, std::move(path), std::move(header.tensors)));
  absl::StatusOr<std::unique_ptr<WritableFile>> file = storage.Create(writer->path_);
  if (!file.ok()) {
    writer->finished_ = true;  // nothing to remove
    return file.status();
  }
  writer->file_ = *std::move(file);
  const std::span<const std::byte> bytes = std::as_bytes(std::span<const char>(text));
  RETURN_IF_ERROR(writer->file_->Append(bytes));
  writer->summary_.header_bytes = static_cast<int64_t>(bytes.size());
  writer->summary_.header_checksum = ChecksumOf(bytes);
  writer->CompleteTensors();
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (finished_) return;
  file_.reset();
  // What stays behind has a temporary name, and is found and removed later.
  storage_.Remove(path_).IgnoreError();
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> data) {
  if (!failed_.ok()) return failed_;
  while (!data.empty()) {
    if (next_tensor() == tensors_.size()) {
      return failed_ = absl::OutOfRangeError(absl::StrCat(
                 storage_.Describe(path_), ": ", data.size(), " bytes more than its tensors have"));
    }
    const int64_t left = tensors_[next_tensor()].end - at_;
    const auto part = data.first(std::min({data.size(), static_cast<size_t>(left), kWriteBytes}));
    checksum_.Add(part);
    if (failed_ = file_->Append(part); !failed_.ok()) return failed_;
    at_ += static_cast<int64_t>(part.size());
    data = data.subspan(part.size());
    CompleteTensors();
  }
  return absl::OkStatus();
}

absl::StatusOr<FileSummary> SafetensorsWriter::Finish() {
  if (!failed_.ok()) return failed_;
  if (next_tensor() < tensors_.size()) {
    const TensorInfo& tensor = tensors_[next_tensor()];
    return failed_ = absl::FailedPreconditionError(
               absl::StrCat(storage_.Describe(path_), ": tensor ", Quote(tensor.name), " has ",
                            at_ - tensor.begin, " of its ", tensor.end - tensor.begin, " bytes"));
  }
  if (failed_ = file_->Sync(); !failed_.ok()) return failed_;
  if (failed_ = file_->Close(); !failed_.ok()) return failed_;
  finished_ = true;
  summary_.bytes = summary_.header_bytes + at_;
  return summary_;
}

void SafetensorsWriter::CompleteTensors() {
  while (next_tensor() < tensors_.size() && tensors_[next_tensor()].end == at_) {
    summary_.tensor_checksums.push_back(checksum_.Hex());
    checksum_.Reset();
  }
}

}  // namespace dmuond::server::storage
