// How the client makes errors, and turns the daemon's into absl::Status. Threads: any.
#ifndef DMUOND_CLIENT_CPP_SRC_STATUS_H_
#define DMUOND_CLIENT_CPP_SRC_STATUS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dmuond/client/types.h"

namespace grpc {
class Status;
}  // namespace grpc

namespace dmuond::client {

inline constexpr char kMessageTooLarge[] = "MESSAGE_TOO_LARGE";
inline constexpr char kDaemonLost[] = "DAEMON_LOST";
inline constexpr char kDaemonUnreachable[] = "DAEMON_UNREACHABLE";
inline constexpr char kVersionMismatch[] = "VERSION_MISMATCH";
inline constexpr char kSocketOwner[] = "SOCKET_OWNER";
inline constexpr char kClaimExpired[] = "CLAIM_EXPIRED";
inline constexpr char kSessionState[] = "SESSION_STATE";
inline constexpr char kRolledBack[] = "ROLLED_BACK";
inline constexpr char kPeerLost[] = "PEER_LOST";
inline constexpr char kStateLost[] = "STATE_LOST";
inline constexpr char kCudaFailed[] = "CUDA_FAILED";

// REQUIRES: code is not OK.
[[nodiscard]] absl::Status MakeError(absl::StatusCode code, const char* reason,
                                     const std::string& message,
                                     const std::map<std::string, std::string>& metadata = {});
// `how`: AttachSocket::HowItEnded().
[[nodiscard]] absl::Status DaemonLost(absl::string_view what, absl::string_view how);
[[nodiscard]] absl::Status WrongState(const std::string& message);
// What Settle() is to do. Metadata: to_step, and epoch, for the acknowledgement; 0: it is made.
// And cause: PEER_LOST, where nobody has asked for it.
[[nodiscard]] absl::Status RolledBack(int64_t to_step, uint32_t epoch, bool asked);
// What the caller is told then. Metadata: to_step, and fresh_memory ("true" or "false").
[[nodiscard]] absl::Status WentBack(int64_t to_step, bool fresh_memory);
[[nodiscard]] absl::Status StateLost(const std::string& message);
// Of an outcome that no retry can help.
[[nodiscard]] absl::Status Aborted(const Outcome& outcome);

// The error of call `name`, with the reason and metadata of its ErrorInfo.
[[nodiscard]] absl::Status FromGrpc(const char* name, const grpc::Status& status);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_STATUS_H_
