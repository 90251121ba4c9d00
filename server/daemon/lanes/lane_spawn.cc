#include "server/daemon/lanes/lane_spawn.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "server/common/argument_list.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

constexpr int kLaneFd = 3;  // the first after stdin, stdout and stderr
// Its own program. The lane never uses it, but it must be open after exec for a script, whose
// interpreter opens it by kProgram.
constexpr int kProgramFd = 4;
constexpr char kProgram[] = "/proc/self/fd/4";
constexpr int kLockFd = 5;

// The descriptor's copy above those numbers that the child's own will have.
wire::UniqueFd MoveUp(wire::UniqueFd fd) {
  return wire::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, kLockFd + 1));
}

// The daemon's environment as the lane gets it, "NAME=value" each.
std::vector<std::string> LaneEnvironment(
    const std::vector<std::pair<std::string, std::string>>& environment) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const size_t equals = text.find('=');
    if (equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : environment) {
    if (value.empty()) {
      values.erase(name);
    } else {
      values[name] = value;
    }
  }
  std::vector<std::string> entries;
  entries.reserve(values.size());
  for (const auto& [name, value] : values) entries.push_back(absl::StrCat(name, "=", value));
  return entries;
}

// posix_spawn's two argument objects, which are made, filled and destroyed by hand.
class SpawnSetup {
 public:
  SpawnSetup(int socket, int output, int program, int lock) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions_, output, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, output, STDERR_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, socket, kLaneFd);
    ::posix_spawn_file_actions_adddup2(&actions_, program, kProgramFd);
    if (lock >= 0) ::posix_spawn_file_actions_adddup2(&actions_, lock, kLockFd);
    ::posix_spawn_file_actions_addclosefrom_np(&actions_, lock >= 0 ? kLockFd + 1 : kLockFd);

    ::posix_spawnattr_init(&attributes_);
    ::posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    // What the daemon blocks or ignores is its own affair. A lane ignores SIGHUP, as soon as it
    // can.
    sigset_t blocked;
    ::sigemptyset(&blocked);
    ::sigaddset(&blocked, SIGHUP);
    ::posix_spawnattr_setsigmask(&attributes_, &blocked);
    sigset_t all;
    ::sigfillset(&all);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
  }
  ~SpawnSetup() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;

  [[nodiscard]] const posix_spawn_file_actions_t* actions() const { return &actions_; }
  [[nodiscard]] const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

absl::StatusOr<SpawnedLane> SpawnLane(
    const LaneBinary& binary, int lane_index, const std::string& device,
    const std::vector<std::pair<std::string, std::string>>& environment, int lock,
    const std::vector<std::string>& flags) {
  const absl::StatusOr<int> program = binary.file();
  if (!program.ok()) return program.status();
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair for a lane");
  }
  SpawnedLane lane;
  lane.socket.Reset(sockets[0]);
  const wire::UniqueFd its_socket = MoveUp(wire::UniqueFd(sockets[1]));
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe for a lane");
  lane.output.Reset(pipe[0]);
  const wire::UniqueFd its_output = MoveUp(wire::UniqueFd(pipe[1]));
  const auto its_copy = [](int fd) {
    return wire::UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, kLockFd + 1));
  };
  const wire::UniqueFd its_program = its_copy(*program);
  const wire::UniqueFd its_lock = lock < 0 ? wire::UniqueFd() : its_copy(lock);
  if (!its_socket.valid() || !its_output.valid() || !its_program.valid() ||
      (lock >= 0 && !its_lock.valid()) || ::fcntl(lane.output.get(), F_SETFL, O_NONBLOCK) != 0) {
    return absl::ErrnoToStatus(errno, "descriptors for a lane");
  }

  std::vector<std::string> arguments = {
      binary.path(),
      absl::StrCat("--fd=", kLaneFd),
      absl::StrCat("--lane=", lane_index),
      absl::StrCat("--device=", device),
      absl::StrCat("--log_level=", log::Name(log::CurrentLevel())),
      absl::StrCat("--log_format=", log::Name(log::CurrentFormat()))};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<std::string> entries = LaneEnvironment(environment);
  const SpawnSetup setup(its_socket.get(), its_output.get(), its_program.get(), its_lock.get());
  int error = fault::FaultPoint("daemon.spawn");
  if (error == 0) {
    error = ::posix_spawn(&lane.pid, kProgram, setup.actions(), setup.attributes(),
                          Pointers(arguments).data(), Pointers(entries).data());
  }
  if (error != 0) {
    return absl::ErrnoToStatus(error, absl::StrCat("starting lane ", binary.path()));
  }
  lane.pidfd.Reset(static_cast<int>(::syscall(SYS_pidfd_open, lane.pid, 0)));
  if (!lane.pidfd.valid()) {
    const absl::Status status = absl::ErrnoToStatus(errno, "pidfd_open (Linux 5.3 or newer)");
    ::kill(lane.pid, SIGKILL);
    ::waitpid(lane.pid, nullptr, 0);
    return status;
  }
  return lane;
}

}  // namespace dmuond::server
