// dmuonctl ready: for probes that run a command.
#include <iostream>

#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunReady(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("ready takes no arguments");
  const auto reply = Call(options, &v1::Admin::Stub::GetReadiness, v1::GetReadinessRequest());
  if (!reply.ok()) return Fail(reply.status());
  const bool ready = reply->live() && reply->ready();
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else if (ready) {
    std::cout << "ready\n";
  } else {
    std::cerr << "dmuonctl: not ready: " << reply->why_not() << "\n";
  }
  return ready ? kExitOk : kExitFailed;
}

}  // namespace dmuond::server::ctl
