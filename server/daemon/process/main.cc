// dmuond: reads its configuration, opens its sockets, and serves until it is told to leave.
#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "base/fault_point.h"
#include "base/unique_fd.h"
#include "dmuond/wire/socket_path.h"
#include "dmuond/wire/start_thread.h"
#include "scheduler/job/impossible.h"
#include "server/command_line.h"
#include "server/commit.h"
#include "server/common/errors.h"
#include "server/common/exit_codes.h"
#include "server/common/log.h"
#include "server/common/log_file.h"
#include "server/common/mps_control.h"
#include "server/common/one_signal.h"
#include "server/common/stray_signals.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/calls/grpc_socket.h"
#include "server/daemon/calls/queued_calls.h"
#include "server/daemon/calls/services.h"
#include "server/daemon/calls/stand_in.h"
#include "server/daemon/calls/stream_watch.h"
#include "server/daemon/calls/unix_listener.h"
#include "server/daemon/daemon.h"
#include "server/daemon/group/peers.h"
#include "server/daemon/lanes/lane_binary.h"
#include "server/daemon/lanes/lane_bits.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/metrics/http_server.h"
#include "server/daemon/metrics/pages.h"
#include "server/daemon/process/config.h"
#include "server/daemon/process/library_logs.h"
#include "server/daemon/process/readiness.h"
#include "server/daemon/process/reflection.h"
#include "server/daemon/process/service_manager.h"
#include "server/daemon/process/socket_dir.h"
#include "server/daemon/rpc_counting.h"
#include "server/daemon/snapshots/node_snapshot.h"
#include "server/daemon/work_thread.h"
#include "server/storage/posix_storage.h"
#include "server/storage/shared_directory.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

constexpr std::chrono::milliseconds kTick{100};
constexpr std::chrono::milliseconds kLeavingTick{5};
// From one look to the next, whether the daemon's socket can be found still.
constexpr std::chrono::seconds kSocketLook{1};
// When everything is saved that can be: for the rest of leaving, lanes that do not end included.
constexpr std::chrono::seconds kGoneWithin{10};
// For the control daemon of MPS where this one does not wait for lanes.
constexpr std::chrono::milliseconds kMpsGoneWithin{500};
// Threads of synchronous calls that are kept when no call is there.
constexpr int kPollersMin = 2;
constexpr int kPollersMax = 32;
// Of whatever is sent here; what may be larger comes in parts.
constexpr int kMessageBytesMax = 4 << 20;

// What gRPC may hold of messages that come in and go out. It reads one whole before it refuses it
// for its size. When there is more it breaks calls off, anybody's, and clients make them again.
constexpr size_t kTrainersBytesMax = size_t{512} << 20;
constexpr size_t kAdminBytesMax = size_t{64} << 20;
// Streams that one connection has open at a time; further ones wait at its other end.
constexpr int kStreamsMax = 8;
constexpr int kAdminStreamsMax = 4;
constexpr size_t kAdminConnectionsMax = 1024;
constexpr size_t kAdminConnectionsPerUid = 32;
constexpr int kAdminThreadsMax = 512;
constexpr int64_t kThreadsMax = 1 << 15;
// For a connection to `.admin` on which no call is made.
constexpr std::chrono::seconds kIdleFor{30};
constexpr std::chrono::seconds kShutdownWithin{1};
// Descriptors that lanes, memory and snapshots take, beside those of connections.
constexpr int64_t kOwnDescriptors = 512;

DaemonOptions OptionsOf(const Config& config, const NodeDevice& device, const std::string& token,
                        LaneBinary lane_binary, storage::Storage* snapshots) {
  DaemonOptions options;
  options.node = config.node_rank;
  options.nodes = config.nodes;
  options.lanes = config.lanes;
  options.places = config.jobs_max;
  options.jobs_per_uid = config.jobs_per_uid;
  options.threads_per_lane = config.threads;
  options.lane_binary = std::move(lane_binary);
  options.rail_address = config.rail_address;
  options.socket = config.socket;
  options.group_name = config.group_name;
  options.core_type = device.CoreType();
  options.token = token;
  options.job_memory_bytes = config.job_memory_bytes;
  options.step_timeout = config.step_timeout;
  options.lane_timeout = config.lane_timeout;
  options.rail_timeout = config.rail_timeout;
  options.coordinator.nodes = config.nodes;
  options.coordinator.lanes_per_node = config.lanes;
  options.coordinator.lane_memory_bytes = config.lane_memory_bytes;
  options.coordinator.memory_granule_bytes = device.GranuleBytes();
  options.coordinator.costs = config.costs;
  options.coordinator.estimates = device.Estimates();
  options.coordinator.landing_bytes_max = device.LandingBytesMax();
  options.coordinator.replan = config.replan;
  options.coordinator.peer_message_bytes_max = config.peer_message_bytes_max;
  options.coordinator.register_timeout = config.register_timeout;
  options.coordinator.job_uids = config.job_uids;
  options.coordinator.step.step_timeout = config.step_timeout;
  options.coordinator.step.lane_timeout = config.lane_timeout;
  options.coordinator.step.session_linger = config.session_linger;
  options.coordinator.step.skips_max = config.skips_max;
  options.coordinator.check_every = config.check_every;
  options.storage = snapshots;
  options.snapshot_keep = config.snapshot_keep;
  options.snapshots_of_ended_jobs = config.snapshots_of_ended_jobs;
  options.snapshot_timeout = config.snapshot_timeout;
  if (!device.StateIsHostMemory()) options.snapshot_staging_bytes = config.snapshot_staging_bytes;
  options.coordinator.snapshots = snapshots != nullptr;
  options.coordinator.snapshot = {config.snapshot_every_steps, config.snapshot_every};
  return options;
}

PeerOptions PeerOptionsOf(const Config& config, const std::string& secret) {
  PeerOptions options;
  options.node = config.node_rank;
  options.nodes = config.nodes;
  options.lanes = config.lanes;
  options.jobs_max = config.jobs_max;
  options.lane_memory_bytes = config.lane_memory_bytes;
  options.listen = config.peer_listen;
  options.advertise = config.peer_advertise;
  options.coordinator = config.coordinator;
  options.allow_plaintext = config.allow_plaintext_peers;
  options.tls_ca_file = config.peer_tls_ca;
  options.tls_certificate_file = config.peer_tls_certificate;
  options.tls_key_file = config.peer_tls_key;
  if (!secret.empty()) options.proofs.secret.emplace(secret);
  options.proofs.tls_names = config.peer_tls_names;
  options.message_bytes_max = config.peer_message_bytes_max;
  return options;
}

// Null where not asked for.
absl::StatusOr<std::unique_ptr<HttpServer>> StartPages(const Config& config, Daemon& daemon,
                                                       Readiness& readiness) {
  if (config.metrics_address.empty()) return nullptr;
  return HttpServer::Start(
      config.metrics_address,
      {.at_once = [&readiness](const std::string& path) { return ProbeAt(path, readiness); },
       .page = [&daemon](const std::string& path) { return PageAt(path, daemon); }});
}

// `peers`: null in a group of one.
void LookWhetherReady(Daemon& daemon, Peers* peers, Readiness& readiness) {
  if (daemon.formed()) return readiness.SetReady(true);
  const GroupGaps gaps = peers == nullptr ? GroupGaps() : peers->Gaps();
  const std::string why = gaps.missing.empty() ? gaps.not_joined
                                               : absl::StrCat("these nodes have not joined: ",
                                                              absl::StrJoin(gaps.missing, ", "));
  readiness.SetReady(false, absl::StrCat("the group has not formed: ", why));
}

ConnectionLimits::Limits LimitsOf(const Config& config) {
  ConnectionLimits::Limits limits;
  limits.all = static_cast<size_t>(config.connections_max);
  limits.per_holder = static_cast<size_t>(config.connections_per_uid);
  return limits;
}

absl::StatusOr<std::unique_ptr<GrpcSocket>> ListenAt(const Config& config,
                                                     GrpcSocket::Options options) {
  absl::StatusOr<ListeningSocket> listener = Listen({.what = "socket",
                                                     .path = options.name,
                                                     .type = SOCK_STREAM,
                                                     .mode = config.socket_mode(),
                                                     .group = config.socket_gid});
  if (listener.ok()) return GrpcSocket::Make(*std::move(listener), std::move(options));
  return Error(absl::StatusCode::kUnavailable, "ADDRESS_TAKEN",
               Say("cannot listen on '", Named("address", options.name),
                   "': ", listener.status().message()));
}

// Trainers' calls. Other users' connections are closed before a byte of theirs is read.
absl::StatusOr<std::unique_ptr<GrpcSocket>> ListenForTrainers(const Config& config) {
  GrpcSocket::Options options;
  options.name = config.socket;
  options.allowed_uids = config.allowed_uids;
  for (const uid_t always : {uid_t{0}, ::geteuid()}) options.allowed_uids->push_back(always);
  options.limits = LimitsOf(config);
  options.strange_for = config.claim_timeout;
  return ListenAt(config, std::move(options));
}

// What every server here has in common.
void SetUp(grpc::ServerBuilder& builder, RpcCounts& counts, bool reflection, int streams_max,
           int64_t threads_max, size_t bytes_max) {
  CountCalls(builder, counts);
  if (!reflection) builder.SetOption(WithoutReflection());
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, streams_max);
  // A call beyond gets RESOURCE_EXHAUSTED.
  grpc::ResourceQuota quota;
  quota.Resize(bytes_max);
  builder.SetResourceQuota(
      quota.SetMaxThreads(static_cast<int>(std::min<int64_t>(threads_max, kThreadsMax))));
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
}

// A server that takes its connections from a socket; both end with it.
class SocketServer {
 public:
  // `calls`: those that come by a queue of this server's; null: it has none.
  SocketServer(std::unique_ptr<GrpcSocket> socket, std::unique_ptr<QueuedCalls> calls,
               std::unique_ptr<grpc::Server> server)
      : socket_(std::move(socket)), calls_(std::move(calls)), server_(std::move(server)) {
    if (calls_ != nullptr) calls_->Serve();
    socket_->Serve(*server_);
  }
  ~SocketServer() { Stop(); }
  SocketServer(const SocketServer&) = delete;
  SocketServer& operator=(const SocketServer&) = delete;
  void Stop() {
    socket_->Stop();
    server_->Shutdown(std::chrono::system_clock::now() + kShutdownWithin);
    if (calls_ != nullptr) calls_->Stop();
  }

 private:
  const std::unique_ptr<GrpcSocket> socket_;
  const std::unique_ptr<QueuedCalls> calls_;
  const std::unique_ptr<grpc::Server> server_;  // ends first
};

// Who fills the trainers' socket does not keep an operator from looking, or ending it.
absl::StatusOr<std::unique_ptr<GrpcSocket>> ListenForAdmin(const Config& config) {
  GrpcSocket::Options options;
  options.name = config.socket + SocketDir::kAdminSuffix;
  options.limits = {.all = kAdminConnectionsMax,
                    .per_holder = kAdminConnectionsPerUid,
                    .strangers_per_holder = kAdminConnectionsPerUid};
  return ListenAt(config, std::move(options));
}

absl::StatusOr<std::unique_ptr<SocketServer>> StartAdminServer(const Config& config,
                                                               RpcCounts& counts,
                                                               std::unique_ptr<GrpcSocket> socket,
                                                               v1::Admin::Service* admin,
                                                               StandIn& stand_in) {
  grpc::ServerBuilder builder;
  SetUp(builder, counts, config.reflection, kAdminStreamsMax, kAdminThreadsMax, kAdminBytesMax);
  builder.RegisterService(admin);
  stand_in.PollFor(builder);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             static_cast<int>(std::chrono::milliseconds(kIdleFor).count()));
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::InternalError("no server for administration");
  return std::make_unique<SocketServer>(std::move(socket), nullptr, std::move(server));
}

// Returns how many descriptors the daemon needs while one user has as many connections as it may,
// each of which takes two, and all other daemons have theirs.
int64_t DescriptorsWanted(const Config& config) {
  constexpr int64_t kOfConnection = 2;
  const int64_t of_user =
      kOfConnection * (2 * int64_t{config.connections_per_uid} +  // one attached
                       int64_t{kAdminConnectionsPerUid});
  const int64_t of_pages = config.metrics_address.empty() ? 0 : HttpServer::kConnectionsMax;
  const int64_t of_peers =
      config.nodes == 1 ? 0 : PeerDescriptorsMax(config.nodes, !config.peer_tls_ca.empty());
  return kOwnDescriptors + of_user + of_pages + of_peers;
}

void AllowDescriptors(const Config& config) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);  // down to what it was is possible, and no error
  const int64_t wanted = DescriptorsWanted(config);
  if (limit.rlim_max >= static_cast<rlim_t>(wanted)) return;
  log::Warn("connections can take all descriptors (ulimit -n, --connections_per_uid)",
            {{"descriptors", limit.rlim_max}, {"descriptors_wanted", wanted}});
}

constexpr std::array<int, 3> kStopSignals = {SIGTERM, SIGINT, SIGHUP};

// Blocks the signals in this thread, and so in all that come after it. The loader calls it before
// the constructors of libraries, which take longer than all that main() does before it serves: a
// signal that comes meanwhile waits. Nothing may be called that sanitizers replace, for they are
// not set up yet. Who starts this program can block the signals for the loader's own time, too, as
// `dmuonctl run` does.
__attribute__((no_sanitize("address", "thread", "undefined"))) void BlockStopSignals() {
  uint64_t mask = 0;
  for (size_t i = 0; i < kStopSignals.size(); ++i) mask |= uint64_t{1} << (kStopSignals[i] - 1);
  for (size_t i = 0; i < kStraySignals.size(); ++i) mask |= uint64_t{1} << (kStraySignals[i] - 1);
  ::syscall(SYS_rt_sigprocmask, SIG_BLOCK, &mask, nullptr, sizeof(mask));
}
[[gnu::section(".preinit_array"), gnu::used]] void (*block_stop_signals)() = &BlockStopSignals;

// The signals come through a descriptor and stay blocked in every thread, so that none of them can
// end the process by its default action. SIGHUP ends nothing: a daemon in the background outlives
// the terminal that it was started in, and reads anew what others may have replaced.
//
// A sender that signals twice insists. Signals of the process that started this one are counted
// apart from everybody else's, because one wish may reach the daemon by both: systemd and Slurm
// signal each process of a unit, and `dmuonctl run`, which has started the daemon and is one of
// them, stops it by a signal, too.
class StopSignals {
 public:
  StopSignals() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : kStopSignals) sigaddset(&signals, signal);
    fd_.Reset(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  [[nodiscard]] bool valid() const { return fd_.valid(); }

  // Waits for at most `timeout`; true: a signal to stop came.
  bool Wait(std::chrono::milliseconds timeout) {
    pollfd polled{fd_.get(), POLLIN, 0};
    if (::poll(&polled, 1, static_cast<int>(timeout.count())) <= 0) return false;
    signalfd_siginfo signal;
    if (::read(fd_.get(), &signal, sizeof(signal)) != sizeof(signal)) return false;
    if (signal.ssi_signo == SIGHUP) {
      hung_up_ = true;
      return false;
    }
    Count(static_cast<pid_t>(signal.ssi_pid));
    return true;
  }
  // Whether somebody has signalled twice: the daemon is to end at once.
  [[nodiscard]] bool insisted() const { return insisted_; }
  // Whether SIGHUP has come since this was asked last.
  bool TakeHangup() { return std::exchange(hung_up_, false); }

 private:
  void Count(pid_t sender) {
    const bool of_starter = sender != 0 && sender == starter_;
    // The kernel sends this one (PR_SET_PDEATHSIG): the starter has ended, and insists on nothing.
    if (of_starter && ::getppid() != starter_) return;
    const auto now = std::chrono::steady_clock::now();
    auto& first = of_starter ? first_of_starter_ : first_of_others_;
    if (!first.has_value()) first = now;
    if (now - *first >= kOneSignal) insisted_ = true;
  }

  const pid_t starter_ = ::getppid();
  UniqueFd fd_;
  bool hung_up_ = false;
  std::optional<std::chrono::steady_clock::time_point> first_of_starter_;
  std::optional<std::chrono::steady_clock::time_point> first_of_others_;
  bool insisted_ = false;
};

void OnHangup(const Config& config, Peers* peers) {
  const absl::Status opened =
      config.log_file.empty() ? absl::OkStatus() : log::WriteTo(config.log_file);
  log::Info(
      "SIGHUP: log file and TLS files are opened again; the daemon goes on, with the settings that "
      "it was started with");
  if (!opened.ok()) log::Error("the log file from before is kept", {{"what", opened}});
  if (peers != nullptr) peers->ReloadCertificates();
}

// Looks whether the daemon's socket can be found still, and says so once when it cannot.
class SocketWatch {
 public:
  SocketWatch(const SocketDir& place, const std::string& socket) : place_(place), socket_(socket) {}

  void Tick() {
    const auto now = std::chrono::steady_clock::now();
    if (lost_ || now < next_look_) return;
    next_look_ = now + kSocketLook;
    lost_ = place_.LockFileIsLost();
    if (!lost_) return;
    log::Error(
        "trainers and dmuonctl cannot reach this daemon any more, or reach another one in its "
        "place: the directory of its socket, or the lock in it, was removed. A logout removes "
        "/run/user/UID, and cleaners remove files in /tmp. End this daemon with SIGTERM, which "
        "saves, and start it again with --socket in a directory that stays",
        {{"pid", ::getpid()}, {"socket", socket_}});
  }

 private:
  const SocketDir& place_;
  const std::string& socket_;
  std::chrono::steady_clock::time_point next_look_{};
  bool lost_ = false;
};

// Does what may hang, with the file server that it is about, before the daemon serves: a signal
// ends it meanwhile, and the control daemon of MPS (null: none) with it.
template <typename Work>
auto UnlessStopped(StopSignals& signals, const Work& work, MpsControl* mps = nullptr) {
  auto result = std::async(std::launch::async, work);
  while (result.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (!signals.Wait(kLeavingTick)) continue;
    if (mps != nullptr) mps->End(kMpsGoneWithin);
    log::Info("left before it served");
    log::EndProcess(0);
  }
  return result.get();
}

absl::StatusOr<std::unique_ptr<NodeDevice>> OpenDevice(const Config& config) {
  auto device = OpenNodeDevice(config.devices, {.threads = config.threads,
                                                .lanes_use_mps = config.lanes_use_mps,
                                                .mps_folder = config.mps_folder,
                                                .memory_timeout = config.lane_timeout,
                                                .no_mps_folder = config.socket + ".no-mps",
                                                .rail_address = config.rail_address});
  if (device.ok()) return device;
  return absl::Status(device.status().code(), absl::StrCat("--devices=", config.values.devices(),
                                                           ": ", device.status().message()));
}

// Null: the daemon runs none.
absl::StatusOr<std::unique_ptr<MpsControl>> StartMps(const Config& config, StopSignals& signals) {
  if (config.mps_folder.empty()) return nullptr;
  auto mps = MpsControl::Start(config.mps_folder,
                               [&](std::chrono::milliseconds time) { return signals.Wait(time); });
  if (mps.ok() || absl::IsCancelled(mps.status())) return mps;
  return absl::Status(mps.status().code(), absl::StrCat("--mps=managed: ", mps.status().message()));
}

[[noreturn]] void EndAtOnce(MpsControl* mps) {
  log::Warn("a second signal: ending at once");
  if (mps != nullptr) mps->End(kMpsGoneWithin);
  log::EndProcess(1);
}

// The exit code.
absl::StatusOr<int> Serve(const Config& config, StopSignals& signals, ServiceManager manager) {
  if (!signals.valid()) return absl::ErrnoToStatus(errno, "signalfd");
  absl::StatusOr<SocketDir> socket_dir =
      SocketDir::Prepare(config.socket, config.socket_mode(), config.socket_gid);
  if (!socket_dir.ok()) return socket_dir.status();
  absl::StatusOr<std::string> token = config.ReadToken();
  if (!token.ok()) return token.status();
  AllowDescriptors(config);
  if (config.coordinator_elsewhere) {
    log::Warn(
        "this daemon is node 0, and --coordinator, which names node 0, leads to no address of this "
        "machine: was --node_rank (or DMUOND_NODE_RANK) forgotten? If the address is translated on "
        "its way here, as that of a Kubernetes service is, all is well",
        {{"coordinator", config.coordinator}});
  }
  // Nothing is called on it. The first channel or server makes the poller that all of them share,
  // and gRPC aborts where no descriptor is left for it: there are enough now.
  const std::shared_ptr<grpc::Channel> keeps_poller =
      grpc::CreateChannel("unix:unused", grpc::InsecureChannelCredentials());

  std::unique_ptr<storage::Storage> snapshots;
  uint32_t epoch = 0;  // newest of any snapshot
  if (!config.snapshot_dir.empty()) {
    absl::StatusOr<std::unique_ptr<storage::Storage>> opened =
        storage::OpenPosixStorage(config.snapshot_dir);
    if (!opened.ok()) return opened.status();
    snapshots = *std::move(opened);
    const absl::StatusOr<uint32_t> newest = UnlessStopped(signals, [&] {
      if (config.node_rank == 0) {
        storage::RemoveOldProofs(*snapshots).IgnoreError();  // they do no harm
      }
      absl::StatusOr<uint32_t> newest = NewestEpoch(*snapshots);
      if (newest.ok()) LogLastSave(*snapshots, config.drain_timeout);
      return newest;
    });
    if (!newest.ok()) return newest.status();
    epoch = *newest;
  }

  absl::StatusOr<std::unique_ptr<MpsControl>> mps_started = StartMps(config, signals);
  if (absl::IsCancelled(mps_started.status())) {
    log::Info("left before it served");
    return 0;
  }
  if (!mps_started.ok()) return mps_started.status();
  MpsControl* const mps = mps_started->get();
  absl::StatusOr<std::unique_ptr<NodeDevice>> opened = UnlessStopped(
      signals, [&] { return OpenDevice(config); }, mps);
  if (!opened.ok()) return opened.status();
  const std::unique_ptr<NodeDevice> device = *std::move(opened);
  const LaneBinary lane_binary(config.lane_binary);
  if (!lane_binary.file().ok()) return lane_binary.file().status();
  absl::StatusOr<v1::LaneBits> bits;
  if (config.nodes > 1 || device->TriesLanes()) {
    bits = UnlessStopped(
        signals, [&] { return AskForBits(lane_binary, *device, /*rails=*/config.nodes > 1); }, mps);
    if (!bits.ok()) return bits.status();
  }
  DaemonOptions options = OptionsOf(config, *device, *token, lane_binary, snapshots.get());
  options.lock = socket_dir->lock();
  Daemon daemon(options, *device);
  AttachServer::Options attach_options;
  attach_options.path = config.socket + wire::kAttachSuffix;
  attach_options.mode = config.socket_mode();
  attach_options.group = config.socket_gid;
  attach_options.allowed_uids = config.allowed_uids;
  attach_options.claim_timeout = config.claim_timeout;
  attach_options.limits = LimitsOf(config);
  absl::StatusOr<std::unique_ptr<AttachServer>> attach = AttachServer::Start(
      std::move(attach_options), {.on_gone = [&daemon](AttachId id) { daemon.OnAttachGone(id); }});
  if (!attach.ok()) return attach.status();

  std::unique_ptr<Peers> peers;
  if (config.nodes > 1) {
    const absl::StatusOr<std::string> secret = config.ReadPeerSecret();
    if (!secret.ok()) return secret.status();
    PeerOptions peer_options = PeerOptionsOf(config, *secret);
    peer_options.epoch = epoch;
    peer_options.snapshots = snapshots.get();
    peer_options.bits = *std::move(bits);
    peer_options.device_type = device->type();
    peer_options.devices = device->Uuids();
    absl::StatusOr<std::unique_ptr<Peers>> started = Peers::Start(std::move(peer_options), daemon);
    if (!started.ok()) return started.status();
    peers = *std::move(started);
  }
  daemon.Bind(attach->get(), peers.get());
  Readiness readiness;
  absl::StatusOr<std::unique_ptr<HttpServer>> pages = StartPages(config, daemon, readiness);
  if (!pages.ok()) return pages.status();
  if (peers != nullptr) {
    peers->Join();
  } else {
    daemon.OnFormed(epoch + 1);
  }

  // It is there when it is needed, whatever the machine lacks then.
  WorkThread leaver;
  std::atomic<bool> asked_to_drain{false};
  absl::StatusOr<std::unique_ptr<GrpcSocket>> socket = ListenForTrainers(config);
  if (!socket.ok()) return socket.status();
  StreamWatch streams;
  const auto trainer_service = MakeTrainerService(daemon, **attach, **socket, streams);
  const auto admin_elsewhere = MakeAdminElsewhere(config.socket + SocketDir::kAdminSuffix);
  absl::StatusOr<std::unique_ptr<GrpcSocket>> admin_socket = ListenForAdmin(config);
  if (!admin_socket.ok()) return admin_socket.status();
  const auto admin_service =
      MakeAdminService(daemon, readiness, **admin_socket, config.job_uids.admins,
                       [&asked_to_drain] { asked_to_drain.store(true); });
  if (config.reflection) {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();  // done already; keeps it linked
  }
  grpc::ServerBuilder builder;
  // So that what one user's connections may hold leaves enough for every other user's.
  SetUp(builder, daemon.rpcs(), config.reflection, kStreamsMax,
        kStreamsMax * int64_t{config.connections_per_uid} *
            static_cast<int64_t>(config.allowed_uids.size() + 2),
        kTrainersBytesMax);
  builder.RegisterService(trainer_service.get());
  builder.RegisterService(admin_elsewhere.get());
  auto step_calls = std::make_unique<QueuedCalls>(builder.AddCompletionQueue(),
                                                  [&daemon] { daemon.TellLanes(); });
  // A waiting call holds a thread, and the default keeps two: each step would start and end some.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, kPollersMin);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, kPollersMax);
  // Trainers ask by pings whether this process is stopped, in calls that wait for long.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  std::unique_ptr<grpc::Server> built = builder.BuildAndStart();
  if (built == nullptr) return absl::InternalError("no server for trainers");
  trainer_service->Serve(step_calls->queue());
  const QueuedCalls& polls = *step_calls;
  SocketServer server(*std::move(socket), std::move(step_calls), std::move(built));
  StandIn stand_in(polls);
  const absl::StatusOr<std::unique_ptr<SocketServer>> admin_server = StartAdminServer(
      config, daemon.rpcs(), *std::move(admin_socket), admin_service.get(), stand_in);
  if (!admin_server.ok()) return admin_server.status();
  stand_in.Serve();
  readiness.Turned();
  LookWhetherReady(daemon, peers.get(), readiness);
  log::Info("serving", {{"version", kBuildVersion},
                        {"commit", kBuildCommit},
                        {"socket", config.socket},
                        {"node", config.node_rank},
                        {"nodes", config.nodes},
                        {"lanes", config.lanes}});
  manager.Tell("READY=1");

  bool leaves = false;
  std::atomic<bool> drained{false};
  int exit_code = 0;
  const auto begin_drain = [&] {
    log::Info("leaving: finishing the step; a second signal ends at once");
    readiness.SetReady(false, "the daemon is leaving");
    manager.Tell("STOPPING=1");
    leaves = true;
    leaver.Post([&] {
      // What is lost is in the log.
      if (!daemon.node().PrepareToLeave(config.drain_timeout).ok()) exit_code = kNotSaved;
      drained.store(true);
    });
  };
  // `systemctl stop` during a drain that was asked for is the first signal.
  const auto on_signal = [&] {
    if (signals.insisted()) EndAtOnce(mps);
    if (leaves) log::Info("leaving already; a second signal of a sender ends at once");
  };
  SocketWatch socket_watch(*socket_dir, config.socket);
  while (!drained.load()) {
    const bool stop = signals.Wait(kTick);
    if (signals.TakeHangup()) OnHangup(config, peers.get());
    if (stop) on_signal();
    if ((stop || asked_to_drain.load()) && !leaves) begin_drain();
    daemon.Tick();
    manager.Turned();
    streams.Tick();
    socket_watch.Tick();
    if (mps != nullptr) mps->Watch();
    readiness.Turned();
    if (!leaves) LookWhetherReady(daemon, peers.get(), readiness);
  }
  // Beside this thread: calls, and streams of other daemons, may hang in the snapshot directory,
  // which nothing can end but the end of the process.
  std::atomic<bool> left{false};
  bool everybody_ended = false;
  leaver.Post([&] {
    // The others hear of it by their stream's end, before lanes that they are connected with end.
    if (peers != nullptr) peers->Stop();
    everybody_ended = daemon.node().Leave();
    readiness.Stop();
    server.Stop();
    (*admin_server)->Stop();
    pages->reset();
    left.store(true);
  });
  const auto gone_by = std::chrono::steady_clock::now() + kGoneWithin;
  while (!left.load() && std::chrono::steady_clock::now() < gone_by) {
    if (signals.Wait(kLeavingTick)) on_signal();
  }
  if (!left.load()) {
    log::Error("leaving without those who do not end", {{"waited_s", kGoneWithin.count()}});
    if (mps != nullptr) mps->End(kMpsGoneWithin);
    log::EndProcess(exit_code);
  }
  if (mps != nullptr) {
    const auto left =
        std::chrono::floor<std::chrono::milliseconds>(gone_by - std::chrono::steady_clock::now());
    mps->End(std::clamp(left, kMpsGoneWithin, MpsControl::kEndsWithin));
  }
  log::Info("left");
  if (!everybody_ended || device->Hangs()) log::EndProcess(exit_code);
  return exit_code;
}

}  // namespace
}  // namespace dmuond::server

namespace {

// The exit code.
int Run(int argc, char** argv, dmuond::server::StopSignals& signals) {
  using dmuond::server::Config;
  // gRPC's locks are abseil's. Debian builds them with their search for lock cycles, which costs
  // several microseconds in each call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  auto manager = dmuond::server::ServiceManager::Take();
  // A reader of stderr, or of a connection, may go: that is an error of the write.
  std::signal(SIGPIPE, SIG_IGN);
  // A limit of a file's size (ulimit -f) may be met: that is an error (EFBIG) of what met it.
  std::signal(SIGXFSZ, SIG_IGN);
  dmuond::server::IgnoreStraySignals();
  dmuond::server::log::FlushAtFatalSignals();
  dmuond::server::LogForLibraries();
  // Kept to the end: gRPC's own shutdown waits up to 10 s for the poller that a large transfer
  // leaves behind.
  grpc_init();
  const absl::StatusOr<Config> config = dmuond::server::UnlessStopped(
      signals, [&] { return dmuond::server::LoadConfig(argc, argv); });
  if (!config.ok()) {
    dmuond::server::log::WriteText(absl::StrCat("dmuond: ", config.status().message(), "\n"));
    return dmuond::server::kWrongSettings;
  }
  const bool only_asks = config->version || !config->help.empty() || config->print_config;
  if (config->version) {
    std::cout << dmuond::server::VersionText("dmuond", dmuond::server::kBuildCommit);
  } else if (!config->help.empty()) {
    std::cout << config->help;
  } else if (config->print_config) {
    std::cout << dmuond::server::ToText(*config);
  }
  if (only_asks || config->check_config) return dmuond::server::EndOutput("dmuond", 0);
  dmuond::server::log::SetLevel(config->log_level);
  dmuond::server::log::SetFormat(config->log_format);
  if (!config->log_file.empty()) {
    if (absl::Status opened = dmuond::server::log::WriteTo(config->log_file); !opened.ok()) {
      dmuond::server::log::Error("ended", {{"what", opened}});
      return 1;
    }
  }
  if (std::getenv("DMUOND_CHECKED") == nullptr) {  // which tests set
    dmuond::scheduler::on_impossible = [](const std::string& what) {
      dmuond::server::log::Error("an event that cannot be was refused", {{"what", what}});
    };
  }
  if (dmuond::fault::ConnectFaultDriver()) {
    dmuond::server::log::Warn("a test's fault driver may stop this process at any point");
  }
  const absl::StatusOr<int> served = dmuond::server::Serve(*config, signals, std::move(manager));
  if (!served.ok()) {
    dmuond::server::log::Error("ended", {{"what", served.status()}});
    return 1;
  }
  return *served;
}

}  // namespace

int main(int argc, char** argv) {
  dmuond::server::StopSignals signals;
  try {
    return Run(argc, argv, signals);
  } catch (const std::system_error& error) {
    // All threads that a daemon always needs are made before it serves. Nothing is undone here: it
    // holds nothing yet, and the log may lack its thread, too.
    const std::string why(dmuond::wire::NoThread("the daemon", error).message());
    std::fprintf(stderr, "dmuond: %s\n", why.c_str());
    ::_exit(1);
  }
}
