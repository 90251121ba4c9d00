// A process that dmuonctl starts and waits for. Threads: one.
#ifndef DMUOND_SERVER_CTL_CHILD_H_
#define DMUOND_SERVER_CTL_CHILD_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server::ctl {

class Child {
 public:
  struct Options {
    std::vector<std::string> arguments;    // the program first; looked for in PATH
    std::vector<std::string> environment;  // "NAME=value", added to this process's
    bool inherits = true;                  // false: `environment` is all that it gets
    bool own_group = false;                // a ctrl-C of the terminal does not reach it
    bool ends_with_parent = false;         // it gets SIGTERM when the thread that starts it ends
    int output = -1;                       // its stdout and stderr; -1: this process's
    bool input = true;                     // this process's stdin; false: nothing
    std::vector<int> blocked;              // signals that wait until the program takes them
  };
  // NOT_FOUND, PERMISSION_DENIED: the program cannot be run.
  static absl::StatusOr<Child> Start(const Options& options);

  [[nodiscard]] pid_t pid() const { return pid_; }
  // Readable when the process has ended.
  [[nodiscard]] int pidfd() const { return pidfd_.get(); }
  void Signal(int signal) const;
  // Its wait status, if it has ended. Ask again as often as you like.
  [[nodiscard]] std::optional<int> Ended();
  // As a shell says it: the exit code, or 128 + signal. REQUIRES: Ended().
  [[nodiscard]] int ExitCode() const;

 private:
  Child(pid_t pid, wire::UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid_;
  wire::UniqueFd pidfd_;
  std::optional<int> status_;
};

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_CHILD_H_
