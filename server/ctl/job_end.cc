// dmuonctl job end NAME [--save]
#include <algorithm>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/ctl/command.h"
#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

std::string Text(const std::string& name, const v1::EndJobReply& reply) {
  const std::string ended = absl::StrCat("job '", name, "' has ended");
  if (reply.last_committed_step() == 0) return ended + "; no step was committed\n";
  return absl::StrCat(ended, " after step ", reply.last_committed_step(), "; ",
                      reply.has_durable_step()
                          ? absl::StrCat("its newest snapshot is of step ", reply.durable_step())
                          : "there is no snapshot of it",
                      "\n");
}

}  // namespace

int RunJob(const Options& options, const Arguments& arguments) {
  if (arguments.size() != 2 || arguments[0] != "end") {
    return FailUsage("job takes: end NAME [--save]; `dmuonctl jobs` lists names");
  }
  Options patient = options;
  if (options.save) patient.timeout = std::max(options.timeout, options.snapshot_timeout);
  v1::EndJobRequest request;
  request.set_name(arguments[1]);
  request.set_save(options.save);
  const auto reply = Call(patient, &v1::Admin::Stub::EndJob, request);
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << Text(arguments[1], *reply);
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
