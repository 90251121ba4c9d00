// One lane's process as the daemon sees it: it is started with a socket pair, gets commands as
// frames, and is watched until it ends.
//
//   auto lane = LaneProcess::Start({.binary = LaneBinary("/usr/bin/dmuond-lane"), .lane_index = 0,
//                                   .device = "cpu:2"},
//                                  {.on_report = …, .on_gone = …});
//   RETURN_IF_ERROR((*lane)->Send(configure, {state_fd, staging_fd, table_fd, board_fd}));
//
// The process inherits its socket (descriptor 3), an empty stdin, and a pipe for stdout and stderr
// that goes line by line into the daemon's log (field lane=). It is its own process group: a ctrl-C
// in the daemon's terminal does not reach it.
//
// Threads: Send() and pid() from any. One thread of its own reads, writes what did not fit into the
// socket, watches the process, and calls back, holding no lock.
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_PROCESS_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"
#include "server/common/line_buffer.h"
#include "server/daemon/lanes/lane_binary.h"
#include "server/daemon/lanes/outbox.h"

namespace dmuond::server {

using wire::UniqueFd;

class LaneProcess {
 public:
  struct Options {
    LaneBinary binary;   // dmuond-lane
    int lane_index = 0;  // on this node; for the log and lists of processes
    std::string device;  // "cpu:THREADS"
    // As NodeDevice::OfLaneEnvironment().
    std::vector<std::pair<std::string, std::string>> environment;
    std::vector<std::string> flags;  // more, for its program
    int lock = -1;  // a descriptor that it inherits and never uses: see SocketDir::lock()
    std::chrono::milliseconds stop_grace{3000};  // from Shutdown to SIGTERM, and then to SIGKILL
  };
  struct Callbacks {
    std::function<void(const v1::LaneReport&, std::vector<UniqueFd>)> on_report;
    // Called once, after the last report, if the process has ended while it was at work. Its
    // last words are "killed by signal 9 (Killed)" or "exit code 1", then ": " and its last line on
    // stderr if it has one.
    std::function<void(std::string last_words)> on_gone;
  };

  // NOT_FOUND or PERMISSION_DENIED naming the binary when it cannot be started. UNAVAILABLE or
  // RESOURCE_EXHAUSTED: the machine lacks processes, threads, memory or descriptors for it.
  static absl::StatusOr<std::unique_ptr<LaneProcess>> Start(Options options, Callbacks callbacks);

  ~LaneProcess();  // Stop()
  LaneProcess(const LaneProcess&) = delete;
  LaneProcess& operator=(const LaneProcess&) = delete;

  // Sends commands in order, and never blocks. `fds` stay the caller's and may be closed at once.
  // UNAVAILABLE, reason LANE_LOST: the process is gone. RESOURCE_EXHAUSTED: it has not read for a
  // long time, or this process has no descriptors left. Then it has missed the command, and is
  // killed, unless that was its configuration.
  absl::Status Send(const v1::LaneCommand& command, const std::vector<int>& fds = {});
  // The same for one that may wait until the next Send() or SendKept(), so that many are one write.
  absl::Status Keep(const v1::LaneCommand& command) DMUOND_EXCLUDES(mutex_);
  void SendKept() DMUOND_EXCLUDES(mutex_);

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] int lane_index() const { return options_.lane_index; }

  // Has the process give up what it does (LaneCommand.Release); one that has not within `patience`
  // is killed. No callback begins after the call. Returns at once.
  void Release(std::chrono::milliseconds patience) DMUOND_EXCLUDES(mutex_);
  [[nodiscard]] bool released() const DMUOND_EXCLUDES(mutex_);
  // A released process is used again: with these callbacks, and a configuration as the next
  // command. False: it is not released, or it has ended.
  [[nodiscard]] bool Reuse(Callbacks callbacks) DMUOND_EXCLUDES(mutex_);

  // Ends the process: Shutdown, SIGTERM, SIGKILL, with stop_grace between them. No callback begins
  // after the call. Returns at once; may be repeated.
  void BeginStop() DMUOND_EXCLUDES(mutex_);
  // Whether the process is gone, or released, by then.
  [[nodiscard]] bool WaitUntilAtRest(std::chrono::steady_clock::time_point deadline)
      DMUOND_EXCLUDES(mutex_);
  // BeginStop(), and waits for the end of the process and of a callback that runs.
  // REQUIRES: not from a callback, and not with a lock that a callback takes.
  void Stop();
  // SIGKILL, without waiting; Stop() follows. on_gone is not called.
  void Kill();
  // SIGKILL for one that hangs; on_gone follows, with `why` before its last words.
  void Condemn(std::string why) DMUOND_EXCLUDES(mutex_);
  // Processor time that it has used, of all its threads; nullopt: it has ended.
  [[nodiscard]] std::optional<std::chrono::milliseconds> ProcessorTime() const;

 private:
  LaneProcess(Options options, Callbacks callbacks, pid_t pid, UniqueFd socket, UniqueFd output,
              UniqueFd pidfd, UniqueFd wake);

  void Run();
  void ReadReport();
  void ReadOutput();
  void ReadRest();
  absl::Status Put(const v1::LaneCommand& command, const std::vector<int>& fds, bool send)
      DMUOND_EXCLUDES(mutex_);
  // Whether something still waits.
  bool FlushOutbox() DMUOND_EXCLUDES(mutex_);
  void CloseSocket() DMUOND_EXCLUDES(mutex_);
  void Keep(const std::string& line) DMUOND_EXCLUDES(mutex_);
  [[nodiscard]] bool stopping() const DMUOND_EXCLUDES(mutex_);
  // Whom reports go to; null: nobody.
  [[nodiscard]] std::shared_ptr<const Callbacks> Listener() const DMUOND_EXCLUDES(mutex_);
  void OnReleased() DMUOND_EXCLUDES(mutex_);
  // When a process that is to let go of its work is killed; max(): it is not to.
  [[nodiscard]] std::chrono::steady_clock::time_point release_by() const DMUOND_EXCLUDES(mutex_);
  void KillUnreleased() DMUOND_EXCLUDES(mutex_);
  [[nodiscard]] bool has_waiting() const DMUOND_EXCLUDES(mutex_);
  void Signal(int signal) const;
  void Wake() const;
  void Escalate();
  // The process's, as waitpid() has it.
  int WaitForEnd() const;
  void ReportEnd() DMUOND_EXCLUDES(mutex_);

  const Options options_;
  const pid_t pid_;
  const UniqueFd socket_;
  const UniqueFd output_;
  const UniqueFd pidfd_;
  const UniqueFd wake_;

  // The thread's own.
  bool socket_open_ = true;
  bool output_open_ = true;
  // When a process that has closed its socket, and so is of no use, is killed; max(): not yet.
  std::chrono::steady_clock::time_point kill_at_ = std::chrono::steady_clock::time_point::max();
  // What follows, and when, for one that has been told to stop; max(): nothing, or not yet.
  int stop_signal_ = 0;
  std::chrono::steady_clock::time_point escalate_at_ = std::chrono::steady_clock::time_point::max();
  LineBuffer lines_;

  mutable Mutex mutex_;
  enum class Stage : uint8_t { kAtWork, kReleasing, kReleased, kStopping };
  Stage stage_ DMUOND_GUARDED_BY(mutex_) = Stage::kAtWork;
  std::chrono::steady_clock::time_point release_by_ DMUOND_GUARDED_BY(mutex_);
  std::shared_ptr<const Callbacks> callbacks_ DMUOND_GUARDED_BY(mutex_);
  bool deaf_ DMUOND_GUARDED_BY(mutex_) = false;  // nothing that is sent can arrive any more
  bool gone_ DMUOND_GUARDED_BY(mutex_) = false;  // the process has ended and is reaped
  CondVar at_rest_;                              // gone_, or stage_, has changed
  Outbox outbox_ DMUOND_GUARDED_BY(mutex_);
  std::string last_line_ DMUOND_GUARDED_BY(mutex_);  // that it wrote
  std::string condemned_ DMUOND_GUARDED_BY(mutex_);  // why it was killed; empty: it was not

  Mutex join_mutex_;  // two callers of Stop()
  std::thread thread_ DMUOND_GUARDED_BY(join_mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_PROCESS_H_
