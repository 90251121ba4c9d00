// dmuonctl drain
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "server/ctl/connection.h"
#include "server/ctl/surroundings.h"
#include "server/ctl/to_json.h"
#include "server/daemon/process/socket_dir.h"

namespace dmuond::server::ctl {
namespace {

// A daemon has answered, and takes at most 10 s for the rest of leaving.
constexpr absl::Duration kEndsWithin = absl::Seconds(15);
constexpr pid_t kInit = 1;

// The daemon's process, to wait for its end.
class ServingProcess {
 public:
  explicit ServingProcess(const std::string& socket) {
    const auto connection =
        ConnectTo(socket + SocketDir::kAdminSuffix, SOCK_STREAM | SOCK_NONBLOCK);
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (!connection.ok() ||
        ::getsockopt(connection->get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
      return;
    }
    // 0 is a process of a PID namespace that cannot be seen from here. With a container's init
    // process every other one there ends, this one as well.
    if (peer.pid <= kInit) return;
    pid_ = peer.pid;
    pidfd_.Reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }
  // OK: it has ended, or it cannot be seen.
  [[nodiscard]] absl::Status AwaitEnd() const {
    if (!pidfd_.valid()) return absl::OkStatus();
    pollfd polled{pidfd_.get(), POLLIN, 0};
    const auto timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(kEndsWithin));
    if (::poll(&polled, 1, timeout_ms) > 0) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "the daemon has left its jobs, and its process ", pid_, " has not ended within ",
        absl::FormatDuration(kEndsWithin),
        ": no other one can serve this socket before; its log says what it waits for"));
  }

 private:
  pid_t pid_ = 0;
  wire::UniqueFd pidfd_;
};

std::string Text(const v1::DrainReply::Job& job) {
  if (job.last_committed_step() == 0) return "left; no step was committed\n";
  const std::string left = absl::StrCat("left after step ", job.last_committed_step());
  if (!job.has_durable_step()) {
    return absl::StrCat(left, "; there is no snapshot, its state goes with the daemon\n");
  }
  if (job.durable_step() == job.last_committed_step()) return left + ", which is saved\n";
  return absl::StrCat(left, "; the newest snapshot is of step ", job.durable_step(), "\n");
}

std::string Text(const v1::DrainReply& reply) {
  if (reply.jobs_size() == 0) return "left; no job was here\n";
  if (reply.jobs_size() == 1) return Text(reply.jobs(0));
  std::string text;
  for (const v1::DrainReply::Job& job : reply.jobs()) {
    absl::StrAppend(&text, "job '", job.name(), "': ", Text(job));
  }
  return text;
}

}  // namespace

int RunDrain(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("drain takes no arguments");
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.drain_timeout);
  const ServingProcess process(options.address);
  v1::DrainRequest request;
  request.set_force(options.force);
  const auto reply = Call(patient, &v1::Admin::Stub::Drain, request);
  if (!reply.ok()) return Fail(reply.status());
  const absl::Status ended = process.AwaitEnd();
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else if (ended.ok()) {
    std::cout << Text(*reply);
  }
  return ended.ok() ? kExitOk : Fail(ended);
}

}  // namespace dmuond::server::ctl
