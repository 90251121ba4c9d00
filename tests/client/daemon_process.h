// A dmuond of a test's own: on a private socket in a directory of its own, ready when Start()
// returns, gone with its directory when the object goes. The programs are those beside the test's.
//
//   auto daemon = DaemonProcess::Start({.devices = "cpu:2"});
//   ASSERT_TRUE(daemon.ok()) << daemon.status();
//   … (*daemon)->address() …
//   EXPECT_EQ((*daemon)->Stop(), 0);
//
// Threads: one at a time; address() from any.
#ifndef DMUOND_TESTS_CLIENT_DAEMON_PROCESS_H_
#define DMUOND_TESTS_CLIENT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::testing {

// What has not happened by then never does: a busy machine fails no test.
inline constexpr std::chrono::seconds kHangsAfter{180};

// A child process that ends with the thread that started it: start it from the main one. Output
// goes to a file or, without one, to ours.
class ChildProcess {
 public:
  // `program` is looked for beside this one.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::string& program,
                                                             std::vector<std::string> arguments,
                                                             const std::string& output_path = "");
  ~ChildProcess();  // kills it, if it lives
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void Signal(int signal) const;
  // The exit code, or 128 + the signal that ended it. -1: it still runs after `timeout`.
  int Wait(std::chrono::milliseconds timeout);
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  ChildProcess(pid_t pid, wire::UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}
  const pid_t pid_;
  const wire::UniqueFd pidfd_;
  int exit_code_ = -1;
};

class DaemonProcess {
 public:
  struct Options {
    std::string devices = "cpu:1";
    std::vector<std::string> flags;  // further ones
    // In a group, only a formed one is ready: wait for "live" then, and for the others later.
    std::string wait_for = "ready";
    std::chrono::milliseconds timeout = kHangsAfter;
  };
  // DEADLINE_EXCEEDED with the daemon's log when it is not ready in time, or has ended.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(Options options);
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start() { return Start(Options()); }
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] pid_t pid() const { return process_->pid(); }
  // Waits until the daemon says that it is what `service` is, live or ready, or has ended.
  absl::Status WaitServing(const std::string& service, std::chrono::milliseconds timeout) const;
  // SIGTERM; the exit code, -1 when it has not left in a minute.
  int Stop();
  // The exit code of one that leaves by itself; -1: it still runs after `timeout`.
  int Wait(std::chrono::milliseconds timeout) { return process_->Wait(timeout); }
  void Kill();
  // Its successor, with the same flags at the same address. REQUIRES: it has ended.
  absl::Status StartAgain();
  [[nodiscard]] std::string Log() const;
  // Waits until the log has the text; false when it has not after half a minute.
  [[nodiscard]] bool WaitLogged(const std::string& text) const;

 private:
  explicit DaemonProcess(Options options, std::string directory);
  absl::Status Launch();
  const Options options_;
  const std::string directory_;
  const std::string address_;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_DAEMON_PROCESS_H_
