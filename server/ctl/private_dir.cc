#include "server/ctl/private_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/common/mps_control.h"
#include "server/daemon/process/socket_dir.h"

namespace dmuond::server::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kName[] = "dmuond-run-";
constexpr int kTriesMax = 10;

std::string SocketIn(const std::string& path) { return path + "/dmuond.sock"; }
std::string MpsIn(const std::string& path) { return SocketIn(path) + MpsControl::kFolderSuffix; }

// Takes the runner's lock. Invalid: somebody else has it, or it is not there any more.
wire::UniqueFd Lock(const std::string& path, int flags = 0) {
  const std::string file = path + "/runner.lock";
  wire::UniqueFd lock(::open(file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0600));
  struct stat opened {};
  struct stat there {};
  const bool taken = lock.valid() && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0 &&
                     ::fstat(lock.get(), &opened) == 0 && ::lstat(file.c_str(), &there) == 0 &&
                     opened.st_dev == there.st_dev && opened.st_ino == there.st_ino;
  if (!taken) lock.Reset();
  return lock;
}

void RemoveIfLeft(const std::string& path) {
  struct stat folder {};
  if (::lstat(path.c_str(), &folder) != 0 || !S_ISDIR(folder.st_mode)) return;
  if (folder.st_uid != ::geteuid()) return;
  const wire::UniqueFd lock = Lock(path);
  if (!lock.valid()) return;
  // Lanes live longer than their daemon.
  const wire::UniqueFd daemon(
      ::open((SocketIn(path) + SocketDir::kLockSuffix).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (daemon.valid() && ::flock(daemon.get(), LOCK_EX | LOCK_NB) != 0) return;
  MpsControl::EndLeftIn(MpsIn(path));
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

void RemoveLeftIn(const std::string& base) {
  std::error_code error;
  for (fs::directory_iterator at(base, error), end; !error && at != end; at.increment(error)) {
    if (absl::StartsWith(at->path().filename().string(), kName)) RemoveIfLeft(at->path());
  }
}

}  // namespace

absl::StatusOr<PrivateDir> PrivateDir::Make(bool managed_mps) {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  std::error_code error;
  const std::string base =
      runtime != nullptr && fs::is_directory(runtime, error) ? runtime : "/tmp";
  const std::string name = absl::StrCat(base, "/", kName, "XXXXXX");
  if (absl::Status fits = CheckSocketPaths(SocketIn(name), managed_mps); !fits.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(fits.message(), ": set XDG_RUNTIME_DIR to a shorter path"));
  }
  RemoveLeftIn(base);
  for (int tries = 0; tries < kTriesMax; ++tries) {
    std::string path = name;
    if (::mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
    // Another runner may take it for one that was left, in the moment before it is locked.
    wire::UniqueFd lock = Lock(path, O_CREAT | O_EXCL);
    if (lock.valid()) return PrivateDir(path, std::move(lock));
  }
  return absl::UnavailableError(absl::StrCat("no folder in ", base, " can be locked"));
}

PrivateDir::PrivateDir(std::string path, wire::UniqueFd lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

PrivateDir::PrivateDir(PrivateDir&& other) noexcept
    : path_(std::exchange(other.path_, {})), lock_(std::move(other.lock_)) {}

PrivateDir::~PrivateDir() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

std::string PrivateDir::socket() const { return SocketIn(path_); }
std::string PrivateDir::mps() const { return MpsIn(path_); }

}  // namespace dmuond::server::ctl
