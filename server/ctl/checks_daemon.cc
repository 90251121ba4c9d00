#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dmuond/v1/attach.pb.h"
#include "dmuond/wire/frame.h"
#include "dmuond/wire/socket_path.h"
#include "server/common/module_id.h"
#include "server/ctl/checks.h"
#include "server/ctl/connection.h"
#include "server/ctl/job_text.h"
#include "server/ctl/surroundings.h"
#include "server/ctl/table.h"
#include "server/daemon/process/socket_dir.h"
#include "server/version.h"

namespace dmuond::server::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kOfOneThatHangs[] = "look into its log; `kill -ABRT` gives a core of one that hangs";

fs::path Here() { return fs::read_symlink("/proc/self/exe").parent_path(); }

Finding CheckGroup(const v1::GetStatusReply& status) {
  Finding finding{.what = "group",
                  .detail = absl::StrCat("node ", status.node(), " of ", status.nodes(), ", ",
                                         status.group_state(), ", epoch ", status.epoch())};
  if (status.group_state() == "joining") {
    finding.verdict = Verdict::kWarn;
    finding.remedy = "wait for, or start, the other daemons; their --coordinator must reach node 0";
  } else if (status.group_state() == "draining") {
    finding.verdict = Verdict::kWarn;
    finding.remedy = "start it again when it has left: no session is opened now";
  }
  return finding;
}

Finding CheckLanes(const v1::GetStatusReply& status) {
  std::vector<std::string> states;
  bool healthy = true;
  for (const v1::LaneStatus& lane : status.lanes()) {
    healthy = healthy && lane.state() != "gone" && lane.restarts() == 0;
    states.push_back(absl::StrCat(
        lane.lane(), " ", lane.state(),
        lane.restarts() > 0 ? absl::StrCat(" after ", lane.restarts(), " restarts") : ""));
  }
  Finding finding{
      .what = "lanes",
      .detail = states.empty() ? "none: they start with a job" : absl::StrJoin(states, ", ")};
  if (!healthy) {
    finding.verdict = Verdict::kWarn;
    finding.remedy = "the daemon's log has the last words of each (lane=)";
  }
  return finding;
}

// Whether what the job's lanes compute with still lies where they have it from.
Finding CheckLaneFiles(const v1::LaneBits& bits) {
  Finding finding{.what = "lanes' files"};
  std::vector<std::string> same;
  std::vector<std::string> others;
  for (const v1::LaneBits::Module& module : bits.modules()) {
    const absl::StatusOr<std::string> on_disk = ModuleIdOf(module.path());
    if (on_disk.ok() && *on_disk == module.id()) {
      same.push_back(module.name());
      continue;
    }
    others.push_back(absl::StrCat(module.name(), " (", module.path(), ") is ",
                                  on_disk.ok() ? *on_disk : on_disk.status().message(),
                                  ", lanes run ", module.id()));
  }
  if (others.empty()) {
    finding.detail = absl::StrCat(absl::StrJoin(same, ", "), ": on disk is what lanes run");
    return finding;
  }
  finding.verdict = Verdict::kWarn;
  finding.detail = absl::StrCat("replaced on disk: ", absl::StrJoin(others, "; "));
  finding.remedy =
      "install that again; or dmuonctl drain, and start the daemon again: it goes on with what is "
      "installed. Until then a lane that dies has no successor where a library is another one: the "
      "job waits for it, or for dmuonctl job accept-lanes";
  return finding;
}

Finding CheckSnapshots(const v1::GetStatusReply& status) {
  const v1::JobStatus& job = status.job();
  Finding finding{
      .what = "snapshots",
      .detail = absl::StrCat("step ", job.last_committed_step(), " committed, ", DurableStep(job),
                             " durable; ", job.snapshots_failed(), " failed")};
  if (!status.snapshot_dir_hangs().empty()) {
    finding.verdict = Verdict::kFail;
    absl::StrAppend(&finding.detail, "; the directory hangs: ", status.snapshot_dir_hangs());
    finding.remedy = "bring its file server back";
  } else if (!job.snapshot_error().empty()) {
    finding.verdict = Verdict::kWarn;
    absl::StrAppend(&finding.detail, "; the newest: ", job.snapshot_error());
    finding.remedy = "make room, or bring the directory back";
  } else if (job.snapshots_failed() > 0) {
    finding.verdict = Verdict::kWarn;
    finding.remedy = "the daemon's log has each cause (msg=\"a snapshot failed; …\")";
  }
  return finding;
}

// Adds the findings about one job: its lanes, their files and its snapshots. They name the job
// where the daemon has several.
void AddJob(const v1::GetStatusReply& status, std::vector<Finding>& findings) {
  const std::string of =
      status.jobs_size() > 1 ? absl::StrCat(" of ", status.job().name()) : std::string();
  findings.push_back(CheckLanes(status));
  findings.back().what += of;
  if (status.has_lane_bits()) {
    findings.push_back(CheckLaneFiles(status.lane_bits()));
    findings.back().what += of;
  }
  if (!status.has_job()) return;
  findings.push_back(CheckSnapshots(status));
  findings.back().what += of;
}

// Whether a trainer of this user would be let in: connects as one, and leaves.
Finding CheckAttach(const std::string& socket, absl::Duration timeout) {
  Finding finding{.what = "attach socket"};
  const std::string path = socket + wire::kAttachSuffix;
  const auto connection = ConnectTo(path, SOCK_SEQPACKET);
  if (!connection.ok()) {
    finding.verdict = Verdict::kFail;
    finding.detail = std::string(connection.status().message());
    finding.remedy = "restart the daemon; mount the whole directory into containers, not one file";
    return finding;
  }
  pollfd polled{connection->get(), POLLIN, 0};
  const bool answered =
      ::poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) > 0;
  absl::StatusOr<wire::Frame> packet = absl::DeadlineExceededError("no answer");
  if (answered) packet = wire::ReceivePacket(connection->get());
  v1::AttachFrame frame;
  if (packet.ok() && frame.ParseFromString(packet->body) && frame.has_welcome()) {
    finding.detail = absl::StrCat("trainers of uid ", ::geteuid(), " are let in");
  } else {
    finding.verdict = Verdict::kFail;
    finding.detail = absl::StrCat("the daemon turns trainers of uid ", ::geteuid(), " away");
    finding.remedy = absl::StrCat("add ", ::geteuid(), " to the daemon's --allowed_uids");
  }
  return finding;
}

}  // namespace

std::string LaneBeside() { return Here() / "dmuond-lane"; }

Finding CheckPrograms() {
  const fs::path here = Here();
  Finding finding{.what = "programs", .detail = here.string()};
  std::vector<std::string> missing;
  for (const char* name : {"dmuond", "dmuond-lane"}) {
    if (::access((here / name).c_str(), X_OK) != 0) missing.emplace_back(name);
  }
  if (!missing.empty()) {
    finding.verdict = Verdict::kWarn;
    finding.detail = absl::StrCat(absl::StrJoin(missing, " and "), " not in ", here.string());
    finding.remedy = "install the three programs together, or give --dmuond and --lane_binary";
  }
  return finding;
}

Finding CheckSocketDirectory(const std::string& socket) {
  const std::string dir = fs::path(socket).parent_path().string();
  Finding finding{.what = "socket directory"};
  struct stat status {};
  if (::lstat(dir.c_str(), &status) != 0) {
    finding.verdict = errno == ENOENT ? Verdict::kOk : Verdict::kFail;
    finding.detail = absl::StrCat(absl::ErrnoToStatus(errno, dir).message(),
                                  errno == ENOENT ? " (the daemon makes it)" : "");
    if (finding.verdict == Verdict::kFail) finding.remedy = "give this user access, or --socket";
    return finding;
  }
  finding.detail =
      absl::StrFormat("%s, mode %04o, uid %d", dir, status.st_mode & 0777, status.st_uid);
  if (!S_ISDIR(status.st_mode)) {
    finding.verdict = Verdict::kFail;
    finding.detail = dir + (S_ISLNK(status.st_mode) ? " is a symbolic link" : " is no directory");
    finding.remedy = "give the daemon a directory of its own";
  } else if ((status.st_mode & S_ISVTX) != 0) {
    finding.verdict = Verdict::kFail;
    finding.remedy =
        "give --socket a path in a directory of its own: this one is shared by all users";
  } else if ((status.st_mode & 0027) != 0) {
    finding.verdict = Verdict::kFail;
    finding.remedy = absl::StrCat("chmod 0750 ", dir);
  }
  return finding;
}

Finding CheckSocket(const std::string& socket) {
  Finding finding{.what = "socket", .detail = socket};
  if (const absl::Status fits = CheckSocketPaths(socket); !fits.ok()) {
    finding.verdict = Verdict::kFail;
    finding.detail = std::string(fits.message());
    finding.remedy = "choose a shorter path";
    return finding;
  }
  const absl::Status connected = ConnectTo(socket, SOCK_STREAM).status();
  if (connected.ok()) return finding;
  finding.verdict = Verdict::kFail;
  finding.detail = std::string(connected.message());
  if (absl::IsNotFound(connected)) {
    finding.remedy = "start dmuond, or name its socket by DMUOND_ADDRESS or --address";
  } else if (absl::IsPermissionDenied(connected)) {
    finding.remedy = "run as the daemon's user, or start it with --socket_group";
  } else {
    finding.remedy = "nobody listens there: start dmuond again, it removes the stale socket";
  }
  return finding;
}

std::vector<Finding> CheckDaemon(const std::string& socket, absl::Duration timeout) {
  const auto status = Call({.address = socket, .timeout = timeout}, &v1::Admin::Stub::GetStatus,
                           v1::GetStatusRequest());
  if (!status.ok()) {
    return {{.verdict = Verdict::kFail,
             .what = "daemon",
             .detail = std::string(status.status().message()),
             .remedy = kOfOneThatHangs}};
  }
  Finding daemon{.what = "daemon",
                 .detail = absl::StrCat("version ", status->version(), ", up ",
                                        HumanSeconds(status->uptime_s()))};
  if (!status->core_type().empty()) {
    absl::StrAppend(&daemon.detail, ", OpenBLAS core type of its lanes ", status->core_type());
  }
  if (status->version() != kBuildVersion) {
    daemon.verdict = Verdict::kWarn;
    absl::StrAppend(&daemon.detail, ", dmuonctl is ", kBuildVersion);
    daemon.remedy = "restart the daemon with the installed version";
  }
  if (status->picture_age_ms() > 0) {
    daemon.verdict = Verdict::kFail;
    absl::StrAppend(&daemon.detail, ", its core has not turned for ",
                    HumanSeconds(status->picture_age_ms() / 1000));
    daemon.remedy = kOfOneThatHangs;
  }
  std::vector<Finding> findings = {daemon, CheckGroup(*status)};
  AddJob(*status, findings);
  for (const std::string& name : status->jobs()) {
    if (name == status->job().name()) continue;
    v1::GetStatusRequest request;
    request.set_job(name);
    const auto other =
        Call({.address = socket, .timeout = timeout}, &v1::Admin::Stub::GetStatus, request);
    if (other.ok()) AddJob(*other, findings);  // else it has ended meanwhile
  }
  findings.push_back(CheckAttach(socket, timeout));
  return findings;
}

}  // namespace dmuond::server::ctl
