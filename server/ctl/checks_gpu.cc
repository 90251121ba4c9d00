#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/ctl/checks.h"
#include "server/ctl/probe.h"
#include "server/ctl/table.h"

namespace dmuond::server::ctl {
namespace {

constexpr char kGpus[] = "GPUs";
constexpr char kMpsVariable[] = "CUDA_MPS_PIPE_DIRECTORY";
constexpr char kMpsFolder[] = "/tmp/nvidia-mps";  // where the variable is not set
constexpr int kOldestMajor = 8;                   // of compute capabilities
constexpr int kOwnMajor = 9;                      // own kernels are built for 9.0 alone
// CUcomputemode.
constexpr int kComputeProhibited = 2;
constexpr int kComputeExclusiveProcess = 3;

// Whether the machine has GPUs of the kind, by what their kernel module makes.
bool KernelModuleIsThere() {
  return ::access("/dev/nvidiactl", F_OK) == 0 || ::access("/proc/driver/nvidia", F_OK) == 0;
}

std::string NameOf(const Json& device) { return absl::StrCat("cuda:", device.value("ordinal", 0)); }

// "cuda:0: MESSAGE; cuda:1: MESSAGE", of those that have this error; empty: none has.
std::string ErrorsOf(const std::vector<Json>& devices, const char* name) {
  std::vector<std::string> errors;
  for (const Json& device : devices) {
    const std::string error = device.value(name, "");
    if (!error.empty()) errors.push_back(absl::StrCat(NameOf(device), ": ", error));
  }
  return absl::StrJoin(errors, "; ");
}

// A check that is well where no device has an error of this name.
Finding NoErrors(const char* what, const std::vector<Json>& devices, const char* name,
                 std::string well, Verdict otherwise, std::string remedy) {
  std::string errors = ErrorsOf(devices, name);
  if (errors.empty()) return {.what = what, .detail = std::move(well)};
  return {
      .verdict = otherwise, .what = what, .detail = std::move(errors), .remedy = std::move(remedy)};
}

// The driver has not said all.
Finding Unanswered(const Probe& probe, const std::string& lane_binary, absl::Duration timeout) {
  Finding finding{.verdict = Verdict::kFail, .what = kGpus};
  const std::string at = probe.at.empty() ? "" : absl::StrCat(", in: ", probe.at);
  if (probe.hangs) {
    finding.detail =
        absl::StrCat("the driver hangs: no answer in ", absl::FormatDuration(timeout), at);
    finding.remedy =
        "dmesg and nvidia-smi say more (Xid errors); reset the GPU or restart the machine. If it "
        "is slow only: --gpu_timeout";
  } else {
    finding.detail = absl::StrCat(lane_binary, " --probe has ended", at);
    finding.remedy =
        "install dmuonctl and dmuond-lane of one version; dmesg names a driver's fault";
  }
  const absl::string_view words = absl::StripAsciiWhitespace(probe.words);
  if (!words.empty()) absl::StrAppend(&finding.detail, "; it has said: ", words);
  return finding;
}

Finding NoDriver(const Json& driver) {
  const std::string error = driver.value("error", "");
  if (driver.value("found", false)) {
    return {.verdict = Verdict::kFail,
            .what = "CUDA driver",
            .detail = error,
            .remedy =
                "install a newer driver, or check nvidia-smi and CUDA_VISIBLE_DEVICES; "
                "without a device only --devices=cpu:N works"};
  }
  if (!KernelModuleIsThere()) {
    return {.what = kGpus, .detail = "none, and no CUDA driver: only --devices=cpu:N works here"};
  }
  return {.verdict = Verdict::kWarn,
          .what = kGpus,
          .detail = absl::StrCat("this machine has some, but ", error),
          .remedy =
              "give the container the driver's libraries (NVIDIA container toolkit: --gpus); "
              "without them only --devices=cpu:N works"};
}

Finding CheckDriver(const Json& driver) {
  Finding finding{.what = "CUDA driver",
                  .detail = absl::StrCat("speaks CUDA ", driver.value("version", "?"),
                                         ", lanes need ", driver.value("needed", "?"))};
  const std::string module = driver.value("name", "");
  if (!module.empty()) absl::StrAppend(&finding.detail, "; ", module);
  return finding;
}

Finding CheckDevice(const Json& device) {
  const int major = device.value("major", 0);
  const int minor = device.value("minor", 0);
  Finding finding{.what = NameOf(device),
                  .detail = absl::StrCat(device.value("name", "?"), ", ", device.value("uuid", "?"),
                                         ", compute capability ", major, ".", minor)};
  if (device.contains("total_bytes")) {
    absl::StrAppend(&finding.detail, ", ", HumanBytes(device.value("free_bytes", int64_t{0})),
                    " of ", HumanBytes(device.value("total_bytes", int64_t{0})), " free");
  }
  const int mode = device.value("compute_mode", 0);
  if (major < kOldestMajor) {
    finding.verdict = Verdict::kFail;
    finding.remedy = "lanes need 8.0 (A100) or newer; leave it out of --devices";
  } else if (mode == kComputeProhibited) {
    finding.verdict = Verdict::kFail;
    absl::StrAppend(&finding.detail, ", compute mode: prohibited");
    finding.remedy = "nvidia-smi -c DEFAULT: nobody may compute there";
  } else if (mode == kComputeExclusiveProcess && !device.value("mps", false)) {
    finding.verdict = Verdict::kFail;
    absl::StrAppend(&finding.detail, ", compute mode: exclusive process, without MPS");
    finding.remedy = "nvidia-smi -c DEFAULT, or MPS: a lane and its trainer are two processes";
  } else if (device.contains("context")) {
    finding.verdict = Verdict::kFail;
    absl::StrAppend(&finding.detail, ", no context: ", device.value("context", ""));
    finding.remedy = "nvidia-smi says who uses it; a context takes some hundred MiB";
  } else if (major != kOwnMajor || minor != 0) {
    absl::StrAppend(&finding.detail,
                    "; matrix products by cuBLASLt, the own ones are built for 9.0 (H100, H200)");
  }
  return finding;
}

Finding CheckPeers(const std::vector<Json>& devices) {
  std::vector<std::string> missing;
  for (const Json& device : devices) {
    const std::vector<int> peers = device.value("peers", std::vector<int>());
    for (const Json& other : devices) {
      const int ordinal = other.value("ordinal", 0);
      if (ordinal == device.value("ordinal", 0)) continue;
      if (std::find(peers.begin(), peers.end(), ordinal) != peers.end()) continue;
      missing.push_back(absl::StrCat(device.value("ordinal", 0), "→", ordinal));
    }
  }
  Finding finding{.what = "peer access"};
  if (devices.size() < 2) {
    finding.detail = "one device, no peers";
  } else if (missing.empty()) {
    finding.detail = absl::StrCat("each of the ", devices.size(), " reaches all others' memory");
  } else {
    finding.verdict = Verdict::kWarn;
    finding.detail =
        absl::StrCat("cannot access the other's memory: ", absl::StrJoin(missing, " "));
    finding.remedy =
        "a lane reads and writes the arenas of all trainers of its node, also of those on a device "
        "without a lane: start a daemon for each set of GPUs that reach each other, as nodes of "
        "one group";
  }
  return finding;
}

Finding CheckStreamOperations(const std::vector<Json>& devices) {
  std::vector<std::string> without;
  for (const Json& device : devices) {
    if (!device.value("stream_ops_64", false)) without.push_back(NameOf(device));
  }
  Finding finding{.what = "stream operations", .detail = "64-bit waits and writes work"};
  if (!without.empty()) {
    finding.verdict = Verdict::kFail;
    finding.detail = absl::StrCat("no 64-bit waits and writes on ", absl::StrJoin(without, ", "));
    finding.remedy = "a newer driver: with them a trainer's stream signals and waits for its lane";
  }
  return finding;
}

// The driver says whether processes on a GPU take turns. dmuond, which has no context to ask it in,
// plans by whether a control daemon is there. This compares the two.
Finding CheckMps(const std::vector<Json>& devices, const Surroundings& around) {
  const std::string set = around.Variable(kMpsVariable).value_or("");
  const std::string folder = set.empty() ? kMpsFolder : set;
  const bool listens = ::access((folder + "/control").c_str(), F_OK) == 0;
  bool used = false;
  for (const Json& device : devices) used = used || device.value("mps", false);
  const std::string control = absl::StrCat(
      listens ? "a" : "no", " control daemon in ", folder, " (",
      around.mps_control > 0 ? absl::StrCat("the daemon's own, pid ", around.mps_control)
      : set.empty()          ? absl::StrCat(kMpsVariable, " is not set")
                             : kMpsVariable,
      ")");
  Finding finding{.what = "MPS"};
  if (used && listens) {
    finding.detail = absl::StrCat("runs, ", control,
                                  ": lanes and trainers compute side by side. A fault of one, or a "
                                  "SIGKILL in the middle of a kernel, ends all others on that GPU");
    if (around.mps_control > 0) {
      absl::StrAppend(&finding.detail, ". Trainers need ", kMpsVariable, "=", folder,
                      ", which dmuonctl run gives to its command");
    }
  } else if (!used && !listens) {
    finding.detail =
        absl::StrCat("does not run, ", control,
                     ": lanes and trainers of a GPU take turns, and lanes compute "
                     "when trainers have nothing to do. A fault of one does not touch others");
  } else {
    finding.verdict = Verdict::kWarn;
    finding.detail = absl::StrCat("there is ", control, ", but the driver says that MPS is ",
                                  used ? "used" : "not used");
    finding.remedy =
        absl::StrCat("give daemon and trainers the same ", kMpsVariable,
                     used ? "" : "; remove the folder if nvidia-cuda-mps-control does not run");
  }
  return finding;
}

Finding CheckNccl(const Json& nccl) {
  Finding finding{.what = "NCCL"};
  if (!nccl.contains("error")) {
    finding.detail = absl::StrCat("version ", nccl.value("version", "?"));
    return finding;
  }
  finding.verdict = Verdict::kWarn;
  finding.detail = absl::StrCat(nccl.value("error", ""), "; a single node does not need it");
  finding.remedy = nccl.value("remedy", "");
  return finding;
}

}  // namespace

std::vector<Finding> CheckGpus(const Surroundings& around, const std::string& lane_binary,
                               absl::Duration timeout) {
  const absl::StatusOr<Probe> ran = RunProbe(lane_binary, around.environment, timeout);
  if (!ran.ok()) {
    return {{.verdict = Verdict::kWarn,
             .what = kGpus,
             .detail = absl::StrCat("not asked: ", ran.status().message()),
             .remedy = "install dmuond-lane beside dmuonctl, or give --lane_binary"}};
  }
  const Probe& probe = *ran;
  if (!probe.cuda) {
    if (!KernelModuleIsThere()) {
      return {{.what = kGpus,
               .detail = "none; dmuond-lane is built without CUDA: only --devices=cpu:N works"}};
    }
    return {{.verdict = Verdict::kWarn,
             .what = kGpus,
             .detail = "this machine has some, but dmuond-lane is built without CUDA",
             .remedy = "install dmuond built with CUDA; this one has only --devices=cpu:N"}};
  }
  std::vector<Finding> findings;
  if (probe.driver.contains("error")) {
    findings.push_back(NoDriver(probe.driver));
    if (!probe.driver.value("found", false)) return findings;
  } else if (!probe.driver.is_null()) {
    findings.push_back(CheckDriver(probe.driver));
  }
  const std::vector<Json>& devices = probe.devices;
  for (const Json& device : devices) findings.push_back(CheckDevice(device));
  if (!probe.done) {
    findings.push_back(Unanswered(probe, lane_binary, timeout));
    return findings;
  }
  findings.push_back(CheckVisibleDevices(around, devices.size()));
  if (devices.empty()) return findings;
  findings.push_back(CheckPeers(devices));
  findings.push_back(NoErrors("memory by descriptor", devices, "descriptor",
                              "made, exported, imported and mapped on each device", Verdict::kFail,
                              "a driver and a sandbox that allow it: all memory of lanes and of "
                              "arenas is held this way. If it is full: nvidia-smi says by whom"));
  findings.push_back(NoErrors("memory by handle", devices, "handle",
                              "opened by a second process on each device", Verdict::kWarn,
                              "arenas that trainers allocate themselves need it; those from the "
                              "daemon, the default, do not"));
  findings.push_back(CheckStreamOperations(devices));
  findings.push_back(CheckMps(devices, around));
  findings.push_back(CheckNccl(probe.nccl));
  findings.push_back(CheckLockedMemory(around));
  findings.push_back(CheckSharedMemory());
  return findings;
}

}  // namespace dmuond::server::ctl
