#include "server/daemon/lanes/lane_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/frame.h"
#include "dmuond/wire/start_thread.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/lanes/lane_spawn.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSocketBufferBytes = 4 << 20;

std::string DescribeEnd(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status);
    return absl::StrCat("killed by signal ", signal, " (", ::strsignal(signal), ")");
  }
  return absl::StrCat("exit code ", WEXITSTATUS(wait_status));
}

int MillisecondsUntil(Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

bool Readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, 0) > 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaneProcess>> LaneProcess::Start(Options options,
                                                                Callbacks callbacks) {
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  absl::StatusOr<SpawnedLane> spawned =
      SpawnLane(options.binary, options.lane_index, options.device, options.environment,
                options.lock, options.flags);
  if (!spawned.ok()) return spawned.status();
  ::setsockopt(spawned->socket.get(), SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes,
               sizeof(kSocketBufferBytes));
  std::unique_ptr<LaneProcess> lane(new LaneProcess(
      std::move(options), std::move(callbacks), spawned->pid, std::move(spawned->socket),
      std::move(spawned->output), std::move(spawned->pidfd), std::move(wake)));
  absl::StatusOr<std::thread> thread =
      wire::StartThread("a lane", [raw = lane.get()] { raw->Run(); });
  if (!thread.ok()) {
    lane->Signal(SIGKILL);
    lane->WaitForEnd();
    return thread.status();
  }
  MutexLock lock(lane->join_mutex_);
  lane->thread_ = *std::move(thread);
  return lane;
}

LaneProcess::LaneProcess(Options options, Callbacks callbacks, pid_t pid, UniqueFd socket,
                         UniqueFd output, UniqueFd pidfd, UniqueFd wake)
    : options_(std::move(options)),
      pid_(pid),
      socket_(std::move(socket)),
      output_(std::move(output)),
      pidfd_(std::move(pidfd)),
      wake_(std::move(wake)),
      callbacks_(std::make_shared<const Callbacks>(std::move(callbacks))) {}

LaneProcess::~LaneProcess() { Stop(); }

absl::Status LaneProcess::Put(const v1::LaneCommand& command, const std::vector<int>& fds,
                              bool send) {
  const std::string body = command.SerializeAsString();
  bool waiting = false;
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = deaf_ ? absl::UnavailableError("its socket is closed") : outbox_.Keep(body, fds);
    if (send && status.ok()) status = outbox_.Flush(socket_.get());
    waiting = send && !outbox_.empty();
  }
  if (waiting) Wake();
  // The lane would go on without the command: no descriptors were left, or it reads none. One that
  // is not configured yet does nothing, and whoever starts it ends it.
  if (absl::IsResourceExhausted(status) && !command.has_configure()) {
    Condemn(absl::StrCat("a command could not be sent to it: ", status.message()));
  }
  if (!absl::IsUnavailable(status)) return status;
  return Error(absl::StatusCode::kUnavailable, "LANE_LOST",
               Say("lane ", Named("lane", options_.lane_index), " (pid ", Named("pid", pid_),
                   ") is gone: ", status.message()));
}

absl::Status LaneProcess::Send(const v1::LaneCommand& command, const std::vector<int>& fds) {
  return Put(command, fds, /*send=*/true);
}

absl::Status LaneProcess::Keep(const v1::LaneCommand& command) {
  return Put(command, {}, /*send=*/false);
}

void LaneProcess::SendKept() {
  if (FlushOutbox()) Wake();
}

void LaneProcess::Release(std::chrono::milliseconds patience) {
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kAtWork) return;
    stage_ = Stage::kReleasing;
    release_by_ = Clock::now() + patience;
  }
  v1::LaneCommand command;
  command.mutable_release();
  // A lane that cannot be told is gone, or killed in time.
  Send(command).IgnoreError();
  Wake();
}

void LaneProcess::OnReleased() {
  MutexLock lock(mutex_);
  if (stage_ != Stage::kReleasing) return;
  stage_ = Stage::kReleased;
  at_rest_.NotifyAll();
}

bool LaneProcess::released() const {
  MutexLock lock(mutex_);
  return stage_ == Stage::kReleased && !gone_;
}

bool LaneProcess::Reuse(Callbacks callbacks) {
  MutexLock lock(mutex_);
  if (stage_ != Stage::kReleased || gone_) return false;
  stage_ = Stage::kAtWork;
  callbacks_ = std::make_shared<const Callbacks>(std::move(callbacks));
  return true;
}

std::shared_ptr<const LaneProcess::Callbacks> LaneProcess::Listener() const {
  MutexLock lock(mutex_);
  return stage_ == Stage::kAtWork ? callbacks_ : nullptr;
}

Clock::time_point LaneProcess::release_by() const {
  MutexLock lock(mutex_);
  return stage_ == Stage::kReleasing ? release_by_ : Clock::time_point::max();
}

void LaneProcess::KillUnreleased() {
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kReleasing) return;
    stage_ = Stage::kStopping;
  }
  log::Warn("lane does not let go of its work and is killed",
            {{"lane", options_.lane_index}, {"pid", pid_}});
  Signal(SIGKILL);
}

void LaneProcess::BeginStop() {
  {
    MutexLock lock(mutex_);
    if (std::exchange(stage_, Stage::kStopping) == Stage::kStopping) return;
  }
  v1::LaneCommand command;
  command.mutable_shutdown();
  // A lane that cannot be told is gone, or hears the signals that follow.
  Send(command).IgnoreError();
  Wake();
}

void LaneProcess::Stop() {
  BeginStop();
  MutexLock lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void LaneProcess::Kill() {
  {
    MutexLock lock(mutex_);
    stage_ = Stage::kStopping;
  }
  Signal(SIGKILL);
}

void LaneProcess::Condemn(std::string why) {
  {
    MutexLock lock(mutex_);
    condemned_ = std::move(why);
  }
  Signal(SIGKILL);
}

std::optional<std::chrono::milliseconds> LaneProcess::ProcessorTime() const {
  {
    // Until it is reaped, the pid is nobody else's.
    MutexLock lock(mutex_);
    if (gone_) return std::nullopt;
  }
  clockid_t clock{};
  timespec used{};
  if (::clock_getcpuclockid(pid_, &clock) != 0 || ::clock_gettime(clock, &used) != 0) {
    return std::nullopt;
  }
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec));
}

bool LaneProcess::WaitUntilAtRest(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (!gone_ && stage_ != Stage::kReleased) {
    if (!at_rest_.WaitUntil(mutex_, deadline)) return gone_ || stage_ == Stage::kReleased;
  }
  return true;
}

void LaneProcess::Signal(int signal) const {
  // By pidfd: a pid may belong to another process by now.
  ::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, nullptr, 0);
}

void LaneProcess::Wake() const {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

// Shutdown has been sent when the first grace begins.
void LaneProcess::Escalate() {
  if (stop_signal_ != 0) {
    log::Warn("lane does not stop", {{"lane", options_.lane_index},
                                     {"pid", pid_},
                                     {"follows", stop_signal_ == SIGTERM ? "SIGTERM" : "SIGKILL"}});
    Signal(stop_signal_);
  }
  const bool last = stop_signal_ == SIGKILL;
  stop_signal_ = stop_signal_ == 0 ? SIGTERM : SIGKILL;
  escalate_at_ = last ? Clock::time_point::max() : Clock::now() + options_.stop_grace;
}

bool LaneProcess::stopping() const {
  MutexLock lock(mutex_);
  return stage_ == Stage::kStopping;
}

bool LaneProcess::has_waiting() const {
  MutexLock lock(mutex_);
  return !outbox_.empty();
}

void LaneProcess::Run() {
  for (;;) {
    const int16_t socket_events = static_cast<int16_t>(has_waiting() ? POLLIN | POLLOUT : POLLIN);
    std::array<pollfd, 4> polled = {{{pidfd_.get(), POLLIN, 0},
                                     {wake_.get(), POLLIN, 0},
                                     {output_open_ ? output_.get() : -1, POLLIN, 0},
                                     {socket_open_ ? socket_.get() : -1, socket_events, 0}}};
    const Clock::time_point next = std::min({kill_at_, escalate_at_, release_by()});
    if (::poll(polled.data(), polled.size(), MillisecondsUntil(next)) < 0) continue;  // EINTR
    if (polled[1].revents != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t taken = ::read(wake_.get(), &count, sizeof(count));
    }
    if (polled[2].revents != 0) ReadOutput();
    if ((polled[3].revents & POLLOUT) != 0) FlushOutbox();
    if ((polled[3].revents & ~POLLOUT) != 0) ReadReport();
    if (polled[0].revents != 0) break;
    if (Clock::now() >= release_by()) KillUnreleased();
    if (Clock::now() >= escalate_at_ || (stop_signal_ == 0 && stopping())) Escalate();
    if (Clock::now() >= kill_at_) {
      Signal(SIGKILL);
      kill_at_ = Clock::time_point::max();
    }
  }
  ReadRest();
  ReportEnd();
}

void LaneProcess::ReadReport() {
  absl::StatusOr<wire::Frame> frame = wire::ReceiveFrame(socket_.get());
  v1::LaneReport report;
  if (frame.ok() && !report.ParseFromString(frame->body)) {
    frame = absl::InvalidArgumentError(
        absl::StrCat("a report of ", frame->body.size(), " bytes is no LaneReport"));
  }
  if (frame.ok()) {
    if (report.has_released()) {
      OnReleased();
    } else if (const auto listener = Listener(); listener != nullptr) {
      listener->on_report(report, std::move(frame->fds));
    }
    return;
  }
  if (absl::IsInvalidArgument(frame.status())) {
    log::Error("lane speaks nonsense and is killed",
               {{"lane", options_.lane_index}, {"error", frame.status()}});
    Signal(SIGKILL);
  }
  CloseSocket();
}

void LaneProcess::CloseSocket() {
  socket_open_ = false;
  kill_at_ = Clock::now() + options_.stop_grace;
  MutexLock lock(mutex_);
  deaf_ = true;
  outbox_.Clear();
}

bool LaneProcess::FlushOutbox() {
  MutexLock lock(mutex_);
  if (!outbox_.Flush(socket_.get()).ok()) {
    // The end is read from the socket, after the reports that still lie in it.
    deaf_ = true;
    outbox_.Clear();
  }
  return !outbox_.empty();
}

void LaneProcess::ReadOutput() {
  std::array<char, 4096> bytes;
  const ssize_t size = ::read(output_.get(), bytes.data(), bytes.size());
  if (size < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (size <= 0) {
    output_open_ = false;
    return;
  }
  lines_.Append({bytes.data(), static_cast<size_t>(size)},
                [this](const std::string& line) { Keep(line); });
}

void LaneProcess::Keep(const std::string& line) {
  log::Relay(line, {{"lane", options_.lane_index}, {"pid", pid_}});
  MutexLock lock(mutex_);
  last_line_ = line;
}

void LaneProcess::ReadRest() {
  // The process is dead, but a child of it could hold pipe and socket open: take what lies there.
  while (socket_open_ && Readable(socket_.get())) ReadReport();
  while (output_open_ && Readable(output_.get())) ReadOutput();
  lines_.Flush([this](const std::string& line) { Keep(line); });
}

int LaneProcess::WaitForEnd() const {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

void LaneProcess::ReportEnd() {
  std::string last_words = DescribeEnd(WaitForEnd());
  std::shared_ptr<const Callbacks> listener;
  {
    MutexLock lock(mutex_);
    deaf_ = true;
    gone_ = true;
    outbox_.Clear();
    at_rest_.NotifyAll();
    if (stage_ == Stage::kAtWork) listener = callbacks_;
    if (!condemned_.empty()) last_words = absl::StrCat(condemned_, " (", last_words, ")");
    if (!last_line_.empty()) absl::StrAppend(&last_words, ": ", last_line_);
  }
  if (listener != nullptr) listener->on_gone(std::move(last_words));
}

}  // namespace dmuond::server
