#include "tests/client/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuond/v1/admin.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace dmuond::testing {
namespace {

std::string BesideThisProgram(const std::string& program) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / program;
}

// Between fork and exec: only what may be called there.
[[noreturn]] void Exec(char* const* arguments, int output) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (output >= 0) {
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
  }
  ::execv(arguments[0], arguments);
  ::_exit(127);
}

// From one look at the daemon's process to the next.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::string& program, std::vector<std::string> arguments,
    const std::string& output_path) {
  arguments.insert(arguments.begin(), BesideThisProgram(program));
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  wire::UniqueFd output;
  if (!output_path.empty()) {
    output.Reset(::open(output_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!output.valid()) return absl::ErrnoToStatus(errno, output_path);
  }
  if (::access(arguments[0].c_str(), X_OK) != 0) return absl::ErrnoToStatus(errno, arguments[0]);
  const pid_t pid = ::fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) Exec(argv.data(), output.get());
  wire::UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, std::move(pidfd)));
}

ChildProcess::~ChildProcess() {
  if (exit_code_ >= 0) return;
  Signal(SIGKILL);
  Wait(std::chrono::hours(1));
}

void ChildProcess::Signal(int signal) const {
  if (exit_code_ < 0) ::kill(pid_, signal);
}

int ChildProcess::Wait(std::chrono::milliseconds timeout) {
  if (exit_code_ >= 0) return exit_code_;
  pollfd polled{pidfd_.get(), POLLIN, 0};
  if (::poll(&polled, 1, static_cast<int>(timeout.count())) <= 0) return -1;
  int status = 0;
  if (::waitpid(pid_, &status, 0) != pid_) return -1;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_code_;
}

DaemonProcess::DaemonProcess(Options options, std::string directory)
    : options_(std::move(options)),
      directory_(std::move(directory)),
      address_(directory_ + "/dmuond.sock") {}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(Options options) {
  std::string directory = std::filesystem::temp_directory_path() / "dmuond-test-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) return absl::ErrnoToStatus(errno, directory);
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess(std::move(options), directory));
  absl::Status ready = daemon->Launch();
  if (!ready.ok()) return ready;
  return daemon;
}

absl::Status DaemonProcess::StartAgain() { return Launch(); }

absl::Status DaemonProcess::Launch() {
  std::vector<std::string> arguments = options_.flags;
  arguments.push_back("--devices=" + options_.devices);
  arguments.push_back("--socket=" + address_);
  absl::StatusOr<std::unique_ptr<ChildProcess>> process =
      ChildProcess::Start("dmuond", std::move(arguments), directory_ + "/log");
  if (!process.ok()) return process.status();
  process_ = *std::move(process);
  return WaitServing(options_.wait_for, options_.timeout);
}

DaemonProcess::~DaemonProcess() {
  process_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

absl::Status DaemonProcess::WaitServing(const std::string& service,
                                        std::chrono::milliseconds timeout) const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  const auto stub = v1::Admin::NewStub(grpc::CreateCustomChannel(
      "unix:" + address_ + ".admin", grpc::InsecureChannelCredentials(), arguments));
  v1::GetReadinessRequest request;
  request.set_awaited(service == "live" ? v1::GetReadinessRequest::STATE_LIVE
                                        : v1::GetReadinessRequest::STATE_READY);
  const auto deadline = std::chrono::system_clock::now() + timeout;
  do {
    const auto now = std::chrono::system_clock::now();
    const auto wait = std::min<std::chrono::system_clock::duration>(kLook, deadline - now);
    request.set_wait_ms(
        std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(wait).count()));
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(now + 2 * kLook);
    v1::GetReadinessReply reply;
    if (stub->GetReadiness(&context, request, &reply).ok() &&
        (service == "live" ? reply.live() : reply.ready())) {
      return absl::OkStatus();
    }
  } while (std::chrono::system_clock::now() < deadline &&
           process_->Wait(std::chrono::milliseconds(0)) < 0);
  const int ended = process_->Wait(std::chrono::milliseconds(0));
  const std::string why = ended < 0
                              ? absl::StrCat("is not ", service, " after ", timeout.count(), " ms")
                              : absl::StrCat("has ended with ", ended);
  return absl::DeadlineExceededError(absl::StrCat("dmuond ", why, "; its log:\n", Log()));
}

int DaemonProcess::Stop() {
  process_->Signal(SIGTERM);
  return process_->Wait(std::chrono::minutes(1));
}

void DaemonProcess::Kill() {
  process_->Signal(SIGKILL);
  process_->Wait(std::chrono::minutes(1));
}

std::string DaemonProcess::Log() const {
  std::ifstream file(directory_ + "/log");
  return {std::istreambuf_iterator<char>(file), {}};
}

bool DaemonProcess::WaitLogged(const std::string& text) const {
  const auto deadline = std::chrono::steady_clock::now() + kHangsAfter;
  while (!absl::StrContains(Log(), text)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // between two looks
  }
  return true;
}

}  // namespace dmuond::testing
