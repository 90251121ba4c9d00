#include "server/ctl/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
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

// In the new process, where nothing may be allocated; returns, with errno, if the program does not
// run.
void Become(const Child::Options& options, const std::vector<char*>& argv,
            const std::vector<char*>& envp, pid_t parent) {
  if (options.ends_with_parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(128 + SIGTERM);
  }
  if (options.own_group) ::setpgid(0, 0);
  if (!options.input) {
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing < 0 || ::dup2(nothing, STDIN_FILENO) < 0) return;
  }
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    if (options.output >= 0 && ::dup2(options.output, fd) < 0) return;
  }
  // This process blocks the signals that it passes on; children get them as usual.
  sigset_t blocked;
  ::sigemptyset(&blocked);
  for (const int signal : options.blocked) ::sigaddset(&blocked, signal);
  ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
  ::execvpe(argv[0], argv.data(), envp.data());
}

}  // namespace

absl::StatusOr<Child> Child::Start(const Options& options) {
  std::vector<std::string> arguments = options.arguments;
  std::vector<std::string> environment =
      options.inherits ? With(options.environment) : options.environment;
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  const wire::UniqueFd told(ends[0]);
  wire::UniqueFd tells(ends[1]);  // why the program does not run; closed when it does
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, absl::StrCat("running ", arguments[0]));
  if (pid == 0) {
    Become(options, argv, envp, parent);
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(tells.get(), &error, sizeof(error));
    ::_exit(127);
  }
  tells.Reset();
  int error = 0;
  while (::read(told.get(), &error, sizeof(error)) < 0 && errno == EINTR) continue;
  if (error != 0) {
    ::waitpid(pid, nullptr, 0);
    return absl::ErrnoToStatus(error, absl::StrCat("running ", arguments[0]));
  }
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
