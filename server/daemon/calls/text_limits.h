// How long the strings may be that clients send: each is kept, logged or shown, and a session has
// some. All limits are in text_limits.cc, with their reasons.
#ifndef DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_
#define DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace dmuond::server {

// Looks at all strings of a request, those of its messages too. INVALID_ARGUMENT names the field,
// its length and its limit: STRING_TOO_LONG, or the reason that whatever is wrong with the field
// has. Data (bytes that nobody reads as text) is bounded where it is used. Threads: any.
[[nodiscard]] absl::Status CheckText(const google::protobuf::Message& request);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_TEXT_LIMITS_H_
