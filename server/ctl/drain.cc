// dmuonctl drain
#include <algorithm>
#include <iostream>

#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunDrain(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("drain takes no arguments");
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.drain_timeout);
  const auto reply = Call(patient, &v1::Admin::Stub::Drain, v1::DrainRequest());
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << "draining; last committed step " << reply->last_committed_step() << "\n";
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
