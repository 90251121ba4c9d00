#include "server/storage/watched_storage.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dmuond::server::storage {

WatchedStorage::Under::Under(WatchedStorage& storage, const char* what, const std::string& path)
    : storage_(storage) {
  std::string text = absl::StrCat(what, " ", storage.Describe(path));
  MutexLock lock(storage_.mutex_);
  storage_.current_ = Operation{++storage_.operations_, std::move(text)};
}

WatchedStorage::Under::~Under() {
  MutexLock lock(storage_.mutex_);
  storage_.current_.reset();
}

std::optional<Operation> WatchedStorage::Current() const {
  MutexLock lock(mutex_);
  return current_;
}

class WatchedWritableFile final : public WritableFile {
 public:
  WatchedWritableFile(WatchedStorage& storage, std::string path, std::unique_ptr<WritableFile> file)
      : storage_(storage), path_(std::move(path)), file_(std::move(file)) {}
  // Without Close(): some file systems bring bytes to their server then, too.
  ~WatchedWritableFile() override {
    const WatchedStorage::Under under(storage_, "close", path_);
    file_.reset();
  }
  WatchedWritableFile(const WatchedWritableFile&) = delete;
  WatchedWritableFile& operator=(const WatchedWritableFile&) = delete;

  absl::Status Append(std::span<const std::byte> data) override {
    const WatchedStorage::Under under(storage_, "write to", path_);
    return file_->Append(data);
  }
  absl::Status Sync() override {
    const WatchedStorage::Under under(storage_, "fsync", path_);
    return file_->Sync();
  }
  absl::Status Close() override {
    const WatchedStorage::Under under(storage_, "close", path_);
    return file_->Close();
  }

 private:
  WatchedStorage& storage_;
  const std::string path_;
  std::unique_ptr<WritableFile> file_;
};

class WatchedReadableFile final : public ReadableFile {
 public:
  WatchedReadableFile(WatchedStorage& storage, std::string path, std::unique_ptr<ReadableFile> file)
      : storage_(storage), path_(std::move(path)), file_(std::move(file)) {}

  [[nodiscard]] int64_t size() const override { return file_->size(); }
  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    const WatchedStorage::Under under(storage_, "read from", path_);
    return file_->ReadAt(offset, out);
  }

 private:
  WatchedStorage& storage_;
  const std::string path_;
  const std::unique_ptr<ReadableFile> file_;
};

absl::StatusOr<std::unique_ptr<WritableFile>> WatchedStorage::Create(const std::string& path) {
  const Under under(*this, "create", path);
  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, storage_.Create(path));
  return std::make_unique<WatchedWritableFile>(*this, path, std::move(file));
}

absl::StatusOr<std::unique_ptr<ReadableFile>> WatchedStorage::Open(const std::string& path) {
  const Under under(*this, "open", path);
  ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, storage_.Open(path));
  return std::make_unique<WatchedReadableFile>(*this, path, std::move(file));
}

absl::Status WatchedStorage::Rename(const std::string& from, const std::string& to) {
  const Under under(*this, "rename to", to);
  return storage_.Rename(from, to);
}

absl::Status WatchedStorage::Remove(const std::string& path) {
  const Under under(*this, "remove", path);
  return storage_.Remove(path);
}

absl::Status WatchedStorage::MakeDirectory(const std::string& path) {
  const Under under(*this, "make directory", path);
  return storage_.MakeDirectory(path);
}

absl::Status WatchedStorage::SyncDirectory(const std::string& path) {
  const Under under(*this, "fsync directory", path);
  return storage_.SyncDirectory(path);
}

absl::Status WatchedStorage::RemoveDirectory(const std::string& path) {
  const Under under(*this, "remove directory", path);
  return storage_.RemoveDirectory(path);
}

absl::StatusOr<std::vector<std::string>> WatchedStorage::List(const std::string& path) {
  const Under under(*this, "list", path);
  return storage_.List(path);
}

}  // namespace dmuond::server::storage
