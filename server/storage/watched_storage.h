// A storage that lets another thread see which operation is under way. An operation that the file
// system never ends (its server is gone, say) holds its own thread for ever.
//
//   WatchedStorage watched(storage);
//   one thread: … WriteNodeFiles(watched, …) …
//   another:    if (auto at = watched.Current()) … at->what …
//
// Operations are small: one part of a file that is written or read, one sync, one rename. So they
// end as long as bytes move at all. Threads: the storage and its files by one at a time, Current()
// by any.
#ifndef DMUOND_SERVER_STORAGE_WATCHED_STORAGE_H_
#define DMUOND_SERVER_STORAGE_WATCHED_STORAGE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

// An operation that has begun and not ended.
struct Operation {
  uint64_t number = 0;  // no two have the same
  std::string what;     // "write to /shared/run7/job/…"
};

class WatchedStorage final : public Storage {
 public:
  // `storage` must outlive it, and it its files.
  explicit WatchedStorage(Storage& storage) : storage_(storage) {}

  [[nodiscard]] std::optional<Operation> Current() const;

  [[nodiscard]] std::string Describe(const std::string& path) const override {
    return storage_.Describe(path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override;

 private:
  friend class WatchedWritableFile;
  friend class WatchedReadableFile;
  // From its construction to its destruction an operation is under way.
  class Under {
   public:
    Under(WatchedStorage& storage, const char* what, const std::string& path);
    ~Under();
    Under(const Under&) = delete;
    Under& operator=(const Under&) = delete;

   private:
    WatchedStorage& storage_;
  };

  Storage& storage_;
  mutable Mutex mutex_;
  uint64_t operations_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::optional<Operation> current_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_WATCHED_STORAGE_H_
