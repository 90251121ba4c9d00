// A subcommand of dmuonctl: a function from arguments and options to an exit code.
#ifndef DMUOND_SERVER_CTL_COMMAND_H_
#define DMUOND_SERVER_CTL_COMMAND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dmuond::server::ctl {

// The flags, of all subcommands.
struct Options {
  std::string address;  // path of the daemon's socket
  std::string job;      // empty: the only one
  bool json = false;
  absl::Duration timeout;

  std::string model;  // plan: offline if not empty
  int32_t lanes = 0;
  int32_t nodes = 0;
  int32_t layers = 0;
  int64_t lane_memory_bytes = 0;

  std::string lane_binary;  // doctor
  absl::Duration gpu_timeout;

  std::string devices;  // run
  std::string mps;
  int32_t threads = 0;
  std::string config;
  std::string dmuond;
  std::string daemon_log;
  std::string peer_secret_file;
  absl::Duration ready_timeout;
  absl::Duration drain_timeout;
  absl::Duration snapshot_timeout;  // snapshot save
  bool save = false;                // job end
  bool force = false;               // drain
  absl::Duration interval;          // top
  int64_t count = 0;                // top; 0: until it is ended
  int32_t steps = 0;                // trace
  std::string output;
  absl::Duration trace_timeout;
  bool this_node = false;
  int32_t matrices = 0;
  absl::Duration sample_timeout;
  absl::Duration check_timeout;
};

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

// `arguments` are those after the subcommand's name that are no flags.
using Arguments = std::vector<std::string>;

int RunStatus(const Options& options, const Arguments& arguments);
int RunTop(const Options& options, const Arguments& arguments);
int RunTrace(const Options& options, const Arguments& arguments);
int RunOrthogonality(const Options& options, const Arguments& arguments);
int RunCheck(const Options& options, const Arguments& arguments);
int RunJobs(const Options& options, const Arguments& arguments);
int RunJob(const Options& options, const Arguments& arguments);
int RunReady(const Options& options, const Arguments& arguments);
int RunRouting(const Options& options, const Arguments& arguments);
int RunPlan(const Options& options, const Arguments& arguments);
int RunDoctor(const Options& options, const Arguments& arguments);
int RunLogLevel(const Options& options, const Arguments& arguments);
int RunDrain(const Options& options, const Arguments& arguments);
int RunRun(const Options& options, const Arguments& arguments);
int RunSecret(const Options& options, const Arguments& arguments);
int RunSnapshot(const Options& options, const Arguments& arguments);
int RunSnapshotSave(const Options& options);
// 0: the newest.
int RunSnapshotLoad(const Options& options, int64_t step);

// "dmuonctl: …" on stderr, with the reason where there is one; returns kExitFailed.
int Fail(const absl::Status& status);
// The same for a wrong command line; returns kExitUsage.
int FailUsage(const std::string& message);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_COMMAND_H_
