// dmuonctl log-level LEVEL
#include <iostream>

#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunLogLevel(const Options& options, const Arguments& arguments) {
  if (arguments.size() != 1) {
    return FailUsage("log-level takes one argument: trace, debug, info, warn or error");
  }
  v1::SetLogLevelRequest request;
  request.set_level(arguments[0]);
  const auto reply = Call(options, &v1::Admin::Stub::SetLogLevel, request);
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    Json json = ToJson(*reply);
    json["level"] = arguments[0];
    PrintJson(json);
  } else {
    std::cout << "log level " << arguments[0] << ", until now " << reply->previous() << "\n";
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
