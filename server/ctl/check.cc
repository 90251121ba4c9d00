// dmuonctl check: whether all copies of what a job holds are equal.
#include <iostream>

#include "server/ctl/connection.h"
#include "server/ctl/job_text.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunCheck(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("check takes no arguments: --job names the job");
  auto request = AboutJob<v1::CheckJobRequest>(options);
  request.set_timeout_ms(absl::ToInt64Milliseconds(options.check_timeout));
  Options patient = options;
  patient.timeout += options.check_timeout;
  const auto checked = Call(patient, &v1::Admin::Stub::CheckJob, request);
  if (!checked.ok()) return Fail(checked.status());
  if (options.json) {
    PrintJson(ToJson(checked->result()));
  } else {
    std::cout << CheckText(checked->result());
  }
  return checked->result().different() == 0 ? kExitOk : kExitFailed;
}

}  // namespace dmuond::server::ctl
