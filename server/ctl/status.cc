// dmuonctl status
#include <filesystem>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/mps_control.h"
#include "server/ctl/connection.h"
#include "server/ctl/job_text.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

// Why the group has not formed; empty: it has.
std::string WhoIsMissing(const v1::GetStatusReply& status) {
  if (status.missing_nodes_size() > 0) {
    return absl::StrCat(status.missing_nodes_size() == 1 ? "missing: node " : "missing: nodes ",
                        absl::StrJoin(status.missing_nodes(), ", "), "\n");
  }
  if (!status.not_joined().empty()) {
    return absl::StrCat("not in the group: ", status.not_joined(), "\n");
  }
  return "";
}

void Print(const v1::GetStatusReply& status) {
  std::cout << PictureAge(status.picture_age_ms()) << "dmuond " << status.version() << ", node "
            << status.node() << " of " << status.nodes() << " (" << status.group_state()
            << ", epoch " << status.epoch() << "), up " << HumanSeconds(status.uptime_s()) << ", "
            << status.socket() << "\n"
            << WhoIsMissing(status) << "device " << status.device_type();
  if (!status.core_type().empty()) std::cout << ", OpenBLAS core type " << status.core_type();
  std::cout << "\n";
  const std::string mps = status.socket() + MpsControl::kFolderSuffix;
  if (std::error_code error; std::filesystem::exists(mps + "/control", error)) {
    std::cout << "MPS is the daemon's own; trainers need " << MpsControl::kPipeVariable << "="
              << mps << "\n";
  }
  if (!status.snapshot_dir_hangs().empty()) {
    std::cout << "the snapshot directory hangs: " << status.snapshot_dir_hangs() << "\n";
  }
  if (status.lanes_size() > 0) {
    Table lanes({">lane", ">pid", "state", ">restarts", ">state memory", ">staging",
                 ">update (est.)", "device"});
    for (const v1::LaneStatus& lane : status.lanes()) {
      lanes.Add({absl::StrCat(lane.lane()), absl::StrCat(lane.pid()), lane.state(),
                 absl::StrCat(lane.restarts()), HumanBytes(lane.state_bytes()),
                 HumanBytes(lane.staging_bytes()), HumanMicroseconds(lane.load_us()),
                 lane.device()});
    }
    std::cout << "\n" << lanes.Text();
    for (const v1::LaneStatus& lane : status.lanes()) {
      if (lane.rail_silent_ms() == 0) continue;
      std::cout << "the rail of lane " << lane.lane() << " has carried nothing for "
                << lane.rail_silent_ms() / 1000
                << " s, though it should; the daemon's log says to whom\n";
    }
  }
  std::cout << "\n" << (status.has_job() ? JobText(status.job()) : "no job\n");
}

}  // namespace

int RunStatus(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("status takes no arguments");
  const auto status = Call(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return Fail(status.status());
  if (options.json) {
    PrintJson(ToJson(*status));
  } else {
    Print(*status);
  }
  return kExitOk;
}

}  // namespace dmuond::server::ctl
