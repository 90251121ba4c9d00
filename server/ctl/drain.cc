// dmuonctl drain
#include <algorithm>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

std::string Text(const v1::DrainReply::Job& job) {
  if (job.last_committed_step() == 0) return "left; no step was committed\n";
  const std::string left = absl::StrCat("left after step ", job.last_committed_step());
  if (!job.has_durable_step()) {
    return absl::StrCat(left, "; there is no snapshot, its state goes with the daemon\n");
  }
  if (job.durable_step() == job.last_committed_step()) return left + ", which is saved\n";
  return absl::StrCat(left, "; the newest snapshot is of step ", job.durable_step(), "\n");
}

std::string Text(const v1::DrainReply& reply) {
  if (reply.jobs_size() == 0) return "left; no job was here\n";
  if (reply.jobs_size() == 1) return Text(reply.jobs(0));
  std::string text;
  for (const v1::DrainReply::Job& job : reply.jobs()) {
    absl::StrAppend(&text, "job '", job.name(), "': ", Text(job));
  }
  return text;
}

}  // namespace

int RunDrain(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("drain takes no arguments");
  Options patient = options;
  patient.timeout = std::max(options.timeout, options.drain_timeout);
  const auto reply = Call(patient, &v1::Admin::Stub::Drain, v1::DrainRequest());
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << Text(*reply);
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
