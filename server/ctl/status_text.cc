#include "server/ctl/status_text.h"

#include <filesystem>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/mps_control.h"
#include "server/ctl/connection.h"
#include "server/ctl/job_text.h"
#include "server/ctl/table.h"

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

}  // namespace

std::string StatusText(const v1::GetStatusReply& status) {
  std::ostringstream out;
  out << PictureAge(status.picture_age_ms()) << "dmuond " << status.version() << ", node "
      << status.node() << " of " << status.nodes() << " (" << status.group_state() << ", epoch "
      << status.epoch() << "), up " << HumanSeconds(status.uptime_s()) << ", " << status.socket()
      << "\n"
      << WhoIsMissing(status) << "device " << status.device_type();
  if (!status.core_type().empty()) out << ", OpenBLAS core type " << status.core_type();
  out << "\n";
  const std::string mps = status.socket() + MpsControl::kFolderSuffix;
  if (std::error_code error; std::filesystem::exists(mps + "/control", error)) {
    out << "MPS is the daemon's own; trainers need " << MpsControl::kPipeVariable << "=" << mps
        << "\n";
  }
  if (!status.snapshot_dir_hangs().empty()) {
    out << "the snapshot directory hangs: " << status.snapshot_dir_hangs() << "\n";
  }
  if (status.lanes_size() > 0) {
    Table lanes({">lane", ">pid", "state", ">restarts", ">state memory", ">staging",
                 ">snapshot copy", ">update (est.)", "device"});
    for (const v1::LaneStatus& lane : status.lanes()) {
      lanes.Add({absl::StrCat(lane.lane()), lane.has_pid() ? absl::StrCat(lane.pid()) : "none",
                 lane.state(), absl::StrCat(lane.restarts()), HumanBytes(lane.state_bytes()),
                 HumanBytes(lane.staging_bytes()), HumanBytes(lane.copy_bytes()),
                 HumanMicroseconds(lane.load_us()), lane.device()});
    }
    out << "\n" << lanes.Text();
    if (!status.lanes_accepted().empty()) {
      out << "lanes that differ from those that the job began with are accepted: "
          << status.lanes_accepted() << "\n";
    }
    for (const v1::LaneStatus& lane : status.lanes()) {
      if (lane.rail_silent_ms() == 0) continue;
      out << "the rail of lane " << lane.lane() << " has carried nothing for "
          << lane.rail_silent_ms() / 1000
          << " s, though it should; the daemon's log says to whom\n";
    }
  }
  out << "\n" << (status.has_job() ? JobText(status.job()) : "no job\n");
  if (status.jobs_size() > 1) {
    out << "\njobs here: " << absl::StrJoin(status.jobs(), ", ")
        << " (dmuonctl jobs, or --job=NAME)\n";
  }
  return out.str();
}

}  // namespace dmuond::server::ctl
