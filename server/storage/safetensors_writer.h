// Writes a safetensors file. The tensors' sizes are given first; their bytes follow in order and
// are not kept in memory. Each tensor's checksum is computed on the way.
//
//   auto writer = SafetensorsWriter::Create(storage, "job/step/lane.tmp", metadata, tensors);
//   for (…) writer->Append(bytes);
//   absl::StatusOr<FileSummary> summary = writer->Finish();   // synced; not yet renamed
//
// A file that is not finished is removed when its writer goes, as far as the storage lets it.
// Threads: one at a time.
#ifndef DMUOND_SERVER_STORAGE_SAFETENSORS_WRITER_H_
#define DMUOND_SERVER_STORAGE_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/storage/checksum.h"
#include "server/storage/safetensors_header.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

struct FileSummary {
  int64_t bytes = 0;
  int64_t header_bytes = 0;  // where data begins
  std::string header_checksum;
  std::vector<std::string> tensor_checksums;  // in order of the tensors
};

class SafetensorsWriter {
 public:
  // Creates the file and writes its header. `tensors` need name, type and shape. Errors as of
  // PlaceTensors(), EncodeHeader() and the storage's.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      Storage& storage, std::string path, std::map<std::string, std::string> metadata,
      std::vector<TensorInfo> tensors);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes, of one tensor or of several. OUT_OF_RANGE where they are more than are left.
  // After an error every further call fails.
  absl::Status Append(std::span<const std::byte> data);

  // Syncs and closes. FAILED_PRECONDITION naming the tensor whose bytes are missing.
  absl::StatusOr<FileSummary> Finish();

  [[nodiscard]] const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // The tensor that the next byte belongs to; tensors().size(): all have theirs.
  [[nodiscard]] size_t next_tensor() const { return summary_.tensor_checksums.size(); }

 private:
  SafetensorsWriter(Storage& storage, std::string path, std::vector<TensorInfo> tensors)
      : storage_(storage), path_(std::move(path)), tensors_(std::move(tensors)) {}
  void CompleteTensors();

  Storage& storage_;
  const std::string path_;
  const std::vector<TensorInfo> tensors_;
  std::unique_ptr<WritableFile> file_;
  absl::Status failed_;
  int64_t at_ = 0;  // bytes of data written
  Checksum checksum_;
  FileSummary summary_;
  bool finished_ = false;
};

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SAFETENSORS_WRITER_H_
