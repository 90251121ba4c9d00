// Limits the length of strings that clients send, because they are kept, logged or shown. All
// limits are in text_limits.cc, with their reasons.
#ifndef DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_
#define DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace dmuond::server {

// Checks all strings of a request, those of messages in it too. INVALID_ARGUMENT names the field,
// its length and its limit; the reason is STRING_TOO_LONG, or that of other errors about the field.
// Data (bytes that nobody reads as text) is limited where it is used. Threads: any.
[[nodiscard]] absl::Status CheckText(const google::protobuf::Message& request);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_
