// dmuonctl status
#include <iostream>

#include "server/ctl/connection.h"
#include "server/ctl/status_text.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunStatus(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("status takes no arguments");
  const auto status =
      Call(options, &v1::Admin::Stub::GetStatus, AboutJob<v1::GetStatusRequest>(options));
  if (!status.ok()) return Fail(status.status());
  if (options.json) {
    PrintJson(ToJson(*status));
  } else {
    std::cout << StatusText(*status);
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
