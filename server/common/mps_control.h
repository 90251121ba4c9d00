// The control daemon of CUDA's multi-process service (MPS) that a dmuond runs for itself
// (--mps=managed): `nvidia-cuda-mps-control -f`, found on PATH, in a folder beside the socket.
//
//   absl::StatusOr<std::unique_ptr<MpsControl>> mps = MpsControl::Start(folder, wait);
//   … serve, and call (*mps)->Watch() now and then …
//   (*mps)->End();  // after the lanes
//
// The process is in a session of its own. It outlives a dmuond that is killed, because trainers and
// lanes are its clients and would lose their contexts with it: the next dmuond at that socket takes
// it over. End() ends it and removes the folder. Without End() the destructor does so with a
// process that this object has started, and leaves one that it took over.
//
// One object owns the process: main() of dmuond has it. Threads: one; static functions: any.
#ifndef DMUOND_SERVER_COMMON_MPS_CONTROL_H_
#define DMUOND_SERVER_COMMON_MPS_CONTROL_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server {

class MpsControl {
 public:
  static constexpr char kFolderSuffix[] = ".mps";
  // The longest name of a socket that the program makes in its folder.
  static constexpr char kLongestName[] = "/control_privileged";
  // What the program and its clients find each other by.
  static constexpr char kPipeVariable[] = "CUDA_MPS_PIPE_DIRECTORY";
  static constexpr char kLogVariable[] = "CUDA_MPS_LOG_DIRECTORY";
  // SIGTERM, and SIGKILL after so long.
  static constexpr std::chrono::milliseconds kEndsWithin{3000};

  // Takes over the control daemon that listens in `folder`, or starts one and returns when it
  // listens. `wait` waits for the time that it is given; true: give up. CANCELLED: it gave up.
  // NOT_FOUND: the program is not on PATH. FAILED_PRECONDITION: the folder is someone else's, or
  // its control daemon cannot be seen. UNAVAILABLE: the program has ended, and what it has said.
  // DEADLINE_EXCEEDED: it does not listen.
  static absl::StatusOr<std::unique_ptr<MpsControl>> Start(
      std::string folder, absl::FunctionRef<bool(std::chrono::milliseconds)> wait);
  ~MpsControl();
  MpsControl(const MpsControl&) = delete;
  MpsControl& operator=(const MpsControl&) = delete;

  // Starts a process again that has ended, and logs it: at once, or after a pause that grows while
  // it keeps ending. Does not wait.
  void Watch();
  void End(std::chrono::milliseconds patience = kEndsWithin);

  // The process that listens in the folder; 0: none does. An error: that cannot be found out.
  static absl::StatusOr<pid_t> ListenerIn(const std::string& folder);
  // Ends what a dmuond that will have no successor has left in the folder.
  static void EndLeftIn(const std::string& folder);
  // Both variables, for a client's environment.
  static std::vector<std::pair<std::string, std::string>> VariablesOf(const std::string& folder);

 private:
  explicit MpsControl(std::string folder) : folder_(std::move(folder)) {}

  absl::Status TakeOver(pid_t pid);
  absl::Status Spawn();
  absl::Status AwaitListening(absl::FunctionRef<bool(std::chrono::milliseconds)> wait);
  [[nodiscard]] bool EndsWithin(std::chrono::milliseconds patience) const;
  // REQUIRES: it has ended. How, and its last words.
  std::string Reap();

  const std::string folder_;
  pid_t pid_ = 0;
  wire::UniqueFd pidfd_;  // not valid: no process runs
  bool own_ = false;      // this process's child
  std::chrono::steady_clock::time_point started_;
  std::chrono::milliseconds pause_{0};  // from that start to the next one, at least
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_MPS_CONTROL_H_
