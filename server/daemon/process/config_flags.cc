#include "server/daemon/process/config_flags.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/command_line.h"

ABSL_FLAG(
    std::string, devices, "cpu:1",
    "cpu:N runs N lanes on the CPU; cuda:N one on each of the first N GPUs; cuda:0,2 on those");
ABSL_FLAG(std::string, mps, "auto",
          "whether lanes use CUDA's multi-process service: auto, as their environment says; "
          "managed, with "
          "a control daemon that this daemon runs in <socket>.mps; or off");
ABSL_FLAG(int32_t, threads, 0, "compute threads of each lane; 0: this machine's cores / lanes");
ABSL_FLAG(std::string, lane_binary, "",
          "the lanes' program; empty: dmuond-lane beside this program");
ABSL_FLAG(int64_t, lane_memory_bytes, 0,
          "what the plan may use of each lane's memory, bytes; 0: no limit");
ABSL_FLAG(int64_t, job_memory_bytes, 0,
          "a job's state, staging and arenas on this node, bytes; 0: no limit");

ABSL_FLAG(std::string, cost_table, "",
          "file of measured update times that node 0 plans with (muon_tune); empty: estimates");

ABSL_FLAG(std::string, socket, "",
          "path of the gRPC socket; empty: ${XDG_RUNTIME_DIR:-/tmp}/dmuond-$UID/dmuond.sock");
ABSL_FLAG(std::string, socket_group, "",
          "group (name or number) that may connect too; empty: the owner alone");
ABSL_FLAG(std::vector<std::string>, allowed_uids, {},
          "numeric users whose trainers are served, with commas; empty: the daemon's own");
ABSL_FLAG(std::vector<std::string>, admin_uids, {},
          "numeric users who may change things by dmuonctl, with commas, beside root and the "
          "daemon's own; who else may connect may look");
ABSL_FLAG(std::string, job_uids, "same",
          "whose trainers may have part in a user's job: same: that user's; any: all that are let "
          "in; numeric users, with commas: these share their jobs");
ABSL_FLAG(absl::Duration, claim_timeout, absl::Seconds(60),
          "an attach connection that has not opened a session after so long is closed");
ABSL_FLAG(int32_t, connections_max, 4096, "connections of each socket at a time");
ABSL_FLAG(int32_t, connections_per_uid, 256, "of those, of one user");
ABSL_FLAG(int32_t, jobs_max, 4, "jobs at a time, each with lane processes and memory of its own");
ABSL_FLAG(int32_t, jobs_per_uid, 0, "of those, of one user on this node; 0: all");
ABSL_FLAG(std::string, token_file, "",
          "file with the token that sessions must present; empty: none is asked for");
ABSL_FLAG(bool, reflection, false, "serve gRPC reflection");
ABSL_FLAG(
    std::string, metrics_address, "",
    "host:port that serves /metrics for Prometheus, the page /statusz, and /livez and /readyz for "
    "probes; empty: none of them");

ABSL_FLAG(int32_t, nodes, 1, "daemons in the group");
ABSL_FLAG(int32_t, node_rank, 0, "this daemon's place in the group, from 0");
ABSL_FLAG(std::string, coordinator, "", "host:port at which node 0 is reached; with nodes > 1");
ABSL_FLAG(
    std::string, group_name, "",
    "the label `group` of its metrics, and whose its snapshots are; the same on all daemons of "
    "a group; empty: the coordinator, or host:socket of a daemon alone");
ABSL_FLAG(std::string, peer_listen, "",
          "host:port for other daemons; empty: all addresses (loopback if the coordinator's is), "
          "node 0 at the coordinator's port, others at any");
ABSL_FLAG(std::string, peer_advertise, "",
          "host:port at which other daemons reach this one; empty: host name (or loopback) and "
          "the port of peer_listen");
ABSL_FLAG(std::string, rail_address, "",
          "address that lanes listen on for their rails; empty: the host of peer_advertise");
ABSL_FLAG(bool, allow_plaintext_peers, false,
          "let daemons and lanes talk without TLS beyond loopback");
ABSL_FLAG(std::string, peer_tls_ca, "", "PEM file: who signs the daemons' certificates");
ABSL_FLAG(std::string, peer_tls_certificate, "", "PEM file: this daemon's certificate");
ABSL_FLAG(std::string, peer_tls_key, "", "PEM file: the certificate's key");
ABSL_FLAG(std::string, peer_tls_names, "",
          "the names that nodes' certificates must have: one with {rank} in it, as in "
          "node{rank}.cluster, or one for each node, with commas; empty: not looked at");
ABSL_FLAG(std::string, peer_secret_file, "",
          "file with the secret of the group, by which daemons prove who they are; `dmuonctl "
          "secret new FILE` makes one");
ABSL_FLAG(int64_t, peer_message_bytes_max, int64_t{512} << 20,
          "largest message of a proven daemon, bytes: a plan's inputs");
ABSL_FLAG(bool, allow_plaintext_rail, false,
          "let lanes exchange gradients and weights, which is never encrypted, beyond loopback "
          "while daemons talk TLS");

ABSL_FLAG(absl::Duration, register_timeout, absl::Seconds(120),
          "from the first rank's registration to the last one's");
ABSL_FLAG(absl::Duration, step_timeout, absl::Minutes(10),
          "a rank that has not submitted so long after the first one counts as dead");
ABSL_FLAG(absl::Duration, session_linger, absl::Minutes(10),
          "how long a job waits for the replacement of a trainer that is gone");
ABSL_FLAG(absl::Duration, lane_timeout, absl::Seconds(30),
          "a lane that neither answers nor computes for so long is killed and replaced; 0: never");
ABSL_FLAG(
    absl::Duration, rail_timeout, absl::Seconds(60),
    "a node counts as gone whose machine acknowledges nothing on a rail for so long (lanes on "
    "the CPU); 0: when the kernel gives it up");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(45),
          "how long a daemon that is told to leave may take to finish its step and to save; less "
          "than what the service manager waits before it kills");
ABSL_FLAG(int32_t, skips_max, 50,
          "steps skipped in a row for non-finite gradients before steps fail");

ABSL_FLAG(absl::Duration, check_every, absl::Hours(24),
          "time from one comparison of all copies of state and weights to the next, which node 0 "
          "makes while training goes on; 0: only when dmuonctl check asks");
ABSL_FLAG(std::string, snapshot_dir, "",
          "directory of snapshots, seen by all daemons of the group; empty: none are made");
ABSL_FLAG(int64_t, snapshot_every_steps, 500,
          "steps from one snapshot to the next; 0: not by steps");
ABSL_FLAG(absl::Duration, snapshot_every, absl::Minutes(10),
          "time from one snapshot to the next; 0: not by time");
ABSL_FLAG(int32_t, snapshot_keep, 2, "snapshots of a job that are kept, the newest ones");
ABSL_FLAG(std::string, snapshots_of_ended_jobs, "keep",
          "how long after its newest snapshot an ended job's are removed, as in 30d or 12h; keep: "
          "never");
ABSL_FLAG(int64_t, snapshot_staging_bytes, int64_t{2} << 30,
          "pinned memory of a lane through which device memory is copied for a snapshot, bytes");
ABSL_FLAG(
    absl::Duration, snapshot_timeout, absl::Minutes(5),
    "how long one write or sync in snapshot_dir may take; then it hangs, and the snapshot fails");
ABSL_FLAG(bool, replan, false,
          "plan a job that goes on from a snapshot with --cost_table, not with the costs that it "
          "was planned with");

ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");
ABSL_FLAG(std::string, log_format, "kv", "kv (key=value) or json");
ABSL_FLAG(std::string, log_file, "",
          "file that the log is appended to, opened again at SIGHUP; empty: stderr");

ABSL_FLAG(std::string, config, "", "file of settings, protobuf text format; flags win over it");
ABSL_FLAG(bool, print_config, false, "print the settings that hold, as such a file, and exit");
ABSL_FLAG(bool, check_config, false, "check the settings and exit: 0 if they are right");

namespace dmuond::server {
namespace {

using google::protobuf::FieldDescriptor;

constexpr char kFile[] = "server/daemon/process/config_flags.cc";
constexpr char kUsage[] =
    "dmuond: the optimizer daemon of one node.\n\n"
    "  dmuond --devices=cpu:2\n"
    "  dmuond --config=/etc/dmuond/config.textproto\n\n"
    "Each setting is a flag, or a line of the file that --config names; docs/configuration.md "
    "explains them.\n"
    "A flag wins over the environment (DMUOND_SOCKET, DMUOND_NODES, DMUOND_NODE_RANK, "
    "DMUOND_COORDINATOR), and that over the file.\n\n"
    "SIGTERM and SIGINT have it finish the step, save and leave; a second one ends it at once.\n"
    "SIGHUP has it open its log and TLS files again.\n\n"
    "It ends with 0 when it has left, 1 after an error, 2 when its settings are wrong, and 3 when "
    "it has left and the last steps are in no snapshot.\n\n";

absl::Status NoValue(const FieldDescriptor& field, const std::string& text, const char* wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", field.name(), "=", text, " is not ", wanted));
}

}  // namespace

absl::Status SetField(const FieldDescriptor& field, const std::string& text,
                      config::ConfigFile& file) {
  const google::protobuf::Reflection& reflection = *file.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      reflection.SetString(&file, &field, text);
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL: {
      bool value = false;
      if (!absl::SimpleAtob(text, &value)) return NoValue(field, text, "true or false");
      reflection.SetBool(&file, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      int32_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) return NoValue(field, text, "an integer");
      reflection.SetInt32(&file, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      int64_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) return NoValue(field, text, "an integer");
      reflection.SetInt64(&file, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT32: {  // a list of users
      reflection.ClearField(&file, &field);
      for (const absl::string_view item : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
        uint32_t value = 0;
        if (!absl::SimpleAtoi(item, &value)) return NoValue(field, text, "a list of numbers");
        reflection.AddUInt32(&file, &field, value);
      }
      return absl::OkStatus();
    }
    default:
      return absl::InternalError(absl::StrCat("setting ", field.name(), " has no type of a flag"));
  }
}

absl::StatusOr<ParsedFlags> ParseFlags(int argc, char** argv) {
  CommandLine line = ReadCommandLine(argc, argv, kFile);
  ParsedFlags parsed;
  if (line.help) parsed.help = absl::StrCat(kUsage, HelpText(kFile));
  parsed.version = line.version;
  parsed.mistakes = std::move(line.mistakes);
  for (const std::string& argument : line.arguments) {
    parsed.mistakes.push_back(
        absl::StrCat("unexpected argument '", argument, "': settings begin with --"));
  }
  const google::protobuf::Descriptor& descriptor = *config::ConfigFile::descriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(field.name());
    if (flag == nullptr) {
      return absl::InternalError(absl::StrCat("setting ", field.name(), " has no flag"));
    }
    absl::Status status = SetField(field, flag->DefaultValue(), parsed.defaults);
    if (!status.ok()) return status;
    const auto given = line.given.find(field.name());
    if (given == line.given.end()) continue;
    status = SetField(field, given->second, parsed.given);
    if (!status.ok()) parsed.mistakes.emplace_back(status.message());
  }
  parsed.config_path = absl::GetFlag(FLAGS_config);
  parsed.print_config = absl::GetFlag(FLAGS_print_config);
  parsed.check_config = absl::GetFlag(FLAGS_check_config);
  return parsed;
}

}  // namespace dmuond::server
