// Any message as JSON for programs: proto's own field names, integers as integers (protobuf's own
// JSON makes 64-bit ones strings), enums by name, bytes in hexadecimal. A digest is text in
// hexadecimal, as tables show it: many readers of JSON round numbers above 2^53. Fields without
// presence are always there; optional ones and messages that are unset are left out.
#ifndef DMUOND_SERVER_CTL_TO_JSON_H_
#define DMUOND_SERVER_CTL_TO_JSON_H_

#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"

namespace dmuond::server::ctl {

using Json = nlohmann::ordered_json;

[[nodiscard]] Json ToJson(const google::protobuf::Message& message);
// To stdout, indented, with a line's end.
void PrintJson(const Json& json);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_TO_JSON_H_
