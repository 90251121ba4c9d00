#include "server/storage/posix_storage.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace dmuond::server::storage {
namespace {

constexpr char kBringItBack[] =
    "Bring it back, and do not end the daemon before: all that is newer than the last snapshot is "
    "in its memory alone";

using wire::UniqueFd;

// Written bytes are handed to the disk in parts of this size while more are coming, so that the
// final fsync waits for the last of them only.
constexpr int64_t kWriteBehindBytes = int64_t{16} << 20;
// Linux writes at most 2 GiB in one call; less keeps a dying process's last call short.
constexpr size_t kCallBytesMax = size_t{64} << 20;

absl::Status Failed(const char* what, const std::string& path, int error) {
  const std::string message = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// Of an open file, or one that is opened: a file server says ESTALE where somebody else has removed
// it. Of a directory it says so of one that it exports no more, too, which is not taken for an
// empty one.
absl::Status FileFailed(const char* what, const std::string& path, int error) {
  return Failed(what, path, error == ESTALE ? ENOENT : error);
}

class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Append(std::span<const std::byte> data) override {
    while (!data.empty()) {
      if (const int error = fault::FaultPoint("storage.write")) {
        return Failed("write to", path_, error);
      }
      const ssize_t n = ::write(fd_.get(), data.data(), std::min(data.size(), kCallBytesMax));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Failed("write to", path_, errno);
      data = data.subspan(n);
      written_ += n;
      WriteBehind();
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (const int error = fault::FaultPoint("storage.fsync")) return Failed("fsync", path_, error);
    return ::fsync(fd_.get()) == 0 ? absl::OkStatus() : Failed("fsync", path_, errno);
  }

  absl::Status Close() override {
    return ::close(fd_.Release()) == 0 ? absl::OkStatus() : Failed("close", path_, errno);
  }

 private:
  // Only a hint: an error shows in fsync, which counts.
  void WriteBehind() {
    if (written_ - handed_over_ < kWriteBehindBytes) return;
    (void)::sync_file_range(fd_.get(), handed_over_, written_ - handed_over_,
                            SYNC_FILE_RANGE_WRITE);
    handed_over_ = written_;
  }

  UniqueFd fd_;
  std::string path_;
  int64_t written_ = 0;
  int64_t handed_over_ = 0;
};

class PosixReadableFile : public ReadableFile {
 public:
  PosixReadableFile(UniqueFd fd, std::string path, int64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}

  [[nodiscard]] int64_t size() const override { return size_; }

  absl::Status ReadAt(int64_t offset, std::span<std::byte> out) const override {
    while (!out.empty()) {
      if (const int error = fault::FaultPoint("storage.read")) {
        return FileFailed("read from", path_, error);
      }
      const ssize_t n = ::pread(fd_.get(), out.data(), std::min(out.size(), kCallBytesMax), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return FileFailed("read from", path_, errno);
      if (n == 0) {
        return absl::OutOfRangeError(absl::StrCat("read from ", path_, ": it ends at byte ", offset,
                                                  ", ", out.size(), " more are wanted"));
      }
      out = out.subspan(n);
      offset += n;
    }
    return absl::OkStatus();
  }

 private:
  UniqueFd fd_;
  std::string path_;
  int64_t size_;
};

class PosixStorage : public Storage {
 public:
  PosixStorage(UniqueFd root, std::string name) : root_(std::move(root)), name_(std::move(name)) {}

  [[nodiscard]] std::string Describe(const std::string& path) const override {
    return path.empty() ? name_ : absl::StrCat(name_, "/", path);
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (const int error = fault::FaultPoint("storage.create")) {
      return Failed("create", Describe(path), error);
    }
    UniqueFd fd(::openat(root_.get(), path.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0640));
    if (!fd.valid()) return Failed("create", Describe(path), errno);
    return std::make_unique<PosixWritableFile>(std::move(fd), Describe(path));
  }

  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    // O_NONBLOCK: a pipe in a file's place must not stop us here.
    UniqueFd fd(
        ::openat(root_.get(), path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!fd.valid()) return FileFailed("open", Describe(path), errno);
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return FileFailed("stat", Describe(path), errno);
    if (!S_ISREG(info.st_mode)) {
      return absl::UnavailableError(absl::StrCat("open ", Describe(path), ": not a regular file"));
    }
    return std::make_unique<PosixReadableFile>(std::move(fd), Describe(path), info.st_size);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (const int error = fault::FaultPoint("storage.rename")) {
      return Failed("rename", absl::StrCat(Describe(from), " to ", Describe(to)), error);
    }
    if (::renameat(root_.get(), from.c_str(), root_.get(), to.c_str()) == 0) {
      return absl::OkStatus();
    }
    return Failed("rename", absl::StrCat(Describe(from), " to ", Describe(to)), errno);
  }

  absl::Status Remove(const std::string& path) override { return Unlink(path, 0); }
  absl::Status RemoveDirectory(const std::string& path) override {
    return Unlink(path, AT_REMOVEDIR);
  }

  absl::Status MakeDirectory(const std::string& path) override {
    if (::mkdirat(root_.get(), path.c_str(), 0750) == 0) return absl::OkStatus();
    if (errno != EEXIST) return Failed("make directory", Describe(path), errno);
    return OpenDirectory(path).status();
  }

  absl::Status SyncDirectory(const std::string& path) override {
    if (const int error = fault::FaultPoint("storage.fsync_directory")) {
      return Failed("fsync directory", Describe(path), error);
    }
    ASSIGN_OR_RETURN(UniqueFd fd, OpenDirectory(path));
    if (::fsync(fd.get()) != 0) return Failed("fsync directory", Describe(path), errno);
    return CheckPlace();
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    ASSIGN_OR_RETURN(UniqueFd fd, OpenDirectory(path));
    DIR* stream = ::fdopendir(fd.get());
    if (stream == nullptr) return Failed("list", Describe(path), errno);
    (void)fd.Release();
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(stream)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
      errno = 0;
    }
    const int error = errno;
    ::closedir(stream);
    if (error != 0) return Failed("list", Describe(path), error);
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  // The directory is held open: after an unmount, or where another one took its place, it goes on
  // taking files that nobody would find.
  [[nodiscard]] absl::Status CheckPlace() const {
    struct stat opened {};
    struct stat there {};
    if (::fstat(root_.get(), &opened) != 0) return Failed("stat", name_, errno);
    if (::stat(name_.c_str(), &there) != 0) {
      if (errno != ENOENT && errno != ENOTDIR) return Failed("stat", name_, errno);
      return absl::FailedPreconditionError(absl::StrCat("the directory that was opened as ", name_,
                                                        " is not there any more. ", kBringItBack));
    }
    if (opened.st_dev == there.st_dev && opened.st_ino == there.st_ino) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(name_, " is another directory than the one that was opened (device ",
                     there.st_dev, ", inode ", there.st_ino, ", not ", opened.st_dev, " and ",
                     opened.st_ino, "): it was unmounted or replaced. ", kBringItBack));
  }

  absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path) {
    UniqueFd fd(::openat(root_.get(), path.empty() ? "." : path.c_str(),
                         O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!fd.valid()) return Failed("open directory", Describe(path), errno);
    return fd;
  }

  absl::Status Unlink(const std::string& path, int flags) {
    return ::unlinkat(root_.get(), path.c_str(), flags) == 0
               ? absl::OkStatus()
               : Failed("remove", Describe(path), errno);
  }

  UniqueFd root_;
  std::string name_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Storage>> OpenPosixStorage(const std::string& root) {
  UniqueFd fd(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return Failed("open directory", root, errno);
  return std::make_unique<PosixStorage>(std::move(fd), root);
}

}  // namespace dmuond::server::storage
