// The record of the node's job (scheduler/job/job_record.h) in a memfd. That outlives the process
// if another one holds its descriptor, too. A write makes no system call unless the file grows.
//
//   offset 0    what the file is
//          64   two roots of 64 bytes, written in turn: the number of the write, and where its
//               table lies
//          256  parts, and tables that say where the parts lie
//
// A write lays changed parts and its table where the last write has nothing; then it writes its
// root over the older root. Roots, tables and parts have checksums. So if the writer ends in the
// middle of a write, the write before can be read.
//
//   absl::Status written = file.Write(job);
//   … in the successor: absl::StatusOr<std::string> bytes = ReadRecord(fd);
//
// The file does not shrink; writes of one size do not make it grow.
//
// Threads: one at a time. A reader reads when the writer has ended.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_RECORD_FILE_H_
#define DMUOND_SERVER_DAEMON_MEMORY_RECORD_FILE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "scheduler/job/job_record.h"
#include "scheduler/job/node_job.h"

namespace dmuond::server {

// A rank's trainer state has 1 MiB at most, twice in the middle of a step; registrations and plan
// inputs of the largest jobs have some 100 MiB. A larger record is a mistake.
inline constexpr uint64_t kRecordBytesMax = uint64_t{4} << 30;

class RecordFile {
 public:
  explicit RecordFile(uint64_t bytes_max = kRecordBytesMax) : bytes_max_(bytes_max) {}
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  // Writes the record as these parts, ascending, and no others. `serialise` gives the bytes of
  // those that the last write did not have. RESOURCE_EXHAUSTED, or another error, if there is no
  // memory for it: the file then says that there is no record, until a write succeeds.
  absl::Status Write(
      const std::vector<scheduler::RecordPart>& parts,
      absl::FunctionRef<void(const scheduler::RecordPart& part, std::string& bytes)> serialise);
  // Writes the record of this job.
  absl::Status Write(const scheduler::NodeJob& job);
  // -1: nothing was written yet.
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] uint64_t size() const { return size_; }

 private:
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;  // rounded up
  };
  struct Part {
    scheduler::RecordPart name;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t checksum = 0;
  };

  absl::Status WriteParts(
      const std::vector<scheduler::RecordPart>& parts,
      absl::FunctionRef<void(const scheduler::RecordPart& part, std::string& bytes)> serialise);
  absl::Status Create();
  absl::Status Grow(uint64_t bytes);
  // Lays the bytes where nothing else lies, and returns where.
  absl::StatusOr<uint64_t> Lay(absl::string_view bytes);
  void Free(uint64_t offset);
  void WriteRoot(uint64_t table, uint64_t checksum);
  // There is no record.
  void Forget();

  const uint64_t bytes_max_;
  wire::UniqueFd fd_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  std::vector<Extent> used_;  // by the last write and by the present one; ascending
  std::vector<Part> parts_;   // of the last write, ascending
  uint64_t table_ = 0;        // of the last write; 0: there is none
  uint64_t writes_ = 0;
  // Buffers of a write, kept so that writes allocate nothing.
  std::vector<Part> next_;
  std::vector<uint64_t> dropped_;
  std::string scratch_;
};

// The bytes of all parts, one after the other. NOT_FOUND: the file says that there is no record.
// DATA_LOSS: it is no such file, or no writer can have left it so.
[[nodiscard]] absl::StatusOr<std::string> ReadRecord(int fd);
// The same of a file's contents.
[[nodiscard]] absl::StatusOr<std::string> RecordIn(absl::string_view file);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_RECORD_FILE_H_
