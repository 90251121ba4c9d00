#include "server/common/mps_control.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuond/wire/socket_path.h"
#include "server/common/argument_list.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kProgram[] = "nvidia-cuda-mps-control";
constexpr char kSocket[] = "/control";
constexpr char kWords[] = "/output.log";  // its stdout and stderr: a pipe would break with dmuond
constexpr size_t kWordsBytesMax = 400;
constexpr milliseconds kListensWithin{20000};
constexpr milliseconds kListenPause{5};  // a file that exists need not be a socket that listens
constexpr milliseconds kRestartPauseMin{1000};
constexpr milliseconds kRestartPauseMax{60000};

absl::Status MakeFolder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0) return absl::OkStatus();
  if (errno != EEXIST) return absl::ErrnoToStatus(errno, absl::StrCat("making ", folder));
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) return absl::ErrnoToStatus(errno, folder);
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " is no directory of uid ", ::geteuid()));
  }
  if (::chmod(folder.c_str(), 0700) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("chmod of ", folder));
}

// REQUIRES: nobody listens in it. What was written there stays for people.
void CleanFolder(const std::string& folder) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".log") fs::remove_all(entry.path(), error);
  }
}

std::string EndOf(const std::string& path) {
  std::ifstream file(path);
  std::stringstream stream;
  stream << file.rdbuf();
  std::string text = stream.str();
  absl::StripAsciiWhitespace(&text);
  return text.size() > kWordsBytesMax ? text.substr(text.size() - kWordsBytesMax) : text;
}

// This process's environment, but for two things: the folder, and CUDA_VISIBLE_DEVICES. A server of
// MPS numbers its devices anew by that, and its clients would count by theirs once more.
std::vector<std::string> Environment(const std::string& folder) {
  std::vector<std::string> entries;
  for (const auto& [name, value] : MpsControl::VariablesOf(folder)) {
    entries.push_back(absl::StrCat(name, "=", value));
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    if (absl::StartsWith(text, absl::StrCat(MpsControl::kPipeVariable, "=")) ||
        absl::StartsWith(text, absl::StrCat(MpsControl::kLogVariable, "=")) ||
        absl::StartsWith(text, "CUDA_VISIBLE_DEVICES=")) {
      continue;
    }
    entries.emplace_back(text);
  }
  return entries;
}

wire::UniqueFd OpenPidfd(pid_t pid) {
  return wire::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// The child's pid. `output`: its stdout and stderr. It has no other descriptor of this process, so
// that no lock and no connection stays open in it.
absl::StatusOr<pid_t> SpawnIn(const std::string& folder, int output) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  sigset_t signals;
  ::sigemptyset(&signals);
  ::posix_spawnattr_setsigmask(&attributes, &signals);
  ::sigfillset(&signals);
  ::posix_spawnattr_setsigdefault(&attributes, &signals);
  std::vector<std::string> arguments = {kProgram, "-f"};
  std::vector<std::string> environment = Environment(folder);
  pid_t pid = 0;
  const int error = ::posix_spawnp(&pid, kProgram, &actions, &attributes,
                                   Pointers(arguments).data(), Pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error == 0) return pid;
  if (error == ENOENT) {
    return absl::NotFoundError(
        absl::StrCat(kProgram, " is not on PATH; it comes with the driver's programs"));
  }
  return absl::ErrnoToStatus(error, absl::StrCat("running ", kProgram));
}

}  // namespace

std::vector<std::pair<std::string, std::string>> MpsControl::VariablesOf(
    const std::string& folder) {
  return {{kPipeVariable, folder}, {kLogVariable, folder}};
}

absl::StatusOr<pid_t> MpsControl::ListenerIn(const std::string& folder) {
  const std::string path = folder + kSocket;
  const absl::StatusOr<sockaddr_un> address = wire::SocketAddress(path);
  if (!address.ok()) return address.status();
  // Those of today have SEQPACKET.
  for (const int type : {SOCK_SEQPACKET, SOCK_STREAM}) {
    const wire::UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) !=
        0) {
      if (errno == EPROTOTYPE) continue;
      if (errno == ENOENT || errno == ECONNREFUSED) return 0;
      return absl::ErrnoToStatus(errno, absl::StrCat("connecting to ", path));
    }
    ucred peer{};  // of the process that has called listen()
    socklen_t size = sizeof(peer);
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("SO_PEERCRED of ", path));
    }
    if (peer.pid > 0) return peer.pid;
    return absl::FailedPreconditionError(
        absl::StrCat("a control daemon listens at ", path, " whose process is not seen from here"));
  }
  return 0;
}

void MpsControl::EndLeftIn(const std::string& folder) {
  const absl::StatusOr<pid_t> listener = ListenerIn(folder);
  if (!listener.ok() || *listener == 0) return;
  MpsControl left(folder);
  if (left.TakeOver(*listener).ok()) left.End();
}

absl::StatusOr<std::unique_ptr<MpsControl>> MpsControl::Start(
    std::string folder, absl::FunctionRef<bool(milliseconds)> wait) {
  std::unique_ptr<MpsControl> control(new MpsControl(std::move(folder)));
  if (absl::Status made = MakeFolder(control->folder_); !made.ok()) return made;
  const absl::StatusOr<pid_t> listener = ListenerIn(control->folder_);
  if (!listener.ok()) return listener.status();
  absl::Status begun = *listener > 0 ? control->TakeOver(*listener) : control->Spawn();
  if (begun.ok() && control->own_) begun = control->AwaitListening(wait);
  if (!begun.ok()) return begun;
  log::Info(control->own_ ? "MPS runs" : "MPS runs: its control daemon was taken over",
            {{"control_pid", control->pid_}, {kPipeVariable, control->folder_}});
  return control;
}

MpsControl::~MpsControl() {
  if (own_) End();
}

absl::Status MpsControl::TakeOver(pid_t pid) {
  pid_ = pid;
  pidfd_ = OpenPidfd(pid);
  if (!pidfd_.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("pidfd_open of ", pid));
  return absl::OkStatus();
}

absl::Status MpsControl::Spawn() {
  // One that ran for long has its short pause again.
  const bool ran = Clock::now() - started_ > kRestartPauseMax;
  pause_ = ran ? kRestartPauseMin : std::clamp(2 * pause_, kRestartPauseMin, kRestartPauseMax);
  started_ = Clock::now();
  CleanFolder(folder_);
  const std::string words = folder_ + kWords;
  const wire::UniqueFd output(
      ::open(words.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
  if (!output.valid()) return absl::ErrnoToStatus(errno, words);
  const absl::StatusOr<pid_t> pid = SpawnIn(folder_, output.get());
  if (!pid.ok()) return pid.status();
  own_ = true;
  pid_ = *pid;
  pidfd_ = OpenPidfd(pid_);
  if (pidfd_.valid()) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(errno, "pidfd_open (Linux 5.3 or newer)");
  ::kill(-pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  return status;
}

absl::Status MpsControl::AwaitListening(absl::FunctionRef<bool(milliseconds)> wait) {
  for (;;) {
    const absl::StatusOr<pid_t> listener = ListenerIn(folder_);
    if (!listener.ok()) return listener.status();
    if (*listener > 0) return absl::OkStatus();
    if (EndsWithin(milliseconds(0))) {
      return absl::UnavailableError(absl::StrCat(kProgram, " ", Reap()));
    }
    if (Clock::now() - started_ > kListensWithin) {
      return absl::DeadlineExceededError(
          absl::StrCat(kProgram, " does not listen at ", folder_, kSocket, " after ",
                       kListensWithin.count(), " ms; it has said: ", EndOf(folder_ + kWords)));
    }
    if (wait(kListenPause)) return absl::CancelledError("told to stop");
  }
}

bool MpsControl::EndsWithin(milliseconds patience) const {
  const auto deadline = Clock::now() + patience;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd polled{pidfd_.get(), POLLIN, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(std::max(left, milliseconds(0)).count()));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

std::string MpsControl::Reap() {
  std::string how = "has ended";
  int status = 0;
  if (own_ && ::waitpid(pid_, &status, 0) == pid_) {
    how = WIFSIGNALED(status) ? absl::StrCat("was ended by signal ", WTERMSIG(status))
                              : absl::StrCat("has ended with code ", WEXITSTATUS(status));
  }
  pidfd_.Reset();
  std::string words = EndOf(folder_ + kWords);
  if (words.empty()) words = EndOf(folder_ + "/control.log");
  return absl::StrCat(how, words.empty() ? "" : "; its last words: ", words);
}

void MpsControl::Watch() {
  if (pidfd_.valid()) {
    if (!EndsWithin(milliseconds(0))) return;
    log::Warn("the control daemon of MPS has ended; it is started again",
              {{"control_pid", pid_}, {"how", Reap()}});
  }
  if (Clock::now() - started_ < pause_) return;
  const absl::Status spawned = Spawn();
  if (spawned.ok()) {
    log::Info("the control daemon of MPS was started again", {{"control_pid", pid_}});
  } else {
    log::Warn("the control daemon of MPS cannot be started", {{"what", spawned}});
  }
}

void MpsControl::End(milliseconds patience) {
  if (pidfd_.valid()) {
    const auto signal = [&](int number) {
      ::syscall(SYS_pidfd_send_signal, pidfd_.get(), number, nullptr, 0);
    };
    signal(SIGTERM);
    if (!EndsWithin(patience)) {
      log::Warn("the control daemon of MPS did not end and is killed", {{"control_pid", pid_}});
      signal(SIGKILL);
    }
    ::kill(-pid_, SIGKILL);  // servers that it has left
    if (own_) ::waitpid(pid_, nullptr, 0);
    pidfd_.Reset();
  }
  own_ = false;
  std::error_code error;
  fs::remove_all(folder_, error);
}

}  // namespace dmuond::server
