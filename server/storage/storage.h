// The seam between snapshots and a file system, from which every test of faults comes. Paths are
// relative to the storage's root, with '/' between their parts; they are made by this folder, never
// taken from a file.
//
// Durability is as POSIX has it: a file's bytes survive a crash after its Sync(), its name after
// SyncDirectory() of the directory that holds it. After an error of Sync() nothing is known of the
// file: it is removed and written anew, never synced again.
//
// Errors name the path. NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED (no space, quota),
// PERMISSION_DENIED; UNAVAILABLE for everything else that the file system says.
// Threads: a Storage may be used by several at once, a file by one at a time.
#ifndef DMUOND_SERVER_STORAGE_STORAGE_H_
#define DMUOND_SERVER_STORAGE_STORAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dmuond::server::storage {

// A new file, written from its beginning to its end. Closed, and neither synced nor removed, when
// its owner goes.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual absl::Status Append(std::span<const std::byte> data) = 0;
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  // As it was when the file was opened.
  [[nodiscard]] virtual int64_t size() const = 0;
  // Fills `out`. OUT_OF_RANGE naming both values where the file ends before.
  virtual absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const = 0;
};

class Storage {
 public:
  virtual ~Storage() = default;

  // For messages: "/shared/run7/job/…".
  [[nodiscard]] virtual std::string Describe(const std::string& path) const = 0;

  // ALREADY_EXISTS where there is such a name. Readable by owner and group.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // A regular file; symbolic links are not followed.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) = 0;
  // Replaces what has the new name, at once for whoever looks.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;

  // OK where it is there already. Its parent is.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // Makes the names in it durable. "" is the root.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;
  // Names in it, ascending.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;
};

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_STORAGE_H_
