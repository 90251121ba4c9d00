// dmuonctl: asks a daemon, plans without one, looks for causes, runs a command beside one.
#include <array>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/command_line.h"
#include "server/commit.h"
#include "server/ctl/command.h"
#include "server/ctl/connection.h"
#include "server/version.h"

ABSL_FLAG(std::string, address, "",
          "the daemon's socket; empty: $DMUOND_ADDRESS, else where dmuond serves by default");
ABSL_FLAG(
    std::string, job, "",
    "status, top, routing, plan, trace, check, snapshot save and load: of this job; empty: the "
    "only one (status, top: the first)");
ABSL_FLAG(bool, json, false, "print JSON");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(10), "how long to wait for an answer");
ABSL_FLAG(std::string, model, "", "plan: of this model, without a daemon (llama3-8b, …)");
ABSL_FLAG(int32_t, lanes, 8, "plan --model: lanes of each node");
ABSL_FLAG(int32_t, nodes, 1, "plan --model: nodes");
ABSL_FLAG(int32_t, layers, 0, "plan --model: another depth than the model's own; 0: its own");
ABSL_FLAG(int64_t, lane_memory_bytes, 0, "plan --model: memory of a lane, bytes; 0: no limit");
ABSL_FLAG(
    std::string, lane_binary, "",
    "doctor: the lane's program, which is asked for GPUs; empty: dmuond-lane beside dmuonctl");
ABSL_FLAG(absl::Duration, gpu_timeout, absl::Seconds(60),
          "doctor: how long the GPUs' driver may take; it hangs if it takes longer");
ABSL_FLAG(std::string, devices, "", "run: the daemon's --devices, as in cpu:2");
ABSL_FLAG(std::string, mps, "",
          "run: the daemon's --mps; with managed the command gets CUDA_MPS_PIPE_DIRECTORY");
ABSL_FLAG(int32_t, threads, 0, "run: the daemon's --threads; 0: its default");
ABSL_FLAG(std::string, config, "", "run: the daemon's --config, for everything else");
ABSL_FLAG(std::string, dmuond, "", "run: the daemon's program; empty: dmuond beside dmuonctl");
ABSL_FLAG(std::string, daemon_log, "",
          "run: file that the daemon's log is appended to; empty: warnings, on stderr");
ABSL_FLAG(std::string, peer_secret_file, "",
          "run: the daemon's --peer_secret_file, made if it is not there");
ABSL_FLAG(absl::Duration, ready_timeout, absl::Seconds(60),
          "run: how long the daemon may take to be ready");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Minutes(2),
          "run, drain: how long the daemon may take to finish its step and leave");
ABSL_FLAG(absl::Duration, snapshot_timeout, absl::Minutes(10),
          "snapshot save, job end --save: how long the snapshot may take to be written");

ABSL_FLAG(absl::Duration, interval, absl::Seconds(1), "top: from one look to the next");
ABSL_FLAG(int64_t, count, 0, "top: how many looks; 0: until it is ended");
ABSL_FLAG(int32_t, steps, 10, "trace: how many steps, 1 to 1000");
ABSL_FLAG(std::string, o, "", "trace: the file to write");
ABSL_FLAG(bool, this_node, false, "trace: of this node's lanes alone, not of all nodes'");
ABSL_FLAG(absl::Duration, trace_timeout, absl::Minutes(1),
          "trace: how long the steps may take; what has come until then is written");
ABSL_FLAG(int32_t, matrices, 4,
          "orthogonality: without names, of so many matrices of this node, 1 to 100");
ABSL_FLAG(absl::Duration, sample_timeout, absl::Minutes(1),
          "orthogonality: how long the steps may take; what has come until then is shown");
ABSL_FLAG(absl::Duration, check_timeout, absl::Minutes(10),
          "check: how long the whole of it may take, 1h at most");
ABSL_FLAG(bool, save, false, "job end: into a snapshot first; where that fails, the job goes on");
ABSL_FLAG(bool, force, false, "drain: also where the newest snapshot failed");

namespace dmuond::server::ctl {
namespace {

struct Subcommand {
  const char* name;
  const char* usage;
  int (*run)(const Options&, const Arguments&);
};

constexpr std::array<Subcommand, 16> kSubcommands = {{
    {"status", "status                     the daemon, a job and its lanes", RunStatus},
    {"top",
     "top [--interval=1s --count=N]\n"
     "                             the same again and again, with steps a second, until q or ^C",
     RunTop},
    {"jobs", "jobs                       one line for each job", RunJobs},
    {"job",
     "job end NAME [--save]      a job ends on all nodes, its trainers are told\n"
     "  job accept-lanes NAME      lanes of this node that are refused because a library was\n"
     "                             replaced may work, though later steps may have other bits",
     RunJob},
    {"ready", "ready                      for probes: 0 if the daemon is ready, else 1 and why not",
     RunReady},
    {"routing", "routing                    every parameter: route, owners, why", RunRouting},
    {"plan",
     "plan [--model=NAME --lanes=N --nodes=N [--layers=N]]\n"
     "                             who owns how much; with --model without a daemon",
     RunPlan},
    {"doctor", "doctor                     what is right and wrong with this machine and daemon",
     RunDoctor},
    {"trace", "trace [--steps=N] -o FILE  what lanes do in the next steps, for ui.perfetto.dev",
     RunTrace},
    {"orthogonality",
     "orthogonality [PARAMETER…] [--matrices=N]\n"
     "                             how orthogonal updates are, of a matrix in each of the next "
     "steps",
     RunOrthogonality},
    {"check",
     "check                      whether all copies of a job's weights and state are equal",
     RunCheck},
    {"log-level", "log-level LEVEL            trace, debug, info, warn or error", RunLogLevel},
    {"drain", "drain [--force]            finish the step, save and leave", RunDrain},
    {"run",
     "run [--devices=cpu:2] [--config=FILE] -- COMMAND…\n"
     "                             run a command beside a daemon of its own (DMUOND_ADDRESS)",
     RunRun},
    {"secret",
     "secret new FILE            make the secret of a group of daemons (--peer_secret_file)",
     RunSecret},
    {"snapshot",
     "snapshot list DIRECTORY [JOB]\n"
     "  snapshot verify DIRECTORY [JOB [STEP]]\n"
     "                             what lies in a snapshot directory, and whether it is whole\n"
     "  snapshot save              save the running job; returns when the snapshot exists\n"
     "  snapshot load [STEP]       the running job goes back to a snapshot (default: the newest)",
     RunSnapshot},
}};

constexpr char kWhatItIs[] =
    "dmuonctl: asks a daemon, plans without one, looks for causes, runs a command beside one.\n\n"
    "It ends with 0, with 1 when what was asked for failed, and with 2 when the command line is "
    "wrong; `run` ends as its command does.\n\n";

std::string Usage() {
  std::string usage = "dmuonctl SUBCOMMAND [--json] [--address=SOCKET] [--job=NAME]\n";
  for (const Subcommand& subcommand : kSubcommands) {
    absl::StrAppend(&usage, "  ", subcommand.usage, "\n");
  }
  return usage;
}

Options ReadOptions() {
  return {.address = ResolveAddress(absl::GetFlag(FLAGS_address)),
          .job = absl::GetFlag(FLAGS_job),
          .json = absl::GetFlag(FLAGS_json),
          .timeout = absl::GetFlag(FLAGS_timeout),
          .model = absl::GetFlag(FLAGS_model),
          .lanes = absl::GetFlag(FLAGS_lanes),
          .nodes = absl::GetFlag(FLAGS_nodes),
          .layers = absl::GetFlag(FLAGS_layers),
          .lane_memory_bytes = absl::GetFlag(FLAGS_lane_memory_bytes),
          .lane_binary = absl::GetFlag(FLAGS_lane_binary),
          .gpu_timeout = absl::GetFlag(FLAGS_gpu_timeout),
          .devices = absl::GetFlag(FLAGS_devices),
          .mps = absl::GetFlag(FLAGS_mps),
          .threads = absl::GetFlag(FLAGS_threads),
          .config = absl::GetFlag(FLAGS_config),
          .dmuond = absl::GetFlag(FLAGS_dmuond),
          .daemon_log = absl::GetFlag(FLAGS_daemon_log),
          .peer_secret_file = absl::GetFlag(FLAGS_peer_secret_file),
          .ready_timeout = absl::GetFlag(FLAGS_ready_timeout),
          .drain_timeout = absl::GetFlag(FLAGS_drain_timeout),
          .snapshot_timeout = absl::GetFlag(FLAGS_snapshot_timeout),
          .save = absl::GetFlag(FLAGS_save),
          .force = absl::GetFlag(FLAGS_force),
          .interval = absl::GetFlag(FLAGS_interval),
          .count = absl::GetFlag(FLAGS_count),
          .steps = absl::GetFlag(FLAGS_steps),
          .output = absl::GetFlag(FLAGS_o),
          .trace_timeout = absl::GetFlag(FLAGS_trace_timeout),
          .this_node = absl::GetFlag(FLAGS_this_node),
          .matrices = absl::GetFlag(FLAGS_matrices),
          .sample_timeout = absl::GetFlag(FLAGS_sample_timeout),
          .check_timeout = absl::GetFlag(FLAGS_check_timeout)};
}

int Main(int argc, char** argv) {
  const CommandLine line = ReadCommandLine(argc, argv, "server/ctl/main.cc");
  const std::string name = line.arguments.empty() ? "" : line.arguments[0];
  // What a command after `run` means by its flags is for the command to say.
  const bool runs = name == "run" && line.arguments.size() > 1 && !line.separated;
  if (!runs && (line.help || line.version || name == "help")) {
    std::cout << (line.version
                      ? VersionText("dmuonctl", kBuildCommit)
                      : absl::StrCat(kWhatItIs, Usage(), "\n", HelpText("server/ctl/main.cc")));
    return kExitOk;
  }
  if (runs && (line.help || line.version || !line.mistakes.empty())) {
    return FailUsage(
        absl::StrCat("a command with flags of its own stands after `--`: dmuonctl run "
                     "-- ",
                     line.arguments[1], " …"));
  }
  if (!line.mistakes.empty()) return FailUsage(absl::StrJoin(line.mistakes, "\ndmuonctl: "));
  if (name.empty()) {
    std::cerr << Usage();
    return kExitUsage;
  }
  if (const absl::Duration timeout = absl::GetFlag(FLAGS_timeout);
      timeout <= absl::ZeroDuration()) {
    return FailUsage(absl::StrCat("--timeout=", absl::FormatDuration(timeout),
                                  " is no time to wait: give one above 0, as in 10s"));
  }
  const Arguments arguments(line.arguments.begin() + 1, line.arguments.end());
  for (const Subcommand& subcommand : kSubcommands) {
    if (name == subcommand.name) return subcommand.run(ReadOptions(), arguments);
  }
  return FailUsage(absl::StrCat("there is no subcommand '", name, "'\n", Usage()));
}

}  // namespace
}  // namespace dmuond::server::ctl

int main(int argc, char** argv) {
  return dmuond::server::EndOutput("dmuonctl", dmuond::server::ctl::Main(argc, argv));
}
