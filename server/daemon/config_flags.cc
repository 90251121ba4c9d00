#include "server/daemon/config_flags.h"

#include <cstdint>
#include <map>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/version.h"

namespace {

// How often each flag was set since the program started; its default counts.
std::map<std::string, int>& TimesSet() {
  static auto* times = new std::map<std::string, int>();
  return *times;
}

}  // namespace

#define DMUOND_FLAG(type, name, value, help) \
  ABSL_FLAG(type, name, value, help).OnUpdate([] { ++TimesSet()[#name]; })

DMUOND_FLAG(std::string, devices, "cpu:1", "cpu:N runs N lanes on the CPU");
DMUOND_FLAG(int32_t, threads, 0, "compute threads of each lane; 0: this machine's cores / lanes");
DMUOND_FLAG(std::string, lane_binary, "",
            "the lanes' program; empty: dmuond-lane beside this program");
DMUOND_FLAG(int64_t, lane_memory_bytes, 0,
            "what the plan may use of each lane's memory, bytes; 0: no limit");
DMUOND_FLAG(int64_t, job_memory_bytes, 0,
            "a job's state, staging and arenas on this node, bytes; 0: no limit");

DMUOND_FLAG(std::string, cost_table, "",
            "file of measured update times that node 0 plans with (muon_tune); empty: estimates");

DMUOND_FLAG(std::string, socket, "",
            "path of the gRPC socket; empty: ${XDG_RUNTIME_DIR:-/tmp}/dmuond-$UID/dmuond.sock");
DMUOND_FLAG(std::string, socket_group, "",
            "group (name or number) that may connect too; empty: the owner alone");
DMUOND_FLAG(std::vector<std::string>, allowed_uids, {},
            "numeric users whose trainers are served, with commas; empty: the daemon's own");
DMUOND_FLAG(int32_t, connections_max, 4096, "attach connections at a time");
DMUOND_FLAG(std::string, token_file, "",
            "file with the token that sessions must present; empty: none is asked for");
DMUOND_FLAG(int64_t, message_bytes_max, int64_t{64} << 20, "largest gRPC request, bytes");
DMUOND_FLAG(bool, reflection, false, "serve gRPC reflection");
DMUOND_FLAG(std::string, health_address, "",
            "host:port that serves gRPC health checks and nothing else; empty: the socket alone");

DMUOND_FLAG(int32_t, nodes, 1, "daemons in the group");
DMUOND_FLAG(int32_t, node_rank, 0, "this daemon's place in the group, from 0");
DMUOND_FLAG(std::string, coordinator, "", "host:port at which node 0 is reached; with nodes > 1");
DMUOND_FLAG(std::string, peer_listen, "",
            "host:port for other daemons; empty: all addresses (loopback if the coordinator's is), "
            "node 0 at the coordinator's port, others at any");
DMUOND_FLAG(std::string, peer_advertise, "",
            "host:port at which other daemons reach this one; empty: host name (or loopback) and "
            "the port of peer_listen");
DMUOND_FLAG(std::string, rail_address, "",
            "address that lanes listen on for their rails; empty: the host of peer_advertise");
DMUOND_FLAG(bool, allow_plaintext_peers, false, "let daemons talk without TLS beyond loopback");
DMUOND_FLAG(std::string, peer_tls_ca, "", "PEM file: who signs the daemons' certificates");
DMUOND_FLAG(std::string, peer_tls_certificate, "", "PEM file: this daemon's certificate");
DMUOND_FLAG(std::string, peer_tls_key, "", "PEM file: the certificate's key");

DMUOND_FLAG(absl::Duration, register_timeout, absl::Seconds(120),
            "from the first rank's registration to the last one's");
DMUOND_FLAG(absl::Duration, step_timeout, absl::Minutes(10),
            "a rank that has not submitted so long after the first one counts as dead");
DMUOND_FLAG(absl::Duration, session_linger, absl::Minutes(10),
            "how long a job waits for the replacement of a trainer that is gone");
DMUOND_FLAG(int32_t, skips_max, 50,
            "steps skipped in a row for non-finite gradients before steps fail");

DMUOND_FLAG(std::string, snapshot_dir, "",
            "directory of snapshots, seen by all daemons of the group; empty: none are made");
DMUOND_FLAG(int64_t, snapshot_every_steps, 500,
            "steps from one snapshot to the next; 0: not by steps");
DMUOND_FLAG(absl::Duration, snapshot_every, absl::Minutes(10),
            "time from one snapshot to the next; 0: not by time");
DMUOND_FLAG(int32_t, snapshot_keep, 2, "snapshots of a job that are kept, the newest ones");
DMUOND_FLAG(int64_t, snapshot_staging_bytes, int64_t{2} << 30,
            "pinned memory of a lane through which device memory is copied for a snapshot, bytes");
DMUOND_FLAG(bool, replan, false,
            "plan a job that goes on from a snapshot with --cost_table, not with the costs that it "
            "was planned with");

DMUOND_FLAG(std::string, state_dir, "",
            "directory for what outlives the process; empty: nothing is written");
DMUOND_FLAG(std::string, log_level, "info", "trace, debug, info, warn or error");
DMUOND_FLAG(std::string, log_format, "kv", "kv (key=value) or json");

ABSL_FLAG(std::string, config, "", "file of settings, protobuf text format; flags win over it");
ABSL_FLAG(bool, print_config, false, "print the settings that hold, as such a file, and exit");
ABSL_FLAG(bool, check_config, false, "check the settings and exit: 0 if they are right");

namespace dmuond::server {
namespace {

using google::protobuf::FieldDescriptor;

constexpr char kUsage[] =
    "dmuond: the optimizer daemon of one node.\n\n"
    "  dmuond --devices=cpu:2\n"
    "  dmuond --config=/etc/dmuond/config.textproto\n\n"
    "docs/configuration.md explains each setting.";

// Once: abseil ends a process that does it twice.
bool SetUsage() {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  const auto ours = [](absl::string_view file) {
    return absl::EndsWith(file, "server/daemon/config_flags.cc");
  };
  usage.contains_helpshort_flags = ours;
  usage.contains_help_flags = ours;
  usage.contains_helppackage_flags = ours;
  usage.version_string = [] { return absl::StrCat("dmuond ", kBuildVersion, "\n"); };
  absl::SetFlagsUsageConfig(usage);
  return true;
}

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
    case FieldDescriptor::CPPTYPE_UINT32: {  // a list: allowed_uids
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
  [[maybe_unused]] static const bool usage_set = SetUsage();
  const std::map<std::string, int> before = TimesSet();
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument '", rest[1], "': settings begin with --"));
  }
  ParsedFlags parsed;
  const google::protobuf::Descriptor& descriptor = *config::ConfigFile::descriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(field.name());
    if (flag == nullptr) {
      return absl::InternalError(absl::StrCat("setting ", field.name(), " has no flag"));
    }
    absl::Status status = SetField(field, flag->DefaultValue(), parsed.defaults);
    if (status.ok() && TimesSet()[field.name()] > before.at(field.name())) {
      status = SetField(field, flag->CurrentValue(), parsed.given);
    }
    if (!status.ok()) return status;
  }
  parsed.config_path = absl::GetFlag(FLAGS_config);
  parsed.print_config = absl::GetFlag(FLAGS_print_config);
  parsed.check_config = absl::GetFlag(FLAGS_check_config);
  return parsed;
}

}  // namespace dmuond::server
