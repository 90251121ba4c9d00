// Errors with a stable reason. Inside the daemon an error is an absl::Status whose payloads carry
// the reason and the metadata (scheduler/reason.h); on the wire it is a google.rpc.Status with a
// google.rpc.ErrorInfo. docs/errors.md lists every reason.
//
//   return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
//                Say("step ", Named("step", got), " came, not ", Named("next", want)));
//
// Threads: any.
#ifndef DMUOND_SERVER_COMMON_ERRORS_H_
#define DMUOND_SERVER_COMMON_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "scheduler/reason.h"

namespace grpc {
class Status;
}  // namespace grpc

namespace dmuond::server {

inline constexpr char kErrorDomain[] = "dmuond";

using ErrorMetadata = scheduler::Metadata;
using scheduler::Error;
using scheduler::MetadataOf;
using scheduler::Named;
using scheduler::ReasonOf;
using scheduler::Say;
using scheduler::WithMetadata;

// An error whose message has no named parts, or whose metadata the caller has already. `reason` is
// UPPER_SNAKE_CASE. REQUIRES: code is not OK.
[[nodiscard]] absl::Status Error(absl::StatusCode code, absl::string_view reason,
                                 absl::string_view message, const ErrorMetadata& metadata = {});

// Gives a reason to an error that has none. An error that has one, and OK, come back unchanged.
[[nodiscard]] absl::Status WithReason(absl::Status status, absl::string_view reason);

// To the wire and back (errors_grpc.cc, the only part that needs gRPC). Every error carries an
// ErrorInfo; the reason of an error without one is "INTERNAL_ERROR" for INTERNAL and UNKNOWN, and
// its code's name otherwise. Text that others have written is escaped, and text that is too long
// for gRPC's trailers is cut. Details that are no google.rpc.Status are left out.
[[nodiscard]] grpc::Status ToGrpc(const absl::Status& status);
[[nodiscard]] absl::Status FromGrpc(const grpc::Status& status);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_ERRORS_H_
