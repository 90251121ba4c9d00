#include "client/cpp/src/launch.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cpp/src/variable.h"

namespace dmuond::client {
namespace {

constexpr size_t kLaunchMax = 128;

// When a process began, in clock ticks since the machine did: pids are used again.
std::string Started(pid_t pid) {
  constexpr size_t kStartTime = 19;  // field 22 of proc_pid_stat(5), counted after the command's
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t command_ends = text.rfind(')');
  if (command_ends == std::string::npos) return "0";
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(command_ends + 1), ' ', absl::SkipWhitespace());
  return fields.size() > kStartTime ? fields[kStartTime] : "0";
}

}  // namespace

std::string LaunchFromEnvironment() {
  if (std::string given = Variable("DMUOND_LAUNCH"); !given.empty()) return given;
  std::vector<std::string> parts;
  if (const std::string run = Variable("TORCHELASTIC_RUN_ID"); !run.empty()) {
    parts.push_back(absl::StrCat("torchelastic:", run));
  }
  const std::string address = Variable("MASTER_ADDR");
  const std::string port = Variable("MASTER_PORT");
  if (!address.empty() && !port.empty())
    parts.push_back(absl::StrCat("master:", address, ":", port));
  const std::string job = Variable("SLURM_JOB_ID");
  const std::string step = Variable("SLURM_STEP_ID");
  if (!job.empty() && !step.empty()) {
    const std::string restarts = Variable("SLURM_RESTART_COUNT");
    parts.push_back(absl::StrCat("slurm:", job, ".", step, ".", restarts.empty() ? "0" : restarts));
  }
  const std::string world = Variable("WORLD_SIZE");
  // All ranks are children of one launcher: run ids and ports may be those of the last time.
  if (!world.empty() && world == Variable("LOCAL_WORLD_SIZE")) {
    const pid_t parent = ::getppid();
    parts.push_back(absl::StrCat("parent:", parent, ".", Started(parent)));
  }
  // A name that is too long keeps its end, in which starts differ most.
  const std::string all = absl::StrJoin(parts, "/");
  return all.size() > kLaunchMax ? all.substr(all.size() - kLaunchMax) : all;
}

absl::Status CheckLaunch(const Options& options) {
  if (options.resume != Resume::kDiscard) return absl::OkStatus();
  if (options.launch.size() > kLaunchMax) {
    return absl::InvalidArgumentError(absl::StrCat("launch (DMUOND_LAUNCH) has ",
                                                   options.launch.size(), " bytes; at most ",
                                                   kLaunchMax, " are possible"));
  }
  if (options.world_size == 1 || !options.launch.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Resume::kDiscard with world_size ", options.world_size,
      ": neither torchrun nor Slurm says which ranks were started together. Set DMUOND_LAUNCH (or "
      "Options::launch) to one value on all of them, and to another with the next start "
      "(DMUOND_LAUNCH=$(date +%s), say)"));
}

}  // namespace dmuond::client
