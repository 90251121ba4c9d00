// dmuonctl snapshot save, snapshot load: what a running daemon is asked for.
#include <algorithm>
#include <iostream>

#include "server/ctl/command.h"
#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunSnapshotSave(const Options& options) {
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.snapshot_timeout);
  const auto reply =
      Call(patient, &v1::Admin::Stub::SaveJob, AboutJob<v1::SaveJobRequest>(options));
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << "step " << reply->step() << " saved: " << reply->path() << "\n";
  }
  return kExitOk;
}

int RunSnapshotLoad(const Options& options, int64_t step) {
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.snapshot_timeout);
  auto request = AboutJob<v1::LoadJobRequest>(options);
  request.set_step(step);
  const auto reply = Call(patient, &v1::Admin::Stub::LoadJob, request);
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << "the job goes back to step " << reply->step()
              << "; its trainers are told with their next call\n";
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
