// dmuonctl run -- COMMAND…: a daemon on a private socket for the length of a command. One that dies
// meanwhile is started again; one that has left, or refuses its settings, is not.
#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "server/common/exit_codes.h"
#include "server/common/mps_control.h"
#include "server/common/one_signal.h"
#include "server/ctl/child.h"
#include "server/ctl/command.h"
#include "server/ctl/private_dir.h"
#include "server/ctl/ready_wait.h"
#include "server/ctl/secret.h"

namespace dmuond::server::ctl {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// As shells have it.
constexpr int kExitCannotRun = 126;
constexpr int kExitNotFound = 127;

// A daemon that has lived for less than kCalm gets a successor after a pause, which grows while
// they keep dying.
constexpr std::chrono::seconds kCalm(10);
constexpr std::chrono::seconds kPauseMin(1);
constexpr std::chrono::seconds kPauseMax(60);

// The signals that are passed on, as a descriptor. Blocked before any thread starts.
class Signals {
 public:
  Signals() {
    ::sigemptyset(&set_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
      ::sigaddset(&set_, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    fd_.Reset(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  [[nodiscard]] int fd() const { return fd_.get(); }
  // One that has come.
  std::optional<signalfd_siginfo> Next() {
    signalfd_siginfo info{};
    if (::read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return std::nullopt;
    return info;
  }

 private:
  sigset_t set_;
  wire::UniqueFd fd_;
};

// Waits until one of three descriptors is readable or the time is up.
void WaitForAny(std::array<int, 3> fds, int timeout_ms = -1) {
  std::array<pollfd, 3> polled{};
  for (size_t i = 0; i < fds.size(); ++i) polled[i] = {fds[i], POLLIN, 0};
  // EINTR: the caller looks at everything anyway.
  ::poll(polled.data(), polled.size(), timeout_ms);
}

bool Readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, 0) > 0;
}

class Runner {
 public:
  Runner(const Options& options, const Arguments& command, PrivateDir dir)
      : options_(options), command_(command), dir_(std::move(dir)) {}

  int Run() {
    if (absl::Status started = StartDaemon(); !started.ok()) return Fail(started);
    std::optional<int> early = AwaitReady();
    const int code = early.has_value() ? *early : RunCommand();
    StopDaemon();
    MpsControl::EndLeftIn(dir_.mps());  // of a daemon that was killed
    return code;
  }

 private:
  absl::Status StartDaemon() {
    std::string program = options_.dmuond;
    if (program.empty()) {
      program = fs::read_symlink("/proc/self/exe").replace_filename("dmuond").string();
    }
    Child::Options child;
    child.arguments = {program, absl::StrCat("--socket=", dir_.socket()), "--log_level=warn"};
    if (!options_.devices.empty()) {
      child.arguments.push_back(absl::StrCat("--devices=", options_.devices));
    }
    if (!options_.mps.empty()) child.arguments.push_back(absl::StrCat("--mps=", options_.mps));
    if (options_.threads > 0) {
      child.arguments.push_back(absl::StrCat("--threads=", options_.threads));
    }
    if (!options_.config.empty()) {
      child.arguments.push_back(absl::StrCat("--config=", options_.config));
    }
    if (!options_.peer_secret_file.empty()) {
      absl::Status made = MakeSecretFile(options_.peer_secret_file);
      if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
      child.arguments.push_back(absl::StrCat("--peer_secret_file=", options_.peer_secret_file));
    }
    wire::UniqueFd log;
    child.output = STDERR_FILENO;  // stdout is the command's
    if (!options_.daemon_log.empty()) {
      log.Reset(
          ::open(options_.daemon_log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
      if (!log.valid()) return absl::ErrnoToStatus(errno, options_.daemon_log);
      child.output = log.get();
      child.arguments[2] = "--log_level=info";
    }
    // A service manager that has started this program hears nothing of the daemon.
    child.environment = {"NOTIFY_SOCKET="};
    child.own_group = true;
    child.ends_with_parent = true;
    child.input = false;
    // A wish to stop that comes while the program is being loaded would end it otherwise.
    child.blocked = {SIGTERM, SIGINT, SIGHUP};
    ASSIGN_OR_RETURN(Child daemon, Child::Start(child));
    daemon_.emplace(std::move(daemon));
    started_ = Clock::now();
    return absl::OkStatus();
  }

  // While the command runs. What is left of a dead daemon's jobs goes back to their newest snapshot
  // with its successor; trainers wait for that one.
  void KeepDaemon() {
    if (!successor_at_.has_value()) {
      if (!has_daemon_ || !daemon_->Ended().has_value()) return;
      const int code = daemon_->ExitCode();
      has_daemon_ = code != 0 && code != kWrongSettings && code != kNotSaved;
      std::cerr << "dmuonctl: the daemon ended with " << code << " while the command runs"
                << (has_daemon_ ? std::string(", and is started again\n") : WhyNoSuccessor(code));
      if (!has_daemon_) return;
      const bool calm = Clock::now() - started_ >= kCalm;
      pause_ = calm ? std::chrono::seconds(0) : std::clamp(2 * pause_, kPauseMin, kPauseMax);
      successor_at_ = Clock::now() + pause_;
    }
    if (Clock::now() < *successor_at_) return;
    successor_at_.reset();
    if (absl::Status started = StartDaemon(); !started.ok()) {
      has_daemon_ = false;
      Fail(started);
    }
  }

  // Says why a daemon that ended with `code` gets no successor, and what its user can do.
  [[nodiscard]] std::string WhyNoSuccessor(int code) const {
    const char* why = code == kWrongSettings ? "it refuses its settings"
                      : code == kNotSaved
                          ? "it was told to leave, and could not save the last steps"
                          : "it was told to leave";
    if (first_stop_.has_value()) return absl::StrCat(": ", why, "\n");
    return absl::StrCat(
        ": ", why, ", and is not started again. The command's next step waits for another daemon ",
        "for DMUOND_RECONNECT_S (600) seconds: end the command and run it again, to go on from ",
        "the newest snapshot where there are any\n");
  }

  // Until KeepDaemon() has to be called although no daemon ends; -1: not before.
  [[nodiscard]] int SuccessorInMs() const {
    if (!successor_at_.has_value()) return -1;
    const auto left = *successor_at_ - Clock::now();
    return std::max<int>(0, std::chrono::ceil<std::chrono::milliseconds>(left).count());
  }

  // Nothing: the daemon is ready. Otherwise what to end with.
  std::optional<int> AwaitReady() {
    ReadyWait wait(dir_.socket(), options_.ready_timeout);
    for (;;) {
      WaitForAny({signals_.fd(), daemon_->pidfd(), wait.done_fd()});
      if (const auto signal = signals_.Next(); signal.has_value()) {
        Insists(*signal);
        return 128 + static_cast<int>(signal->ssi_signo);
      }
      if (daemon_->Ended().has_value()) {
        return Fail(
            absl::UnavailableError(absl::StrCat("the daemon ended with ", daemon_->ExitCode(),
                                                " before it was ready; its log says why")));
      }
      if (!Readable(wait.done_fd())) continue;
      const absl::Status ready = wait.Result();
      if (ready.ok()) return std::nullopt;
      if (!absl::IsDeadlineExceeded(ready)) return Fail(ready);
      return Fail(absl::DeadlineExceededError(
          absl::StrCat("the daemon was not ready after ",
                       absl::FormatDuration(options_.ready_timeout), " (--ready_timeout)")));
    }
  }

  int RunCommand() {
    Child::Options child;
    child.arguments = command_;
    child.environment = {absl::StrCat("DMUOND_ADDRESS=", dir_.socket())};
    if (fs::exists(dir_.mps())) {
      for (const auto& [name, value] : MpsControl::VariablesOf(dir_.mps())) {
        child.environment.push_back(absl::StrCat(name, "=", value));
      }
    }
    absl::StatusOr<Child> command = Child::Start(child);
    if (!command.ok()) {
      Fail(command.status());
      return absl::IsNotFound(command.status()) ? kExitNotFound : kExitCannotRun;
    }
    while (!command->Ended().has_value()) {
      const bool watched = has_daemon_ && !successor_at_.has_value();
      WaitForAny({signals_.fd(), command->pidfd(), watched ? daemon_->pidfd() : -1},
                 SuccessorInMs());
      while (const auto signal = signals_.Next()) {
        Insists(*signal);
        // What the terminal sends has reached the command already: it is in our process group.
        if (signal->ssi_code != SI_KERNEL) command->Signal(static_cast<int>(signal->ssi_signo));
      }
      KeepDaemon();
    }
    return command->ExitCode();
  }

  // Notes a signal. True: it is the second that asks us to stop, whatever the first has ended.
  bool Insists(const signalfd_siginfo& signal) {
    const int number = static_cast<int>(signal.ssi_signo);
    if (number != SIGINT && number != SIGTERM && number != SIGQUIT) return false;
    if (!first_stop_.has_value()) first_stop_ = Clock::now();
    return Clock::now() - *first_stop_ >= kOneSignal;
  }

  // SIGTERM lets the daemon finish its step. A second one, sent when somebody insists, ends it at
  // once. Somebody who signals this process may signal the daemon as well: the daemon counts our
  // signals apart from theirs, so it takes both for one wish.
  void StopDaemon() {
    if (daemon_->Ended().has_value()) return;
    daemon_->Signal(SIGTERM);
    const auto deadline = Clock::now() + absl::ToChronoMilliseconds(options_.drain_timeout);
    while (!daemon_->Ended().has_value()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) {
        std::cerr << "dmuonctl: the daemon did not leave within "
                  << absl::FormatDuration(options_.drain_timeout) << " and is killed\n";
        daemon_->Signal(SIGKILL);
        WaitForAny({-1, daemon_->pidfd(), -1});
        continue;
      }
      WaitForAny({signals_.fd(), daemon_->pidfd(), -1}, static_cast<int>(left));
      const auto signal = signals_.Next();
      if (!signal.has_value()) continue;
      if (Insists(*signal)) {
        daemon_->Signal(SIGTERM);
      } else {
        std::cerr
            << "dmuonctl: the daemon finishes its step and leaves; a second signal ends it at "
               "once\n";
      }
    }
    if (daemon_->ExitCode() != 0) {
      std::cerr << "dmuonctl: the daemon ended with " << daemon_->ExitCode() << "\n";
    }
  }

  const Options& options_;
  const Arguments& command_;
  PrivateDir dir_;
  Signals signals_;
  std::optional<Child> daemon_;
  bool has_daemon_ = true;         // false: it has ended, and gets no successor
  Clock::time_point started_;      // the daemon was
  std::chrono::seconds pause_{0};  // before the last successor
  std::optional<Clock::time_point> successor_at_;
  std::optional<Clock::time_point> first_stop_;  // when we were first asked to stop
};

}  // namespace

int RunRun(const Options& options, const Arguments& arguments) {
  if (arguments.empty()) return FailUsage("run needs a command: dmuonctl run -- COMMAND…");
  absl::StatusOr<PrivateDir> dir = PrivateDir::Make(/*managed_mps=*/options.mps == "managed");
  if (!dir.ok()) return Fail(dir.status());
  return Runner(options, arguments, *std::move(dir)).Run();
}

}  // namespace dmuond::server::ctl
