// A daemon's settings: from flags, the environment (DMUOND_SOCKET, DMUOND_NODES, DMUOND_NODE_RANK,
// DMUOND_COORDINATOR), a file (--config) and defaults. The first of these that has a value counts.
//
//   absl::StatusOr<Config> config = LoadConfig(argc, argv);
//
// docs/configuration.md lists every setting; a test compares it with the flags.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_CONFIG_H_
#define DMUOND_SERVER_DAEMON_PROCESS_CONFIG_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/cost_model.h"
#include "scheduler/job/job_uids.h"
#include "server/common/log.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/process/config.pb.h"

namespace dmuond::server {

// Checked and complete: values that depend on others or on the machine are filled in.
struct Config {
  DeviceList devices;   // of the lanes of this node
  int32_t lanes = 1;    // of this node
  int32_t threads = 1;  // per lane
  std::string lane_binary;
  int64_t lane_memory_bytes = 0;              // 0: no limit
  std::optional<scheduler::CostTable> costs;  // what --cost_table holds
  int64_t job_memory_bytes = 0;               // 0: no limit

  std::string socket;  // absolute path
  std::optional<gid_t> socket_gid;
  std::vector<uid_t> allowed_uids;  // empty: this process's own
  std::vector<uid_t> admin_uids;    // beside root and this process's own
  scheduler::JobUids job_uids;      // with its admins
  int32_t connections_max = 0;
  int32_t connections_per_uid = 0;
  int32_t jobs_max = 1;
  int32_t jobs_per_uid = 0;  // 0: no limit of their own
  std::chrono::milliseconds claim_timeout{0};
  std::string token_file;  // empty: no token is asked for
  bool reflection = false;
  bool lanes_use_mps = true;  // where it runs
  bool allow_plaintext_peers = false;
  // This is node 0, and the coordinator's host leads to no address of this machine.
  bool coordinator_elsewhere = false;
  std::string mps_folder;       // of the control daemon that this one runs; empty: it runs none
  std::string metrics_address;  // host:port; empty: no metrics

  int32_t nodes = 1;
  int32_t node_rank = 0;
  std::string coordinator;     // host:port of node 0; empty with one node
  std::string group_name;      // the label of its metrics, and whose its snapshots are
  std::string peer_listen;     // host:port; empty with one node
  std::string peer_advertise;  // host:port; port 0: the one that peer_listen was given
  std::string rail_address;    // host that lanes' peer groups listen on; empty with one node
  std::string peer_tls_ca;
  std::string peer_tls_certificate;
  std::string peer_tls_key;
  std::string peer_secret_file;             // empty: the group has no secret
  std::vector<std::string> peer_tls_names;  // by node; empty: names are not looked at
  int64_t peer_message_bytes_max = 0;

  std::chrono::milliseconds register_timeout{0};
  std::chrono::milliseconds step_timeout{0};
  std::chrono::milliseconds session_linger{0};
  std::chrono::milliseconds lane_timeout{0};  // 0: lanes are not pinged
  std::chrono::milliseconds rail_timeout{0};  // 0: when the kernel gives up
  std::chrono::milliseconds drain_timeout{0};
  std::chrono::milliseconds check_every{0};  // 0: only when asked
  int32_t skips_max = 0;
  int32_t snapshot_keep = 0;

  std::string snapshot_dir;                              // absolute; empty: no snapshots
  int64_t snapshot_every_steps = 0;                      // 0: not by steps
  std::chrono::milliseconds snapshot_every{0};           // 0: not by time
  std::chrono::milliseconds snapshots_of_ended_jobs{0};  // 0: they stay
  int64_t snapshot_staging_bytes = 0;
  std::chrono::milliseconds snapshot_timeout{0};

  log::Level log_level = log::Level::kInfo;
  log::Format log_format = log::Format::kKeyValue;
  std::string log_file;  // absolute; empty: stderr

  bool replan = false;
  bool print_config = false;
  bool check_config = false;
  // Asked for by --help and --version, to be printed; all else is as by default then.
  std::string help;
  bool version = false;
  config::ConfigFile values;  // all of this as text, for ToText()

  [[nodiscard]] mode_t socket_mode() const { return socket_gid.has_value() ? 0660 : 0600; }
  // The token that OpenSession must carry: the file without space at its end; "" without a file.
  // INVALID_ARGUMENT: unreadable, empty, or readable by everybody.
  [[nodiscard]] absl::StatusOr<std::string> ReadToken() const;
  // The same of the group's secret, which is long.
  [[nodiscard]] absl::StatusOr<std::string> ReadPeerSecret() const;
};

// Parses the command line, reads file and environment, checks everything. INVALID_ARGUMENT: one
// line for each mistake, wherever it was made, naming flag and value.
[[nodiscard]] absl::StatusOr<Config> LoadConfig(int argc, char** argv);

// The settings as a file that --config would read, values filled in, in the order of config.proto.
[[nodiscard]] std::string ToText(const Config& config);

// ---- the steps of LoadConfig, for tests ----

// Fields of `from` in place of those of `to`; repeated ones as a whole.
void Override(const config::ConfigFile& from, config::ConfigFile& to);
[[nodiscard]] absl::StatusOr<config::ConfigFile> ParseConfigText(const std::string& text,
                                                                 const std::string& name);
// REQUIRES: every singular field is set.
[[nodiscard]] absl::StatusOr<Config> Check(const config::ConfigFile& values);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_CONFIG_H_
