#include "server/daemon/process/socket_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dmuond/wire/socket_path.h"
#include "server/common/mps_control.h"

namespace dmuond::server {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kPredecessorsLanes{10};
constexpr std::chrono::milliseconds kLockPause{10};

constexpr mode_t kRightsBeyond = 0777 & ~0750;

absl::Status CheckPath(const std::string& socket) {
  if (absl::Status fits = CheckSocketPaths(socket); !fits.ok()) return fits;
  if (socket.empty() || socket.front() != '/' || socket.back() == '/') {
    return absl::InvalidArgumentError(
        absl::StrCat("--socket=", socket, " is not the absolute path of a file"));
  }
  return absl::OkStatus();
}

absl::Status GiveTo(const std::string& path, mode_t mode, std::optional<gid_t> group) {
  if (group.has_value() && ::chown(path.c_str(), static_cast<uid_t>(-1), *group) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("giving ", path, " to group ", *group));
  }
  if (::chmod(path.c_str(), mode) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("chmod of ", path));
  }
  return absl::OkStatus();
}

absl::Status MakeMissing(const fs::path& dir, mode_t mode, std::optional<gid_t> group) {
  struct stat found {};
  if (::lstat(dir.c_str(), &found) == 0) return absl::OkStatus();
  if (dir.has_parent_path() && dir.parent_path() != dir) {
    if (absl::Status parent = MakeMissing(dir.parent_path(), mode, group); !parent.ok())
      return parent;
  }
  if (::mkdir(dir.c_str(), 0700) != 0) {
    if (errno == EEXIST) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("creating directory ", dir.string()));
  }
  return GiveTo(dir.string(), mode, group);
}

absl::Status CheckDirectory(const fs::path& dir) {
  struct stat status {};
  if (::lstat(dir.c_str(), &status) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("directory ", dir.string()));
  }
  if (!S_ISDIR(status.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the socket's directory ", dir.string(), " is ",
                     S_ISLNK(status.st_mode) ? "a symbolic link" : "no directory"));
  }
  if ((status.st_mode & S_ISVTX) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the socket's directory ", dir.string(),
                     " is shared by all users, as /tmp is: give --socket a path in a directory of "
                     "its own, as ",
                     dir.string(), "/dmuond-", ::geteuid(), "/dmuond.sock"));
  }
  if (status.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat("the socket's directory ", dir.string(),
                                                      " is owned by uid ", status.st_uid,
                                                      ", this process runs as uid ", ::geteuid()));
  }
  if ((status.st_mode & kRightsBeyond) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the socket's directory %s has mode %04o, at most 0750 is allowed: chmod "
                        "0750 %s, or, where "
                        "it is of others, too, give --socket a path in a directory of its own, as "
                        "%s/dmuond/dmuond.sock",
                        dir.string(), status.st_mode & 0777, dir.string(), dir.string()));
  }
  return absl::OkStatus();
}

// Field 22 of /proc/PID/stat; empty: no such process. With the pid it names a process for good. The
// second field is the name in parentheses, which may hold spaces.
std::string StartTimeOf(const std::string& pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::stringstream text;
  text << file.rdbuf();
  const std::string stat = text.str();
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return "";
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
  constexpr size_t kStartTime = 22 - 3;  // the third field comes first here
  return fields.size() > kStartTime ? fields[kStartTime] : "";
}

// The daemon that took the lock last.
struct Holder {
  std::string pid = "unknown";
  bool lives = true;
};

Holder HolderOf(int lock) {
  char text[64] = {};
  const ssize_t size = ::pread(lock, text, sizeof(text) - 1, 0);
  const std::vector<std::string> words =
      absl::StrSplit(absl::string_view(text, size > 0 ? static_cast<size_t>(size) : 0),
                     absl::ByAnyChar(" \n"), absl::SkipEmpty());
  if (words.size() < 2) return {};  // about to be written
  return {words[0], StartTimeOf(words[0]) == words[1]};
}

// The lock of a daemon that has died is held by its lanes until they have ended, too: nobody else
// writes into trainers' memory beside the new ones.
absl::Status WaitForLock(int lock, const std::string& path, const std::string& socket) {
  const auto deadline = std::chrono::steady_clock::now() + kPredecessorsLanes;
  while (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, absl::StrCat("locking ", path));
    const Holder holder = HolderOf(lock);
    if (holder.lives) {
      return absl::AlreadyExistsError(
          absl::StrCat("another dmuond (pid ", holder.pid, ") serves this socket: ", socket));
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::AlreadyExistsError(
          absl::StrCat("lanes of the dmuond that served this socket (pid ", holder.pid,
                       ", dead) still run: ", socket));
    }
    std::this_thread::sleep_for(kLockPause);  // there is no event for a lock that is given up
  }
  return absl::OkStatus();
}

absl::StatusOr<wire::UniqueFd> TakeLock(const std::string& socket) {
  const std::string path = socket + SocketDir::kLockSuffix;
  wire::UniqueFd lock(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!lock.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("lock file ", path));
  struct stat status {};
  if (::fstat(lock.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("lock file ", path, " is not a file of uid ", ::geteuid()));
  }
  if (absl::Status status = WaitForLock(lock.get(), path, socket); !status.ok()) return status;
  const std::string text = absl::StrCat(::getpid(), " ", StartTimeOf("self"), "\n");
  if (::ftruncate(lock.get(), 0) != 0 ||
      ::pwrite(lock.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return absl::ErrnoToStatus(errno, absl::StrCat("writing lock file ", path));
  }
  return lock;
}

// REQUIRES: the lock is held: then a socket of ours that lies here serves nobody.
absl::Status RemoveStale(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("socket ", path));
  }
  if (status.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat("socket ", path, " is owned by uid ",
                                                      status.st_uid, ", this process runs as uid ",
                                                      ::geteuid()));
  }
  if (!S_ISSOCK(status.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is no socket and is left alone: choose another --socket"));
  }
  if (::unlink(path.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("removing stale socket ", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketDir> SocketDir::Prepare(const std::string& socket, mode_t socket_mode,
                                             std::optional<gid_t> group) {
  if (absl::Status status = CheckPath(socket); !status.ok()) return status;
  const fs::path dir = fs::path(socket).parent_path();
  const mode_t dir_mode = (socket_mode & 0070) != 0 ? 0750 : 0700;
  if (absl::Status status = MakeMissing(dir, dir_mode, group); !status.ok()) return status;
  if (absl::Status status = CheckDirectory(dir); !status.ok()) return status;
  absl::StatusOr<wire::UniqueFd> lock = TakeLock(socket);
  if (!lock.ok()) return lock.status();
  for (const std::string& path : {socket, socket + wire::kAttachSuffix, socket + kAdminSuffix}) {
    if (absl::Status status = RemoveStale(path); !status.ok()) return status;
  }
  return SocketDir(socket + kLockSuffix, *std::move(lock));
}

bool SocketDir::LockFileIsLost() const {
  struct stat held {};
  if (::fstat(lock_.get(), &held) != 0) return false;
  struct stat found {};
  if (::lstat(lock_path_.c_str(), &found) != 0) return errno == ENOENT || errno == ENOTDIR;
  return found.st_dev != held.st_dev || found.st_ino != held.st_ino;
}

absl::Status CheckSocketPaths(const std::string& socket, bool managed_mps) {
  // The longest of the names there.
  return wire::CheckSocketPath(
      managed_mps ? absl::StrCat(socket, MpsControl::kFolderSuffix, MpsControl::kLongestName)
                  : socket + wire::kAttachSuffix);
}

std::string DefaultSocket() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string base = runtime != nullptr && *runtime != '\0' ? runtime : "/tmp";
  return absl::StrCat(base, "/dmuond-", ::geteuid(), "/dmuond.sock");
}

}  // namespace dmuond::server
