// What `dmuonctl doctor` looks at. Each check looks at one thing and never changes anything.
#ifndef DMUOND_SERVER_CTL_CHECKS_H_
#define DMUOND_SERVER_CTL_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/ctl/surroundings.h"

namespace dmuond::server::ctl {

enum class Verdict : uint8_t { kOk, kWarn, kFail };
[[nodiscard]] const char* Name(Verdict verdict);  // "ok", "warn", "fail"

struct Finding {
  Verdict verdict = Verdict::kOk;
  std::string what;    // "socket directory"
  std::string detail;  // what was seen, with values
  std::string remedy;  // what to do; empty for kOk
};

// ---- this machine (checks_machine.cc) ----
[[nodiscard]] Finding CheckKernel();     // pidfd
[[nodiscard]] Finding CheckMemfd();      // memory by descriptor, sealed
[[nodiscard]] Finding CheckCoreType();   // OpenBLAS's kernels
[[nodiscard]] Finding CheckHugePages();  // of workspaces
// `sys` instead of /sys, for tests.
[[nodiscard]] Finding CheckHugePages(const std::string& sys);
[[nodiscard]] Finding CheckDescriptorLimit();
// What the daemon may still take, or this command where no daemon is seen.
[[nodiscard]] Finding CheckMemory(const Surroundings& around);
[[nodiscard]] Finding CheckCores();

// ---- its GPUs (checks_gpu.cc) ----
// Asks the driver by `lane_binary` --probe, with the environment that lanes have. Returns a single
// finding where there is no driver, or where it does not answer within `timeout`.
[[nodiscard]] std::vector<Finding> CheckGpus(const Surroundings& around,
                                             const std::string& lane_binary,
                                             absl::Duration timeout);

// ---- what a container or a unit may keep back (checks_container.cc) ----
[[nodiscard]] Finding CheckNamespaces(const Surroundings& around);
// Which GPUs the environment shows; `seen`: so many are seen.
[[nodiscard]] Finding CheckVisibleDevices(const Surroundings& around, size_t seen);
[[nodiscard]] Finding CheckLockedMemory(const Surroundings& around);
[[nodiscard]] Finding CheckSharedMemory();  // /dev/shm, of NCCL

// ---- where the daemon is or would be (checks_daemon.cc) ----
[[nodiscard]] Finding CheckPrograms();   // dmuond and dmuond-lane beside this program
[[nodiscard]] std::string LaneBeside();  // where it would be
[[nodiscard]] Finding CheckSocketDirectory(const std::string& socket);
[[nodiscard]] Finding CheckSocket(const std::string& socket);
// Version, group and lanes of the daemon; then whether trainers of this user are let in.
[[nodiscard]] std::vector<Finding> CheckDaemon(const std::string& socket, absl::Duration timeout);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_CHECKS_H_
