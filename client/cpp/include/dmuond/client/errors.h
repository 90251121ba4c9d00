// The reason of an error, for programs. A daemon's error keeps its status code and message, and
// carries a stable reason in UPPER_SNAKE_CASE (docs/errors.md lists them) and metadata with the
// names and both values. Errors of the client itself have reasons too:
//
//   DAEMON_LOST         UNAVAILABLE: the daemon has gone, and none took its place in time; the
//                       weights in the arenas are undefined
//   STATE_LOST          DATA_LOSS: neither a daemon nor a snapshot has the job's state any more
//   ROLLED_BACK         ABORTED: go on from last_committed_step(); metadata to_step, and
//                       fresh_memory ("true": weights and gradients lie in other memory)
//   DAEMON_UNREACHABLE  UNAVAILABLE: no daemon answers at the address, or it is stopped
//   WEIGHTS_REPUBLISHED FAILED_PRECONDITION: weights that were changed may have been overwritten by
//                       a group that formed anew: write them again, then Push
//   CUDA_FAILED         INTERNAL: a call of the CUDA driver has failed, as all do after a kernel of
//                       the trainer's has; end the process, and start a replacement; metadata call,
//                       result
//   SESSION_STATE       FAILED_PRECONDITION: a call out of order, or after Close
//   MESSAGE_TOO_LARGE   RESOURCE_EXHAUSTED: beyond 4 MiB; metadata bytes, limit_bytes
//   SOCKET_OWNER        PERMISSION_DENIED: the socket is somebody else's, and got no token; see
//                       Options::server_uid; metadata path, uid, own_uid
//
//   if (ReasonOf(status) == "JOB_HAS_STATE") …
//
// Threads: any.
#ifndef DMUOND_CLIENT_ERRORS_H_
#define DMUOND_CLIENT_ERRORS_H_

#include <map>
#include <string>

#include "absl/status/status.h"

namespace dmuond::client {

// Empty for OK, and for an error without a reason.
[[nodiscard]] std::string ReasonOf(const absl::Status& status);
[[nodiscard]] std::map<std::string, std::string> MetadataOf(const absl::Status& status);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_ERRORS_H_
