// What an error tells programs: a stable reason, and the values of its message by name. Inside a
// process they are payloads of an absl::Status; on the wire server/common/errors.h puts them into a
// google.rpc.ErrorInfo. docs/errors.md lists the reasons.
//
//   return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
//                Say("rank ", Named("rank", rank), " is at step ", Named("step", step), …));
//
// Threads: any.
#ifndef DMUOND_SCHEDULER_REASON_H_
#define DMUOND_SCHEDULER_REASON_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "scheduler/shown.h"

namespace dmuond::scheduler {

// Names and values, in the order of the message.
using Metadata = std::vector<std::pair<std::string, std::string>>;

struct Message {
  std::string text;
  Metadata metadata;
};

// A part of a message that has a name for programs, lower_snake_case. In the text it is shown as
// scheduler/shown.h says, whoever has written it; programs get it as it is.
struct NamedPart {
  const char* name;
  std::string value;
};
template <typename Value>
[[nodiscard]] NamedPart Named(const char* name, const Value& value) {
  return {name, absl::StrCat(value)};
}

inline void AppendPart(Message& message, const NamedPart& part) {
  message.text += Shown(part.value);
  message.metadata.emplace_back(part.name, part.value);
}
inline void AppendPart(Message& message, const absl::AlphaNum& part) {
  absl::StrAppend(&message.text, part);
}

inline void AppendPart(Message& message, const Message& part) {
  message.text += part.text;
  message.metadata.insert(message.metadata.end(), part.metadata.begin(), part.metadata.end());
}

// What absl::StrCat makes of the parts, and the named ones.
template <typename... Parts>
[[nodiscard]] Message Say(const Parts&... parts) {
  Message message;
  (AppendPart(message, parts), ...);
  return message;
}

// REQUIRES: code is not OK.
[[nodiscard]] absl::Status Error(absl::StatusCode code, absl::string_view reason,
                                 const Message& message);

// REQUIRES: !status.ok() (a status that is OK keeps no payload).
[[nodiscard]] absl::Status WithReason(absl::Status status, absl::string_view reason);
[[nodiscard]] absl::Status WithMetadata(absl::Status status, const Metadata& metadata);

// Empty where there is none.
[[nodiscard]] std::string ReasonOf(const absl::Status& status);
[[nodiscard]] Metadata MetadataOf(const absl::Status& status);

// As a part of another message.
[[nodiscard]] inline Message MessageOf(const absl::Status& status) {
  return {std::string(status.message()), MetadataOf(status)};
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_REASON_H_
