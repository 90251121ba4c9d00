#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/available_memory.h"
#include "kernels/cpu/core_type.h"
#include "kernels/cpu/cpu_memory.h"
#include "server/ctl/checks.h"
#include "server/ctl/table.h"

namespace dmuond::server::ctl {
namespace {

// A page of host memory, as arenas and state are: if this works, they do.
constexpr size_t kProbeBytes = 4096;
// A daemon holds a descriptor for each arena, connection and lane.
constexpr rlim_t kDescriptorsGood = 4096;

// The word in brackets of "always [madvise] never"; "" where the file is not there.
std::string Chosen(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (word.size() > 2 && word.front() == '[') return word.substr(1, word.size() - 2);
  }
  return "";
}

}  // namespace

Finding CheckKernel() {
  utsname name{};
  ::uname(&name);
  Finding finding{.what = "kernel", .detail = absl::StrCat(name.sysname, " ", name.release)};
  const wire::UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!pidfd.valid()) {
    finding.verdict = Verdict::kFail;
    absl::StrAppend(&finding.detail, ": ", absl::ErrnoToStatus(errno, "pidfd_open").message());
    finding.remedy = "Linux 5.3 or newer, and a sandbox that lets pidfd_open through";
  }
  return finding;
}

Finding CheckMemfd() {
  Finding finding{.what = "sealed memory", .detail = "memfd with seals works"};
  kernels::cpu::CpuMemoryHolder holder;
  const auto memory = holder.Allocate(kProbeBytes, "doctor");
  const absl::Status status =
      memory.ok() ? holder.Check(memory->get(), kProbeBytes) : memory.status();
  if (!status.ok()) {
    finding.verdict = Verdict::kFail;
    finding.detail = std::string(status.message());
    finding.remedy = "a kernel and sandbox that allow memfd_create and its seals";
  }
  return finding;
}

Finding CheckCoreType() {
  const std::string best = kernels::cpu::OpenBlasCoreType();
  const char* set = std::getenv(kernels::cpu::kCoreTypeVariable);
  Finding finding{.what = "OpenBLAS core type"};
  if (set != nullptr && !best.empty() && best != set) {
    finding.verdict = Verdict::kWarn;
    finding.detail = absl::StrCat(kernels::cpu::kCoreTypeVariable, "=", set,
                                  " is set, this processor fits ", best);
    finding.remedy = absl::StrCat("unset ", kernels::cpu::kCoreTypeVariable,
                                  ": the daemon then sets the right one for its lanes");
    return finding;
  }
  finding.detail = best.empty() ? "left to OpenBLAS" : absl::StrCat(best, ", set in lanes");
  return finding;
}

Finding CheckHugePages(const std::string& sys) {
  const std::string folder = absl::StrCat(sys, "/kernel/mm/transparent_hugepage/");
  const std::string anonymous = Chosen(folder + "enabled");
  Finding finding{.what = "huge pages",
                  .detail = absl::StrCat("anonymous: ", anonymous.empty() ? "unknown" : anonymous,
                                         ", shared: ", Chosen(folder + "shmem_enabled"))};
  if (anonymous == "never") {
    finding.verdict = Verdict::kWarn;
    finding.remedy =
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: workspaces are "
        "swept from end to end and miss less in large pages";
  }
  return finding;
}

Finding CheckHugePages() { return CheckHugePages("/sys"); }

Finding CheckDescriptorLimit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  Finding finding{.what = "open files",
                  .detail = absl::StrCat("limit ", limit.rlim_cur, ", hard ", limit.rlim_max)};
  if (limit.rlim_cur < kDescriptorsGood) {
    finding.verdict = Verdict::kWarn;
    finding.remedy = absl::StrCat("ulimit -n ", kDescriptorsGood,
                                  " (systemd: LimitNOFILE): every arena is a descriptor");
  }
  return finding;
}

Finding CheckMemory(const Surroundings& around) {
  const bool of_daemon = around.daemon_answers && around.daemon != 0;
  const auto available =
      kernels::cpu::ReadAvailableMemory(of_daemon ? absl::StrCat(around.daemon) : "self");
  if (!available.has_value()) {
    return {.verdict = Verdict::kWarn,
            .what = "memory",
            .detail = "/proc/meminfo does not say what is available",
            .remedy = "mount /proc"};
  }
  Finding finding{
      .what = "memory",
      .detail = absl::StrCat(HumanBytes(static_cast<int64_t>(available->bytes)), " available")};
  if (!available->limited_by.empty()) {
    absl::StrAppend(&finding.detail, " of ",
                    HumanBytes(static_cast<int64_t>(available->limit_bytes)),
                    " that the cgroup of ", of_daemon ? "the daemon" : "this command",
                    " may have (", available->limited_by, ")");
  }
  return finding;
}

Finding CheckCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof(set), &set);
  return {.what = "cores", .detail = absl::StrCat(CPU_COUNT(&set), " for this process")};
}

}  // namespace dmuond::server::ctl
