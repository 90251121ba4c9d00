// Reads a safetensors file and proves each tensor that it hands out by its checksum.
// Threads: one at a time.
#ifndef DMUOND_SERVER_STORAGE_SAFETENSORS_READER_H_
#define DMUOND_SERVER_STORAGE_SAFETENSORS_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/storage/safetensors_header.h"
#include "server/storage/safetensors_writer.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

class SafetensorsReader {
 public:
  // Opens a file that must be as `expected` says. DATA_LOSS naming the file and both values: other
  // size, other header, another number of tensors. `storage` must outlive the reader.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(Storage& storage,
                                                                 const std::string& path,
                                                                 const FileSummary& expected);

  [[nodiscard]] const SafetensorsHeader& header() const { return header_; }
  [[nodiscard]] const std::string& name() const { return name_; }  // for messages

  // Hands the tensor's bytes over in parts of whole elements, in order, `offset` from its first
  // byte; memory is the reader's until the next call. Whatever was handed over counts only if OK
  // comes back: the checksum is known at the end. DATA_LOSS naming file and tensor where it
  // differs.
  absl::Status ReadTensor(
      size_t tensor, absl::FunctionRef<void(int64_t offset, std::span<const std::byte> data)> take);
  // The whole of a small one.
  absl::StatusOr<std::vector<std::byte>> ReadTensor(size_t tensor);

 private:
  SafetensorsReader() = default;

  std::string name_;
  std::unique_ptr<ReadableFile> file_;
  SafetensorsHeader header_;
  FileSummary expected_;
  std::vector<std::byte> buffer_;
};

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SAFETENSORS_READER_H_
