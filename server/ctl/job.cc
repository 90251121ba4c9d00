// dmuonctl job end NAME [--save]
// dmuonctl job accept-lanes NAME
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

std::string Text(const std::string& name, const v1::AcceptLanesReply& reply) {
  return absl::StrCat("job '", name, "' goes on with these lanes of node ", reply.node(), ": ",
                      reply.what(), "\n");
}

template <typename Reply>
int Print(const Options& options, const std::string& name, const absl::StatusOr<Reply>& reply) {
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
  } else {
    std::cout << Text(name, *reply);
  }
  return kExitOk;
}

int RunEnd(const Options& options, const std::string& name) {
  Options patient = options;
  if (options.save) patient.timeout = std::max(options.timeout, options.snapshot_timeout);
  v1::EndJobRequest request;
  request.set_name(name);
  request.set_save(options.save);
  return Print(options, name, Call(patient, &v1::Admin::Stub::EndJob, request));
}

int RunAcceptLanes(const Options& options, const std::string& name) {
  v1::AcceptLanesRequest request;
  request.set_name(name);
  return Print(options, name, Call(options, &v1::Admin::Stub::AcceptLanes, request));
}

}  // namespace

int RunJob(const Options& options, const Arguments& arguments) {
  if (arguments.size() == 2 && arguments[0] == "end") return RunEnd(options, arguments[1]);
  if (arguments.size() == 2 && arguments[0] == "accept-lanes" && !options.save) {
    return RunAcceptLanes(options, arguments[1]);
  }
  return FailUsage(
      "job takes: end NAME [--save], or accept-lanes NAME; `dmuonctl jobs` lists names");
}

}  // namespace dmuond::server::ctl
