#include "server/ctl/child.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/common/argument_list.h"

namespace dmuond::server::ctl {
namespace {

// This process's environment with `added` in place of what has the same name.
std::vector<std::string> With(const std::vector<std::string>& added) {
  std::vector<std::string> all = added;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const std::string name = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (const std::string& other : added) replaced = replaced || other.starts_with(name);
    if (!replaced) all.push_back(text);
  }
  return all;
}

}  // namespace

absl::StatusOr<Child> Child::Start(const Options& options) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (!options.input) {
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  }
  if (options.output >= 0) {
    ::posix_spawn_file_actions_adddup2(&actions, options.output, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, options.output, STDERR_FILENO);
  }
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  // This process blocks the signals that it passes on; children get them as usual.
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  const int group = options.own_group ? POSIX_SPAWN_SETPGROUP : 0;
  ::posix_spawnattr_setflags(&attributes, static_cast<int16_t>(POSIX_SPAWN_SETSIGMASK | group));

  std::vector<std::string> arguments = options.arguments;
  std::vector<std::string> environment =
      options.inherits ? With(options.environment) : options.environment;
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, arguments[0].c_str(), &actions, &attributes,
                                   Pointers(arguments).data(), Pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) return absl::ErrnoToStatus(error, absl::StrCat("running ", arguments[0]));
  wire::UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd.valid()) {
    const absl::Status status = absl::ErrnoToStatus(errno, "pidfd_open (Linux 5.3 or newer)");
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return status;
  }
  return Child(pid, std::move(pidfd));
}

void Child::Signal(int signal) const {
  ::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, nullptr, 0);
}

std::optional<int> Child::Ended() {
  if (status_.has_value()) return status_;
  int status = 0;
  const pid_t waited = ::waitpid(pid_, &status, WNOHANG);
  if (waited == pid_) status_ = status;
  return status_;
}

int Child::ExitCode() const {
  const int status = status_.value_or(0);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace dmuond::server::ctl
