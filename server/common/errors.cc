#include "server/common/errors.h"

#include <utility>

namespace dmuond::server {

absl::Status Error(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                   const ErrorMetadata& metadata) {
  return WithMetadata(scheduler::WithReason(absl::Status(code, message), reason), metadata);
}

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  if (status.ok() || !ReasonOf(status).empty()) return status;
  return scheduler::WithReason(std::move(status), reason);
}

}  // namespace dmuond::server
