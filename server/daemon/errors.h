// Errors with a stable reason. Inside the daemon an error is an absl::Status whose payload carries
// the reason and the metadata; on the wire it is a google.rpc.Status with a google.rpc.ErrorInfo.
// docs/errors.md lists every reason.
//
//   return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
//                absl::StrCat("step ", got, " submitted, ", want, " is next"),
//                {{"step", absl::StrCat(got)}, {"next", absl::StrCat(want)}});
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_ERRORS_H_
#define DMUOND_SERVER_DAEMON_ERRORS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace grpc {
class Status;
}  // namespace grpc

namespace dmuond::server {

inline constexpr char kErrorDomain[] = "dmuond";

using ErrorMetadata = std::vector<std::pair<std::string, std::string>>;

// `reason` is UPPER_SNAKE_CASE. REQUIRES: code is not OK.
[[nodiscard]] absl::Status Error(absl::StatusCode code, absl::string_view reason,
                                 absl::string_view message, const ErrorMetadata& metadata = {});

// The reason of an error; "" where it has none, or for OK.
[[nodiscard]] std::string ReasonOf(const absl::Status& status);
[[nodiscard]] ErrorMetadata MetadataOf(const absl::Status& status);

// Gives a reason to an error that has none. An error that has one, and OK, come back unchanged.
[[nodiscard]] absl::Status WithReason(absl::Status status, absl::string_view reason);

// To the wire and back (errors_grpc.cc, the only part that needs gRPC). Every error carries an
// ErrorInfo: one without a reason gets "INTERNAL_ERROR" for INTERNAL and UNKNOWN and its code's
// name otherwise. Details that are no google.rpc.Status are left out.
[[nodiscard]] grpc::Status ToGrpc(const absl::Status& status);
[[nodiscard]] absl::Status FromGrpc(const grpc::Status& status);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_ERRORS_H_
