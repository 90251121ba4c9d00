#include "server/ctl/connection.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/common/errors.h"
#include "server/daemon/process/socket_dir.h"

namespace dmuond::server::ctl {

std::string ResolveAddress(const std::string& address) {
  std::string resolved = address;
  const char* environment = std::getenv("DMUOND_ADDRESS");
  if (resolved.empty() && environment != nullptr) resolved = environment;
  if (resolved.empty()) return DefaultSocket();
  return std::string(absl::StripPrefix(resolved, "unix:"));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& socket) {
  if (absl::Status fits = CheckSocketPaths(socket); !fits.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(fits.message(), ": --address or DMUOND_ADDRESS names another"));
  }
  grpc::ChannelArguments arguments;
  // Plans and routing tables of large jobs pass gRPC's 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  // A daemon that starts is met soon after.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  // How long a connection may take to stand, whatever the name says.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  return grpc::CreateCustomChannel(absl::StrCat("unix:", socket, SocketDir::kAdminSuffix),
                                   grpc::InsecureChannelCredentials(), arguments);
}

absl::Status Explain(const grpc::Status& status, const std::string& socket) {
  absl::Status error = FromGrpc(status);
  if (absl::IsDeadlineExceeded(error) && ReasonOf(error).empty()) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the dmuond at ", socket, " has not answered in time (", error.message(),
        "): it is stopped or hangs, or the call takes longer, and whether it is done is not known; "
        "--timeout waits longer, `dmuonctl doctor` looks for the cause"));
  }
  if (!absl::IsUnavailable(error) || !ReasonOf(error).empty()) return error;
  if (::access(socket.c_str(), F_OK) == 0 &&
      ::access((socket + SocketDir::kAdminSuffix).c_str(), F_OK) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "there is ", socket, " and no ", socket, SocketDir::kAdminSuffix,
        ": a dmuond of an older release serves it, whose own dmuonctl must be used, or the socket "
        "is left over from one that has ended; `dmuonctl doctor` looks"));
  }
  return absl::UnavailableError(absl::StrCat("no dmuond answers at ", socket, " (", error.message(),
                                             "); --address or DMUOND_ADDRESS names another, "
                                             "`dmuonctl doctor` looks for the cause"));
}

}  // namespace dmuond::server::ctl
