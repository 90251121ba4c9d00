#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/ctl/checks.h"
#include "server/ctl/table.h"

namespace dmuond::server::ctl {
namespace {

namespace fs = std::filesystem;

// What NVIDIA's documentation of NCCL asks containers for.
constexpr int64_t kSharedMemoryGood = int64_t{1} << 30;

// "pid:[4026531836]"; empty: it cannot be read. `process`: its pid, or "self".
std::string NamespaceOf(const std::string& process, const char* kind) {
  std::error_code error;
  return fs::read_symlink(absl::StrCat("/proc/", process, "/ns/", kind), error).string();
}

// How many entries a folder has; 0 also where it is not there.
size_t EntriesOf(const char* folder) {
  std::error_code error;
  size_t entries = 0;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    static_cast<void>(entry);
    ++entries;
  }
  return entries;
}

struct Shared {
  const char* kind;
  const char* why;  // it should be
};
constexpr Shared kShared[] = {
    {"pid",
     "messages then name trainers by pids that can be used, and before Linux 6.5 the daemon sees "
     "when a trainer's process has ended: else a replacement gets arenas of its own, beside those "
     "of the one before"},
    {"ipc", "MPS needs one for all its clients; memory of GPUs does not"},
};
// Trainers need not share it with the daemon.
constexpr char kNetwork[] = "net";

}  // namespace

Finding CheckNamespaces(const Surroundings& around) {
  Finding finding{.what = "namespaces"};
  if (!around.daemon_answers) {
    finding.detail = absl::StrCat(NamespaceOf("self", "pid"), ", ", NamespaceOf("self", "ipc"),
                                  ", ", NamespaceOf("self", "net"), "; no daemon to compare with");
    return finding;
  }
  if (around.daemon == 0) {
    finding.verdict = Verdict::kWarn;
    finding.detail = "the daemon's pid cannot be seen from here: it is in another pid namespace";
    finding.remedy = absl::StrCat(
        "nothing, where that is above this one, as the host's is; else share it (Kubernetes: "
        "shareProcessNamespace; docker run --pid): ",
        kShared[0].why);
    return finding;
  }
  std::vector<std::string> same;
  std::vector<std::string> others;
  for (const Shared& shared : kShared) {
    const std::string daemons = NamespaceOf(absl::StrCat(around.daemon), shared.kind);
    if (daemons.empty()) continue;  // another user's process
    if (daemons == NamespaceOf("self", shared.kind)) {
      same.emplace_back(shared.kind);
    } else {
      others.push_back(absl::StrCat(shared.kind, " (", shared.why, ")"));
    }
  }
  const std::string network = NamespaceOf(absl::StrCat(around.daemon), kNetwork);
  const bool other_network = !network.empty() && network != NamespaceOf("self", kNetwork);
  if (!network.empty() && !other_network) same.emplace_back(kNetwork);
  if (same.empty() && others.empty()) {
    finding.detail = absl::StrCat("the daemon's, pid ", around.daemon,
                                  ", cannot be read by this user; its pid can be seen");
  } else {
    finding.detail =
        absl::StrCat("shared with the daemon: ", same.empty() ? "none" : absl::StrJoin(same, ", "));
  }
  if (other_network) {
    absl::StrAppend(&finding.detail,
                    "; not net: a second daemon, started here, would not see that GPUs are taken");
  }
  if (!others.empty()) {
    finding.verdict = Verdict::kWarn;
    finding.remedy = absl::StrCat("share with trainers: ", absl::StrJoin(others, ", "));
  }
  return finding;
}

Finding CheckVisibleDevices(const Surroundings& around, size_t seen) {
  constexpr char kVariable[] = "CUDA_VISIBLE_DEVICES";
  Finding finding{.what = kVariable};
  const size_t machine = EntriesOf("/proc/driver/nvidia/gpus");  // 0: it is not said
  const std::optional<std::string> value = around.Variable(kVariable);
  finding.detail = absl::StrCat(value.has_value() ? "'" + *value + "'" : "not set", ", shows ",
                                seen, machine > 0 ? absl::StrCat(" of ", machine) : "",
                                "; the environment is that of ", around.Whose());
  if (value.has_value() && seen == 0) {
    finding.verdict = Verdict::kFail;
    finding.remedy = absl::StrCat("unset ", kVariable, " for the daemon, or name devices in it");
    return finding;
  }
  const char* const own = std::getenv(kVariable);
  if (around.of_daemon &&
      value != (own == nullptr ? std::nullopt : std::optional(std::string(own)))) {
    finding.verdict = Verdict::kWarn;
    absl::StrAppend(&finding.detail, "; here it is ",
                    own == nullptr ? "not set" : absl::StrCat("'", own, "'"));
    finding.remedy =
        "nothing, if this is meant: --devices counts as the daemon sees devices, and those of "
        "trainers must be among them";
  }
  return finding;
}

Finding CheckLockedMemory(const Surroundings& around) {
  Finding finding{.what = "locked memory"};
  const rlim_t limit = around.locked_memory.rlim_cur;
  const size_t adapters = EntriesOf("/sys/class/infiniband");
  finding.detail = absl::StrCat(
      limit == RLIM_INFINITY ? "no limit" : "limit " + HumanBytes(static_cast<int64_t>(limit)),
      " (RLIMIT_MEMLOCK of ", around.of_daemon ? "the daemon" : "this command", "), ",
      adapters == 0 ? "no InfiniBand" : absl::StrCat(adapters, " InfiniBand devices"));
  if (limit != RLIM_INFINITY && adapters > 0) {
    finding.verdict = Verdict::kWarn;
    finding.remedy =
        "ulimit -l unlimited for the daemon (systemd: LimitMEMLOCK=infinity; docker run --ulimit "
        "memlock=-1): NCCL locks what it sends over InfiniBand";
  }
  return finding;
}

Finding CheckSharedMemory() {
  Finding finding{.what = "/dev/shm"};
  struct statvfs status {};
  const bool there = ::statvfs("/dev/shm", &status) == 0;
  const auto bytes = static_cast<int64_t>(status.f_blocks * status.f_frsize);
  const auto free = static_cast<int64_t>(status.f_bavail * status.f_frsize);
  finding.detail =
      there ? absl::StrCat(HumanBytes(free), " of ", HumanBytes(bytes), " free") : "is not there";
  if (!there || bytes < kSharedMemoryGood) {
    finding.verdict = Verdict::kWarn;
    finding.remedy =
        "docker run --shm-size=1g; Kubernetes: an emptyDir with medium Memory at /dev/shm. NCCL, "
        "the trainers' own too, uses it between processes of a host; dmuond's memory is elsewhere";
  }
  return finding;
}

}  // namespace dmuond::server::ctl
