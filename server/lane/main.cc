// dmuond-lane: computes for one device. Started by dmuond, never by hand.
#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "dmuond/v1/peer.pb.h"
#include "kernels/cpu/cpu_device.h"
#include "server/commit.h"
#include "server/common/log.h"
#include "server/common/stray_signals.h"
#include "server/lane/code_hash.h"
#include "server/lane/functions.h"
#include "server/lane/gloo_group.h"
#include "server/lane/lane.h"
#include "server/lane/modules.h"
#include "server/lane/processors.h"
#include "server/version.h"
#ifdef DMUOND_CUDA
#include "kernels/cuda/cuda_device.h"
#include "server/lane/gpu_probe.h"
#include "server/lane/nccl_group.h"
#include "server/lane/nccl_library.h"
#endif

ABSL_FLAG(int, fd, -1, "the lane's end of its socket pair with dmuond");
ABSL_FLAG(int, lane, 0, "which of its node's lanes it is, for who looks at processes");
ABSL_FLAG(std::string, job, "", "whose lane it is, for who looks at processes");
ABSL_FLAG(std::string, device, "cpu:1", "cpu:THREADS, or cuda:ORDINAL");
ABSL_FLAG(std::string, processors, "",
          "near the device, as 0-15,32-47; empty: all that it may use");
ABSL_FLAG(
    std::string, engine, "auto",
    "whose matrix products a GPU runs: own, cublaslt, or auto: own where they run (H100, H200)");
ABSL_FLAG(
    bool, print_bits, false,
    "print what decides the bits that this lane computes (LaneBits of peer.proto, as protobuf "
    "text), and end");
ABSL_FLAG(bool, rails, false, "with --print_bits: of a lane that exchanges with other nodes");
ABSL_FLAG(
    bool, probe, false,
    "print what the CUDA driver and NCCL say of this machine, as JSON, one object a line, and "
    "end: for dmuonctl doctor");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");
ABSL_FLAG(std::string, log_format, "kv", "kv (key=value) or json");

namespace {

using dmuond::kernels::Device;
using dmuond::kernels::cpu::CpuDevice;

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal) {
#ifdef DMUOND_CUDA
  using dmuond::kernels::ProductEngine;
  const std::string name = absl::GetFlag(FLAGS_engine);
  const ProductEngine engine = name == "own"        ? ProductEngine::kOwn
                               : name == "cublaslt" ? ProductEngine::kLibrary
                                                    : ProductEngine::kDefault;
  if (engine == ProductEngine::kDefault && name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--engine=", name, ": not auto, own or cublaslt"));
  }
  ASSIGN_OR_RETURN(auto device, dmuond::kernels::cuda::CudaDevice::Create(ordinal, engine));
  return std::unique_ptr<Device>(std::move(device));
#else
  return absl::UnimplementedError(
      absl::StrCat("--device=cuda:", ordinal, ": this dmuond-lane was built without CUDA"));
#endif
}

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(absl::string_view spec) {
  int number = 0;
  absl::string_view rest = spec;
  if (absl::ConsumePrefix(&rest, "cuda:") && absl::SimpleAtoi(rest, &number)) {
    return MakeCudaDevice(number);
  }
  rest = spec;
  if (!absl::ConsumePrefix(&rest, "cpu:") || !absl::SimpleAtoi(rest, &number)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", spec, ": not cpu:THREADS or cuda:ORDINAL"));
  }
  ASSIGN_OR_RETURN(auto device, CpuDevice::Create(number));
  return std::unique_ptr<Device>(std::move(device));
}

// The kernel names a process by the file that it was started from, which the daemon gives as a
// descriptor: "4" would stand in `ps` and `top`.
void TakeName(const std::string& path) {
  ::prctl(PR_SET_NAME, path.substr(path.rfind('/') + 1).c_str());
}

// Where memory runs out, the kernel ends a lane, which is replaced, before the daemon, which is
// not. Beside the state that both have mapped a daemon needs little memory. More would make a lane
// go before a trainer that leaks, too: under `dmuonctl run` all three are children of one shell.
void DieBeforeTheDaemon() {
  constexpr int kHigher = 50;  // thousandths of all memory, as if the lane used so much more
  constexpr int kMax = 1000;
  constexpr char kFile[] = "/proc/self/oom_score_adj";
  int inherited = 0;
  std::ifstream(kFile) >> inherited;
  std::ofstream(kFile) << std::min(inherited + kHigher, kMax);
}

// The exit code.
int Complain(const absl::Status& status) {
  std::fprintf(stderr, "dmuond-lane: %s\n", std::string(status.message()).c_str());
  return 2;
}

// Without its modules.
dmuond::v1::LaneBits BitsOf(const Device& device, absl::string_view spec) {
  dmuond::v1::LaneBits bits;
  bits.set_code(dmuond::server::lane::kCodeHash);
  std::string library = CpuDevice::Library();
  bits.set_core_type(CpuDevice::CoreType());
#ifdef DMUOND_CUDA
  if (absl::StartsWith(spec, "cuda:")) {
    library = static_cast<const dmuond::kernels::cuda::CudaDevice&>(device).DescribeType();
    bits.set_core_type(absl::GetFlag(FLAGS_engine));
  }
#else
  static_cast<void>(device);
  static_cast<void>(spec);
#endif
  bits.set_library(library);
  // AdamW's bias corrections are powers, which are the C library's on every device.
  bits.set_functions(dmuond::server::lane::FunctionsDigest());
  return bits;
}

int PrintBits(absl::string_view spec) {
  const auto device = MakeDevice(spec);
  if (!device.ok()) return Complain(device.status());
  dmuond::v1::LaneBits bits = BitsOf(**device, spec);
#ifdef DMUOND_CUDA
  if (absl::StartsWith(spec, "cuda:") && absl::GetFlag(FLAGS_rails)) {
    const auto nccl = dmuond::server::lane::Nccl::Load();
    if (!nccl.ok()) return Complain(nccl.status());
    absl::StrAppend(bits.mutable_library(), ", NCCL ", nccl->VersionText(nccl->version));
  }
#endif
  dmuond::server::lane::AddModules(bits);
  std::string text;
  google::protobuf::TextFormat::PrintToString(bits, &text);
  std::fputs(text.c_str(), stdout);
  return std::fflush(stdout) == 0 ? 0 : 1;
}

int Probe() {
#ifdef DMUOND_CUDA
  dmuond::server::lane::PrintGpuProbe();
#else
  std::puts(R"({"cuda":false})");
  std::puts(R"({"done":true})");
#endif
  return std::fflush(stdout) == 0 ? 0 : 1;
}

// How lanes of this device send each other memory.
dmuond::server::lane::PeerGroupFactory GroupsOf(absl::string_view spec) {
#ifdef DMUOND_CUDA
  if (absl::StartsWith(spec, "cuda:")) return dmuond::server::lane::MakeNcclGroup;
#endif
  static_cast<void>(spec);
  return dmuond::server::lane::MakeGlooGroup;
}

// A lane without its daemon has nothing to do. The dispatching thread sees the socket's end too,
// but not in the middle of a long update. (PR_SET_PDEATHSIG would not do: the parent that it means
// is the daemon's thread that started the lane, and threads that serve calls come and go.)
void EndWithTheDaemon(int fd) {
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  std::thread([own] {
    pollfd polled{own, POLLRDHUP, 0};
    while (::poll(&polled, 1, -1) < 0) {
      // Only EINTR is possible.
    }
    ::_exit(0);  // nobody reads what may wait in its log
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  TakeName(argv[0]);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of a file's size is an error (EFBIG) of what met it
  // A terminal's ^C goes to the whole process group, and its end to all that was started in it; the
  // daemon decides what its lanes do then.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  dmuond::server::IgnoreStraySignals();
  DieBeforeTheDaemon();
  dmuond::server::log::FlushAtFatalSignals();
  absl::SetProgramUsageMessage("computes for one device; started by dmuond");
  absl::FlagsUsageConfig usage;
  usage.version_string = [] {
    return dmuond::server::VersionText("dmuond-lane", dmuond::server::kBuildCommit);
  };
  absl::SetFlagsUsageConfig(std::move(usage));
  absl::ParseCommandLine(argc, argv);
  const auto level = dmuond::server::log::ParseLevel(absl::GetFlag(FLAGS_log_level));
  const auto format = dmuond::server::log::ParseFormat(absl::GetFlag(FLAGS_log_format));
  for (const absl::Status& status : {level.status(), format.status()}) {
    if (!status.ok()) return Complain(status);
  }
  dmuond::server::log::SetLevel(*level);
  dmuond::server::log::SetFormat(*format);
  dmuond::fault::ConnectFaultDriver();
  // Sleeps of some tens of microseconds between looks at timeline words; the default slack of 50 us
  // would more than double them.
  ::prctl(PR_SET_TIMERSLACK, 1);
  if (absl::GetFlag(FLAGS_probe)) return Probe();
  if (absl::GetFlag(FLAGS_print_bits)) return PrintBits(absl::GetFlag(FLAGS_device));
  if (absl::GetFlag(FLAGS_fd) < 0) {
    std::fputs("dmuond-lane: --fd is missing; dmuond starts its lanes itself\n", stderr);
    return 2;
  }
  // Before the driver starts threads of its own.
  if (const std::string near = absl::GetFlag(FLAGS_processors); !near.empty()) {
    const absl::Status stays = dmuond::server::lane::StayNear(near);
    if (!stays.ok()) {
      dmuond::server::log::Warn("the lane runs on any processor", {{"what", stays}});
    }
  }
  auto device = MakeDevice(absl::GetFlag(FLAGS_device));
  if (!device.ok()) {
    dmuond::server::log::Error("no device", {{"what", device.status()}});
    return 2;
  }
  EndWithTheDaemon(absl::GetFlag(FLAGS_fd));
  const bool on_gpu = absl::StartsWith(absl::GetFlag(FLAGS_device), "cuda:");
  dmuond::server::lane::Lane lane(**device, dmuond::wire::UniqueFd(absl::GetFlag(FLAGS_fd)),
                                  GroupsOf(absl::GetFlag(FLAGS_device)),
                                  BitsOf(**device, absl::GetFlag(FLAGS_device)));
  const absl::Status status = lane.Run();
  if (!status.ok()) dmuond::server::log::Error("lane ends", {{"what", status}});
  const int code = status.ok() ? 0 : 1;
  // The driver frees what a process had on its device. To unmap it here would wait for work that
  // may hang.
  if (on_gpu) dmuond::server::log::EndProcess(code);
  return code;
}
