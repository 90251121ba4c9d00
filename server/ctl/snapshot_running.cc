// dmuonctl snapshot save: what a running daemon is asked for.
#include <algorithm>
#include <iostream>

#include "server/ctl/command.h"
#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunSnapshotSave(const Options& options) {
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.snapshot_timeout);
  const auto reply = Call(patient, &v1::Admin::Stub::SaveJob, v1::SaveJobRequest());
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << "step " << reply->step() << " saved: " << reply->path() << "\n";
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
