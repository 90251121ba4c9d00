// From settings as text to a Config that can be used as it is.
#include <grp.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "scheduler/limits.h"
#include "server/common/mps_control.h"
#include "server/common/whole_file.h"
#include "server/cost_file.h"
#include "server/daemon/group/peer_names.h"
#include "server/daemon/group/peer_tls_files.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/process/config.h"
#include "server/daemon/process/loopback.h"
#include "server/daemon/process/socket_dir.h"

namespace dmuond::server {
namespace {

namespace fs = std::filesystem;

// A lane is a process with threads and memory of its own: more than this is a slip of the finger.
constexpr int32_t kLanesPerNodeMax = 256;
constexpr int32_t kThreadsMax = 1024;
constexpr int64_t kPeerMessageBytesMin = int64_t{1} << 20;
// What fits into one frame to a lane, with what stands beside it.
constexpr int64_t kPeerMessageBytesMax = (int64_t{1} << 30) - (int64_t{1} << 20);
// Of a peer secret: as text it is 16 random bytes or more, in which fewer values than these do not
// come by chance.
constexpr size_t kSecretCharactersMin = 32;
constexpr size_t kSecretDifferentBytesMin = 8;
constexpr size_t kGroupNameMax = 128;

struct HostPort {
  std::string host;
  int32_t port = 0;
};

bool ParseHostPort(const std::string& text, int32_t port_min, HostPort& result) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return false;
  result.host = text.substr(0, colon);
  const bool brackets = result.host.front() == '[' && result.host.back() == ']';
  if (!brackets && absl::StrContains(result.host, ':')) return false;  // IPv6 needs brackets
  return absl::SimpleAtoi(text.substr(colon + 1), &result.port) && result.port >= port_min &&
         result.port <= 65535;
}

bool IsAnyHost(const std::string& host) { return host == "0.0.0.0" || host == "[::]"; }

std::string HostName() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "localhost";
}

int32_t Cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// Checks one setting after another, and remembers every mistake.
class Checker {
 public:
  explicit Checker(const config::ConfigFile& values) { config_.values = values; }

  absl::StatusOr<Config> Run() {
    Lanes();
    Memory();
    Access();
    Group();
    Tls();
    Proofs();
    Times();
    Snapshots();
    Writing();
    if (!mistakes_.empty()) return absl::InvalidArgumentError(absl::StrJoin(mistakes_, "\n"));
    return std::move(config_);
  }

 private:
  template <typename Value>
  void Wrong(const char* flag, const Value& value, absl::string_view why) {
    mistakes_.push_back(absl::StrCat("--", flag, "=", value, " ", why));
  }

  template <typename Integer>
  Integer InRange(const char* flag, Integer value, Integer low, Integer high) {
    if (value < low || value > high) {
      Wrong(flag, value, absl::StrCat("is not between ", low, " and ", high));
    }
    return value;
  }

  void Lanes() {
    config::ConfigFile& values = config_.values;
    const absl::StatusOr<DeviceList> devices = ParseDevices(values.devices(), kLanesPerNodeMax);
    if (!devices.ok()) Wrong("devices", values.devices(), std::string(devices.status().message()));
    if (devices.ok()) config_.devices = *devices;
    config_.lanes = config_.devices.lanes;
    if (values.mps() != "auto" && values.mps() != "managed" && values.mps() != "off") {
      Wrong("mps", values.mps(), "is none of auto, managed and off");
    }
    if (values.mps() == "managed" && devices.ok() && devices->type != "cuda") {
      Wrong("mps", values.mps(),
            absl::StrCat("needs lanes on GPUs, as in --devices=cuda:1, and --devices=",
                         values.devices(), " has none"));
    }
    config_.lanes_use_mps = values.mps() != "off";
    config_.threads = InRange("threads", values.threads(), 0, kThreadsMax);
    if (config_.threads == 0) config_.threads = std::max(1, Cores() / config_.lanes);
    values.set_threads(config_.threads);
    config_.lane_binary = values.lane_binary();
    if (config_.lane_binary.empty()) {
      std::error_code error;
      config_.lane_binary =
          fs::read_symlink("/proc/self/exe", error).replace_filename("dmuond-lane").string();
    }
    struct stat status {};
    if (::stat(config_.lane_binary.c_str(), &status) != 0 || !S_ISREG(status.st_mode) ||
        ::access(config_.lane_binary.c_str(), X_OK) != 0) {
      Wrong("lane_binary", config_.lane_binary, "is no program that can be run");
    }
    values.set_lane_binary(config_.lane_binary);
  }

  void Memory() {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    const config::ConfigFile& values = config_.values;
    config_.lane_memory_bytes =
        InRange<int64_t>("lane_memory_bytes", values.lane_memory_bytes(), 0, kMax);
    config_.job_memory_bytes =
        InRange<int64_t>("job_memory_bytes", values.job_memory_bytes(), 0, kMax);
    if (!values.cost_table().empty()) {
      absl::StatusOr<scheduler::CostTable> costs = ReadCostTable(values.cost_table());
      if (costs.ok()) {
        config_.costs = *std::move(costs);
      } else {
        Wrong("cost_table", values.cost_table(), std::string(costs.status().message()));
      }
    }
  }

  void Access() {
    config::ConfigFile& values = config_.values;
    std::string socket = values.socket().empty() ? DefaultSocket() : values.socket();
    socket = std::string(absl::StripPrefix(socket, "unix:"));
    if (socket.empty()) Wrong("socket", values.socket(), "names no path");
    std::error_code error;
    config_.socket = fs::absolute(socket, error).lexically_normal().string();
    values.set_socket(config_.socket);
    const bool managed_mps = values.mps() == "managed";
    if (managed_mps) config_.mps_folder = config_.socket + MpsControl::kFolderSuffix;
    if (absl::Status fits = CheckSocketPaths(config_.socket, managed_mps); !fits.ok()) {
      Wrong("socket", config_.socket, absl::StrCat("is too long: ", fits.message()));
    }
    SocketGroup();
    config_.allowed_uids.assign(values.allowed_uids().begin(), values.allowed_uids().end());
    config_.admin_uids.assign(values.admin_uids().begin(), values.admin_uids().end());
    JobUids();
    config_.connections_max = InRange("connections_max", values.connections_max(), 1, 1 << 20);
    config_.claim_timeout = Time("claim_timeout", values.claim_timeout(), absl::Milliseconds(1));
    config_.connections_per_uid =
        InRange("connections_per_uid", values.connections_per_uid(), 1, 1 << 20);
    config_.jobs_max = InRange("jobs_max", values.jobs_max(), 1, scheduler::kPlacesMax);
    config_.jobs_per_uid = InRange("jobs_per_uid", values.jobs_per_uid(), 0, scheduler::kPlacesMax);
    config_.reflection = values.reflection();
    config_.token_file = values.token_file();
    if (absl::Status token = config_.ReadToken().status(); !token.ok()) {
      mistakes_.emplace_back(token.message());
    }
    config_.metrics_address = Address("metrics_address", values.metrics_address(), 1).second;
  }

  // A user that it names and nobody lets in would be a mistake that nobody sees.
  void JobUids() {
    scheduler::JobUids& uids = config_.job_uids;
    uids.admins.assign(config_.admin_uids.begin(), config_.admin_uids.end());
    uids.admins.insert(uids.admins.end(), {uid_t{0}, ::geteuid()});
    const std::string& text = config_.values.job_uids();
    if (text == "same") return;
    if (config_.allowed_uids.empty()) {
      return Wrong("job_uids", text,
                   "is about several users, and without --allowed_uids only the "
                   "daemon's own gets sessions");
    }
    uids.any = text == "any";
    if (uids.any) return;
    for (const absl::string_view part : absl::StrSplit(text, ',')) {
      uid_t uid = 0;
      if (!absl::SimpleAtoi(part, &uid)) {
        return Wrong("job_uids", text, "is none of same, any, and numeric users with commas");
      }
      if (std::find(config_.allowed_uids.begin(), config_.allowed_uids.end(), uid) ==
          config_.allowed_uids.end()) {
        Wrong("job_uids", text,
              absl::StrCat("names uid ", uid, ", which is not in --allowed_uids"));
      }
      uids.sharing.push_back(uid);
    }
  }

  void SocketGroup() {
    const std::string& name = config_.values.socket_group();
    if (name.empty()) return;
    gid_t gid = 0;
    if (absl::SimpleAtoi(name, &gid)) {
      config_.socket_gid = gid;
    } else if (const group* found = ::getgrnam(name.c_str()); found != nullptr) {
      config_.socket_gid = found->gr_gid;
    } else {
      Wrong("socket_group", name, "is no group of this machine");
    }
  }

  // An optional host:port: its parts (empty where it is not given or wrong), and the text.
  std::pair<HostPort, std::string> Address(const char* flag, const std::string& text,
                                           int32_t port_min) {
    HostPort parts;
    if (!text.empty() && !ParseHostPort(text, port_min, parts)) {
      Wrong(flag, text, "is not host:port ([address]:port for IPv6)");
      parts = HostPort();
    }
    return {parts, text};
  }

  void Group() {
    config::ConfigFile& values = config_.values;
    config_.nodes = InRange("nodes", values.nodes(), 1, scheduler::kLanesMax / config_.lanes);
    config_.node_rank = values.node_rank();
    if (config_.node_rank < 0 || config_.node_rank >= config_.nodes) {
      Wrong("node_rank", config_.node_rank,
            absl::StrCat("is not one of the group's: 0 to ", config_.nodes - 1,
                         " with --nodes=", config_.nodes));
    }
    config_.allow_plaintext_peers = values.allow_plaintext_peers();
    const HostPort coordinator = Address("coordinator", values.coordinator(), 1).first;
    HostPort listen = Address("peer_listen", values.peer_listen(), 0).first;
    HostPort advertise = Address("peer_advertise", values.peer_advertise(), 0).first;
    GroupName();
    if (config_.nodes == 1) return;
    config_.coordinator = values.coordinator();
    if (values.coordinator().empty()) {
      Wrong("coordinator", "", absl::StrCat("must name node 0 with --nodes=", config_.nodes));
    }
    if (values.peer_listen().empty()) {
      listen.host = IsLoopbackHost(coordinator.host) ? "127.0.0.1" : "0.0.0.0";
      listen.port = config_.node_rank == 0 ? coordinator.port : 0;
    }
    if (values.peer_advertise().empty()) {
      advertise.host = IsAnyHost(listen.host) ? HostName() : listen.host;
      advertise.port = listen.port;
    }
    config_.peer_listen = absl::StrCat(listen.host, ":", listen.port);
    config_.peer_advertise = absl::StrCat(advertise.host, ":", advertise.port);
    ReachableByPeers(coordinator.host, advertise.host);
    config_.rail_address = values.rail_address();
    if (config_.rail_address.empty()) {
      // An address, not a place in a URL: IPv6 without brackets.
      config_.rail_address =
          std::string(absl::StripSuffix(absl::StripPrefix(advertise.host, "["), "]"));
    }
    RailIsHere();
    config_.coordinator_elsewhere = config_.node_rank == 0 && LeadsElsewhere(coordinator.host);
    values.set_peer_listen(config_.peer_listen);
    values.set_peer_advertise(config_.peer_advertise);
    values.set_rail_address(config_.rail_address);
  }

  // Which of several groups a metric is of, where all come to one monitor, and whose snapshots are.
  void GroupName() {
    config::ConfigFile& values = config_.values;
    if (values.group_name().empty()) {
      if (values.snapshots_of_ended_jobs() != "keep") {
        Wrong("snapshots_of_ended_jobs", values.snapshots_of_ended_jobs(),
              "needs --group_name: two groups may have one name by default, as those of one "
              "loopback address or of containers with one host name, and each would remove the "
              "other's snapshots");
      }
      values.set_group_name(config_.nodes > 1 ? values.coordinator()
                                              : absl::StrCat(HostName(), ":", config_.socket));
    } else if (values.group_name().size() > kGroupNameMax ||
               !std::ranges::all_of(values.group_name(), absl::ascii_isgraph)) {
      Wrong("group_name", values.group_name(),
            absl::StrCat("is not 1 to ", kGroupNameMax, " printable ASCII characters, no spaces"));
    }
    config_.group_name = values.group_name();
  }

  // A group whose daemons stand on several machines would form, and every job of it fail: lanes
  // listen where the daemon is advertised.
  void ReachableByPeers(const std::string& coordinator, const std::string& advertised) {
    if (coordinator.empty() || advertised.empty() || IsLoopbackHost(coordinator)) return;
    const std::string address = LoopbackAddressOf(advertised);
    if (address.empty()) return;
    Wrong("peer_advertise", config_.peer_advertise,
          absl::StrCat("leads to ", address,
                       ", this machine alone, while --coordinator=", config_.coordinator,
                       " lies beyond loopback: give --peer_advertise=ADDRESS:0, with this "
                       "machine's address in the network of the nodes"));
  }

  // Lanes could not listen there, and every job would fail.
  void RailIsHere() {
    if (!LeadsElsewhere(config_.rail_address)) return;
    Wrong(
        "rail_address", config_.rail_address,
        absl::StrCat(config_.values.rail_address().empty() ? "(the host of --peer_advertise) " : "",
                     "leads to no address of this machine, on which lanes could listen: give "
                     "--peer_advertise or --rail_address with an address of this machine, in the "
                     "network of the nodes"));
  }

  void Tls() {
    const config::ConfigFile& values = config_.values;
    config_.peer_tls_ca = values.peer_tls_ca();
    config_.peer_tls_certificate = values.peer_tls_certificate();
    config_.peer_tls_key = values.peer_tls_key();
    const TlsFiles files{config_.peer_tls_ca, config_.peer_tls_certificate, config_.peer_tls_key};
    if (files.any()) {
      const absl::Status read = ReadTlsFiles(files, absl::Now()).status();
      if (!read.ok()) mistakes_.emplace_back(read.message());
    }
    if (config_.nodes == 1 || config_.allow_plaintext_peers) return;
    if (files.any()) return Rail();
    for (const auto& [flag, address] : {std::pair{"coordinator", config_.coordinator},
                                        std::pair{"peer_listen", config_.peer_listen}}) {
      HostPort parts;
      if (!ParseHostPort(address, 0, parts) || IsLoopbackHost(parts.host)) continue;
      Wrong(flag, address,
            "lies beyond loopback: give the three --peer_tls_ files, or --allow_plaintext_peers");
    }
  }

  // The data path between nodes has no TLS: nobody should learn that from his network.
  void Rail() {
    if (config_.values.allow_plaintext_rail() || IsLoopbackHost(config_.rail_address)) return;
    Wrong("rail_address", config_.rail_address,
          "lies beyond loopback, and lanes exchange gradients and weights without TLS: "
          "--allow_plaintext_rail, if that network is trusted");
  }

  // Whoever reaches the port, every user of this machine included, could be a node of the group.
  void Proofs() {
    const config::ConfigFile& values = config_.values;
    config_.peer_message_bytes_max =
        InRange("peer_message_bytes_max", values.peer_message_bytes_max(), kPeerMessageBytesMin,
                kPeerMessageBytesMax);
    config_.peer_secret_file = values.peer_secret_file();
    if (absl::Status secret = config_.ReadPeerSecret().status(); !secret.ok()) {
      mistakes_.emplace_back(secret.message());
    }
    absl::StatusOr<std::vector<std::string>> names =
        NamesByNode(values.peer_tls_names(), config_.nodes);
    if (names.ok()) {
      config_.peer_tls_names = *std::move(names);
    } else {
      Wrong("peer_tls_names", values.peer_tls_names(), names.status().message());
    }
    const bool tls = !config_.peer_tls_certificate.empty();
    const bool named = !values.peer_tls_names().empty();
    if (named && !tls) {
      Wrong("peer_tls_names", values.peer_tls_names(),
            "needs the three --peer_tls_ files: names stand in certificates");
    }
    if (config_.nodes == 1 || !config_.peer_secret_file.empty() || named) return;
    Wrong("peer_secret_file", "",
          absl::StrCat("must be given with --nodes=", config_.nodes,
                       tls ? ", or --peer_tls_names: every certificate of one authority would be "
                             "any node"
                           : ": who reaches the port would be any node",
                       ". Make one for all of them: dmuonctl secret new FILE"));
  }

  std::chrono::milliseconds Time(const char* flag, const std::string& text, absl::Duration least) {
    absl::Duration value;
    if (!absl::ParseDuration(text, &value) || value < least || value > absl::Hours(24 * 365)) {
      Wrong(flag, text,
            absl::StrCat("is not a time of at least ", absl::FormatDuration(least),
                         ", as in 90s or 2m"));
    }
    return std::chrono::milliseconds(absl::ToInt64Milliseconds(value));
  }

  std::chrono::milliseconds SnapshotsOfEndedJobs() {
    constexpr char kFlag[] = "snapshots_of_ended_jobs";
    const std::string& text = config_.values.snapshots_of_ended_jobs();
    if (text == "keep") return std::chrono::milliseconds(0);
    if (config_.values.snapshot_dir().empty()) Wrong(kFlag, text, "needs --snapshot_dir");
    // Days are what people think in here; absl's durations end with hours.
    absl::string_view days = text;
    int64_t count = 0;
    if (absl::ConsumeSuffix(&days, "d") && absl::SimpleAtoi(days, &count) && count >= 1 &&
        count <= 365) {
      return std::chrono::hours(24 * count);
    }
    absl::Duration value;
    if (!absl::ParseDuration(text, &value) || value < absl::Seconds(1) ||
        value > absl::Hours(24 * 365)) {
      Wrong(kFlag, text, "is neither keep nor a time from 1s to 365d, as in 30d or 12h");
    }
    return std::chrono::milliseconds(absl::ToInt64Milliseconds(value));
  }

  void Times() {
    const config::ConfigFile& values = config_.values;
    constexpr absl::Duration kLeast = absl::Milliseconds(1);
    config_.register_timeout = Time("register_timeout", values.register_timeout(), kLeast);
    config_.step_timeout = Time("step_timeout", values.step_timeout(), kLeast);
    config_.session_linger = Time("session_linger", values.session_linger(), absl::ZeroDuration());
    config_.lane_timeout = Time("lane_timeout", values.lane_timeout(), absl::ZeroDuration());
    config_.rail_timeout = Time("rail_timeout", values.rail_timeout(), absl::ZeroDuration());
    if (config_.rail_timeout.count() > 0 && config_.rail_timeout < std::chrono::seconds(1)) {
      Wrong("rail_timeout", values.rail_timeout(), "is shorter than 1s, and not 0");
    }
    config_.drain_timeout = Time("drain_timeout", values.drain_timeout(), kLeast);
    config_.skips_max = InRange("skips_max", values.skips_max(), 1, 1'000'000);
    config_.check_every = Time("check_every", values.check_every(), absl::ZeroDuration());
  }

  void Snapshots() {
    constexpr int64_t kStagingBytesMin = int64_t{1} << 20;
    constexpr int64_t kStepsMax = int64_t{1} << 36;  // as many as the state table counts
    config::ConfigFile& values = config_.values;
    config_.snapshot_every_steps =
        InRange<int64_t>("snapshot_every_steps", values.snapshot_every_steps(), 0, kStepsMax);
    config_.snapshot_every = Time("snapshot_every", values.snapshot_every(), absl::ZeroDuration());
    config_.snapshot_keep = InRange("snapshot_keep", values.snapshot_keep(), 1, 1 << 20);
    config_.snapshots_of_ended_jobs = SnapshotsOfEndedJobs();
    config_.snapshot_staging_bytes =
        InRange<int64_t>("snapshot_staging_bytes", values.snapshot_staging_bytes(),
                         kStagingBytesMin, std::numeric_limits<int64_t>::max());
    config_.snapshot_timeout =
        Time("snapshot_timeout", values.snapshot_timeout(), absl::Milliseconds(1));
    config_.replan = values.replan();
    if (values.snapshot_dir().empty()) return;
    std::error_code error;
    config_.snapshot_dir = fs::absolute(values.snapshot_dir(), error).lexically_normal().string();
    values.set_snapshot_dir(config_.snapshot_dir);
    CheckWritable("snapshot_dir", config_.snapshot_dir);
  }

  void Writing() {
    config::ConfigFile& values = config_.values;
    const absl::StatusOr<log::Level> level = log::ParseLevel(values.log_level());
    if (level.ok()) config_.log_level = *level;
    if (!level.ok()) Wrong("log_level", values.log_level(), level.status().message());
    const absl::StatusOr<log::Format> format = log::ParseFormat(values.log_format());
    if (format.ok()) config_.log_format = *format;
    if (!format.ok()) Wrong("log_format", values.log_format(), format.status().message());
    if (values.log_file().empty()) return;
    std::error_code error;
    config_.log_file = fs::absolute(values.log_file(), error).lexically_normal().string();
    values.set_log_file(config_.log_file);
    const std::string folder = fs::path(config_.log_file).parent_path().string();
    if (::access(config_.log_file.c_str(), W_OK) == 0) return;
    if (errno == ENOENT && ::access(folder.c_str(), W_OK | X_OK) == 0) return;
    Wrong("log_file", config_.log_file,
          absl::StrCat("cannot be written", absl::ErrnoToStatus(errno, "").message()));
  }

  // With those above it that are missing, mode 0750. An errno; 0: it is there.
  static int MakeDirectories(const fs::path& directory) {
    if (::mkdir(directory.c_str(), 0750) == 0) return 0;
    const int error = errno;
    struct stat status {};
    if (error == EEXIST || ::stat(directory.c_str(), &status) == 0) return 0;
    if (error != ENOENT || !directory.has_parent_path() || directory.parent_path() == directory) {
      return error;
    }
    const int above = MakeDirectories(directory.parent_path());
    if (above != 0) return above;
    return ::mkdir(directory.c_str(), 0750) == 0 ? 0 : errno;
  }

  // By writing: rights alone do not show read-only and full file systems.
  void CheckWritable(const char* flag, const std::string& directory) {
    if (const int failed = MakeDirectories(directory); failed != 0) {
      const absl::Status why = absl::ErrnoToStatus(failed, "");
      Wrong(flag, directory, absl::StrCat("cannot be made", why.message()));
      return;
    }
    std::string probe = directory + "/.dmuond-probe-XXXXXX";
    const wire::UniqueFd file(::mkstemp(probe.data()));
    if (!file.valid()) {
      const absl::Status why = absl::ErrnoToStatus(errno, "");
      Wrong(flag, directory, absl::StrCat("cannot be written", why.message()));
      return;
    }
    ::unlink(probe.c_str());
  }

  Config config_;
  std::vector<std::string> mistakes_;
};

}  // namespace

namespace {

// What a file holds that only some may read, without space at its end. "" without a file.
absl::StatusOr<std::string> ReadSecret(const char* flag, const std::string& path) {
  if (path.empty()) return std::string();
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, " ", why));
  };
  absl::StatusOr<std::string> secret = WholeFile(path);
  if (!secret.ok()) return wrong(secret.status().message());
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return wrong("is being replaced");
  if ((status.st_mode & 0007) != 0) return wrong("is open to everybody: chmod o= it");
  absl::StripTrailingAsciiWhitespace(&*secret);
  if (secret->empty()) return wrong("is empty");
  return secret;
}

// Of the bytes that a text stands for, which are two digits each where all of it is hexadecimal.
size_t DifferentBytes(const std::string& text) {
  const bool hexadecimal =
      text.size() % 2 == 0 && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
  const std::string bytes = hexadecimal ? absl::HexStringToBytes(text) : text;
  return std::set<char>(bytes.begin(), bytes.end()).size();
}

}  // namespace

absl::StatusOr<std::string> Config::ReadToken() const {
  return ReadSecret("token_file", token_file);
}

absl::StatusOr<std::string> Config::ReadPeerSecret() const {
  absl::StatusOr<std::string> secret = ReadSecret("peer_secret_file", peer_secret_file);
  if (!secret.ok() || secret->empty()) return secret;
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--peer_secret_file=", peer_secret_file, " ",
                                                   why,
                                                   ": dmuonctl secret new FILE "
                                                   "makes one that nobody guesses"));
  };
  if (secret->size() < kSecretCharactersMin) {
    return wrong(absl::StrCat("has ", secret->size(), " characters, at least ",
                              kSecretCharactersMin, " are needed"));
  }
  const size_t values = DifferentBytes(*secret);
  if (values >= kSecretDifferentBytesMin) return secret;
  return wrong(absl::StrCat("holds only ", values, " different bytes, at least ",
                            kSecretDifferentBytesMin, " are needed"));
}

absl::StatusOr<Config> Check(const config::ConfigFile& values) { return Checker(values).Run(); }

}  // namespace dmuond::server
