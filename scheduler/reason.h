// The stable reason of an error, for programs: what google.rpc.ErrorInfo.reason will say. Travels
// as a payload of absl::Status, which gRPC knows nothing of. docs/errors.md lists the reasons.
//
//   return WithReason(absl::FailedPreconditionError("…"), "STEP_OUT_OF_ORDER");
#ifndef DMUOND_SCHEDULER_REASON_H_
#define DMUOND_SCHEDULER_REASON_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace dmuond::scheduler {

inline constexpr const char* kReasonUrl = "dmuond/reason";

// REQUIRES: !status.ok() (a status that is OK keeps no payload).
[[nodiscard]] inline absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

// Empty where there is none.
[[nodiscard]] inline std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_REASON_H_
