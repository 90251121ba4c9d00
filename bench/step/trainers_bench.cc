// What a step costs the daemon by the number of trainers, when there is nothing to compute: CPU
// time of its process and context switches of its threads a step, beside those of as many empty
// calls (Hello) that come at the same moment, in the same run. And the same of the coordinating
// daemon of a group on this machine with one trainer a node, by the number of segments with data,
// in both directions, on its connections to the other daemons: a message is one, and little else
// is.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "bench/common/model.h"
#include "bench/common/program.h"
#include "dmuond/client/session.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "nlohmann/json.hpp"
#include "server/version.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"

ABSL_FLAG(std::vector<std::string>, trainers_of,
          std::vector<std::string>({"1", "2", "4", "8", "12", "16", "24", "32"}),
          "numbers of trainers");
ABSL_FLAG(int32_t, rounds, 1000, "measured steps, and rounds of empty calls");
ABSL_FLAG(int32_t, nodes, 16, "daemons of the group; below 2: no group is measured");
ABSL_FLAG(int32_t, group_rounds, 100, "the same as --rounds, of the group");
ABSL_FLAG(int32_t, buckets, 64, "of the group's job");
ABSL_FLAG(std::string, coordinator, "", "internal: the coordinating daemon's socket for trainers");
ABSL_FLAG(int32_t, peer_port, 0, "internal: that it serves other daemons on; 0: none");
ABSL_FLAG(std::string, results, "", "internal: where rank 0 writes what it measured");
ABSL_FLAG(std::string, barrier, "", "internal: file with the barrier of all trainers");
ABSL_FLAG(int64_t, daemon_pid, 0, "internal");

namespace dmuond::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr int kWarmup = 100;
const Model kEmpty = {.vector = 1};

// A barrier in memory that processes share.
class SharedBarrier {
 public:
  static absl::StatusOr<SharedBarrier> Open(const std::string& path, unsigned processes) {
    const wire::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd.valid() || ::ftruncate(fd.get(), sizeof(pthread_barrier_t)) != 0) {
      return absl::ErrnoToStatus(errno, path);
    }
    void* memory =
        ::mmap(nullptr, sizeof(pthread_barrier_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, path);
    auto* barrier = static_cast<pthread_barrier_t*>(memory);
    if (processes > 0) {
      pthread_barrierattr_t attributes;
      pthread_barrierattr_init(&attributes);
      pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
      pthread_barrier_init(barrier, &attributes, processes);
    }
    return SharedBarrier(barrier);
  }
  void Wait() { pthread_barrier_wait(barrier_); }

 private:
  explicit SharedBarrier(pthread_barrier_t* barrier) : barrier_(barrier) {}
  pthread_barrier_t* barrier_;
};

// Counts what a process has used since it started.
struct Usage {
  double cpu_us = 0;
  int64_t switches = 0;  // of threads that live
  int64_t segments = 0;  // with data, from and to other daemons
};

// Returns the segments with data, in both directions, of all connections to a local port.
int64_t SegmentsOf(int port) {
  if (port == 0) return 0;
  const std::string command = absl::StrCat("ss -tinH sport = :", port);
  std::string text;
  if (std::FILE* pipe = ::popen(command.c_str(), "r"); pipe != nullptr) {
    char block[4096];
    for (size_t read = 0; (read = std::fread(block, 1, sizeof(block), pipe)) > 0;) {
      text.append(block, read);
    }
    ::pclose(pipe);
  }
  int64_t segments = 0;
  for (const absl::string_view word : absl::StrSplit(text, absl::ByAnyChar(" \n\t"))) {
    for (const absl::string_view name : {"data_segs_in:", "data_segs_out:"}) {
      int64_t count = 0;
      if (absl::StartsWith(word, name) && absl::SimpleAtoi(word.substr(name.size()), &count)) {
        segments += count;
      }
    }
  }
  return segments;
}

Usage UsageOf(pid_t pid) {
  Usage usage;
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(pid, &clock) == 0 && ::clock_gettime(clock, &time) == 0) {
    usage.cpu_us = static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
  }
  std::error_code gone;
  for (const auto& thread :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), gone)) {
    std::ifstream status(thread.path() / "status");
    for (std::string line; std::getline(status, line);) {
      int64_t count = 0;
      if (!absl::StrContains(line, "ctxt_switches")) continue;
      if (absl::SimpleAtoi(line.substr(line.find(':') + 1), &count)) usage.switches += count;
    }
  }
  usage.segments = SegmentsOf(absl::GetFlag(FLAGS_peer_port));
  return usage;
}

// One number of rounds of something, by rank 0's clock.
absl::StatusOr<json> Rounds(const std::function<absl::Status()>& round) {
  const auto pid = static_cast<pid_t>(absl::GetFlag(FLAGS_daemon_pid));
  const int rounds = absl::GetFlag(FLAGS_rounds);
  std::vector<double> took_us;
  const Usage before = UsageOf(pid);
  for (int i = 0; i < rounds; ++i) {
    const Clock::time_point begin = Clock::now();
    if (absl::Status status = round(); !status.ok()) return status;
    took_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  const Usage after = UsageOf(pid);
  std::nth_element(took_us.begin(), took_us.begin() + rounds / 2, took_us.end());
  return json{{"p50_us", took_us[rounds / 2]},
              {"cpu_us", (after.cpu_us - before.cpu_us) / rounds},
              {"switches", static_cast<double>(after.switches - before.switches) / rounds},
              {"segments", static_cast<double>(after.segments - before.segments) / rounds}};
}

absl::Status Train(int32_t rank) {
  const int trainers = TrainersOfFlags();
  absl::StatusOr<SharedBarrier> barrier = SharedBarrier::Open(absl::GetFlag(FLAGS_barrier), 0);
  if (!barrier.ok()) return barrier.status();
  const Model model = ModelOfFlags();
  absl::StatusOr<client::Layout> layout = MakeLayout(model, trainers);
  if (!layout.ok()) return layout.status();
  layout->bucket_bytes = 1;  // a bucket for each parameter
  auto session =
      client::Session::Open({.address = AddressOfFlags(), .rank = rank, .world_size = trainers});
  if (!session.ok()) return session.status();
  if (auto registered = (*session)->Register(*layout); !registered.ok()) {
    return registered.status();
  }
  if (absl::Status status = (*session)->Attach(); !status.ok()) return status;
  FillWeights(**session, model);
  FillGradients(**session, model, rank);
  if (absl::Status status = (*session)->Push(); !status.ok()) return status;

  const client::StepScalars scalars{.groups = {{.learning_rate = 1e-3}}};
  const auto step = [&] { return (*session)->Step(scalars).status(); };
  const auto channel =
      grpc::CreateChannel(absl::GetFlag(FLAGS_coordinator), grpc::InsecureChannelCredentials());
  const auto stub = v1::Trainer::NewStub(channel);
  const auto call = [&] {
    barrier->Wait();
    grpc::ClientContext context;
    v1::HelloRequest request;
    request.set_version_min(server::kProtocolVersion);
    request.set_version_max(server::kProtocolVersion);
    v1::HelloReply reply;
    const grpc::Status status = stub->Hello(&context, request, &reply);
    return status.ok() ? absl::OkStatus() : absl::InternalError(status.error_message());
  };
  for (int i = 0; i < kWarmup; ++i) {
    if (absl::Status status = step(); !status.ok()) return status;
  }
  const absl::StatusOr<json> steps = Rounds(step);
  if (!steps.ok()) return steps.status();
  for (int i = 0; i < kWarmup; ++i) {
    if (absl::Status status = call(); !status.ok()) return status;
  }
  const absl::StatusOr<json> calls = Rounds(call);
  if (!calls.ok()) return calls.status();
  barrier->Wait();  // sessions end when nothing is measured any more
  if (absl::Status status = (*session)->Close(); !status.ok()) return status;
  if (rank != 0) return absl::OkStatus();
  std::ofstream file(absl::GetFlag(FLAGS_results));
  file << json{{"trainers", trainers}, {"steps", *steps}, {"calls", *calls}};
  file.close();
  return file ? absl::OkStatus() : absl::InternalError("results cannot be written");
}

// Trainers in turn on the daemons, of which the first one is measured.
absl::StatusOr<json> Run(const testing::DaemonGroup& daemons, int peer_port, int trainers,
                         const Model& model, int rounds) {
  const testing::DaemonProcess& first = *daemons.front();
  const std::string path = first.address().substr(first.address().find(':') + 1);
  const std::string results = path + ".results";
  const std::string barrier = path + ".barrier";
  if (auto made = SharedBarrier::Open(barrier, static_cast<unsigned>(trainers)); !made.ok()) {
    return made.status();
  }
  std::vector<std::unique_ptr<testing::ChildProcess>> children;
  for (int32_t rank = 0; rank < trainers; ++rank) {
    std::vector<std::string> flags = TrainerFlags(
        rank, trainers, daemons[static_cast<size_t>(rank) % daemons.size()]->address(), model);
    flags.push_back(absl::StrCat("--rounds=", rounds));
    flags.push_back(absl::StrCat("--results=", results));
    flags.push_back(absl::StrCat("--barrier=", barrier));
    flags.push_back(absl::StrCat("--daemon_pid=", first.pid()));
    flags.push_back(absl::StrCat("--coordinator=unix:", path));
    if (rank == 0) flags.push_back(absl::StrCat("--peer_port=", peer_port));
    auto child = testing::ChildProcess::Start("trainers_bench", std::move(flags));
    if (!child.ok()) return child.status();
    children.push_back(*std::move(child));
  }
  for (const auto& child : children) {
    if (const int code = child->Wait(std::chrono::minutes(10)); code != 0) {
      return absl::InternalError(
          absl::StrCat("a trainer ended with ", code, "; the daemon's log:\n", first.Log()));
    }
  }
  std::ifstream file(results);
  json measured = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!measured.is_object()) return absl::DataLossError("rank 0 left no results");
  return measured;
}

absl::StatusOr<json> RunAlone(int trainers, const Model& model, int rounds) {
  auto daemon = testing::DaemonProcess::Start({.devices = "cpu:1", .flags = {"--threads=1"}});
  if (!daemon.ok()) return daemon.status();
  testing::DaemonGroup alone;
  alone.push_back(*std::move(daemon));
  return Run(alone, 0, trainers, model, rounds);
}

// Measures what a segment costs the coordinator: its CPU time of a group's step, less a lone
// node's.
absl::Status MeasureGroup(json& results) {
  const int nodes = absl::GetFlag(FLAGS_nodes);
  if (nodes < 2) return absl::OkStatus();
  const int rounds = absl::GetFlag(FLAGS_group_rounds);
  const Model model{.matrices = {{.rows = 16, .cols = 16, .count = absl::GetFlag(FLAGS_buckets)}}};
  const absl::StatusOr<json> alone = RunAlone(1, model, rounds);
  if (!alone.ok()) return alone.status();
  const std::string coordinator = testing::FreeAddress();
  int port = 0;
  if (!absl::SimpleAtoi(coordinator.substr(coordinator.rfind(':') + 1), &port)) {
    return absl::InternalError("no port is free");
  }
  const auto group = testing::StartGroup(nodes, "cpu:1", {"--threads=1"}, coordinator);
  if (!group.ok()) return group.status();
  absl::StatusOr<json> measured = Run(*group, port, nodes, model, rounds);
  if (!measured.ok()) return measured.status();
  const json& steps = (*measured)["steps"];
  const double segments = steps["segments"].get<double>();
  const double alone_us = (*alone)["steps"]["cpu_us"].get<double>();
  const double segment_us = (steps["cpu_us"].get<double>() - alone_us) / segments;
  const double call_us = (*measured)["calls"]["cpu_us"].get<double>() / nodes;
  std::printf("#\n# group of %d, %d buckets: %.0f segments a step, %.1f a node; step p50 %.0f us\n",
              nodes, absl::GetFlag(FLAGS_buckets), segments, segments / (nodes - 1),
              steps["p50_us"].get<double>());
  std::printf(
      "# CPU of the coordinator a step %.0f us, alone %.0f us: %.1f us a segment; an empty "
      "call %.1f us\n",
      steps["cpu_us"].get<double>(), alone_us, segment_us, call_us);
  results["group"] = {{"nodes", nodes},           {"buckets", absl::GetFlag(FLAGS_buckets)},
                      {"group", *measured},       {"alone", *alone},
                      {"segment_us", segment_us}, {"call_us", call_us}};
  return absl::OkStatus();
}

absl::Status Measure(json& results) {
  std::printf(
      "# The daemon's CPU time and context switches, of a step and of a round of empty calls\n"
      "# (Hello) from all trainers at once. `more`: CPU of a step, less that of the calls, for\n"
      "# each trainer above two.\n#\n");
  std::printf("#%9s %10s %10s %10s %10s %10s %10s %10s\n", "trainers", "step p50", "step CPU",
              "switches", "calls p50", "calls CPU", "switches", "more");
  std::printf("#%9s %10s %10s %10s %10s %10s %10s %10s\n", "", "(us)", "(us)", "", "(us)", "(us)",
              "", "(us)");
  double beyond_calls_of_two = 0;
  for (const std::string& text : absl::GetFlag(FLAGS_trainers_of)) {
    int trainers = 0;
    if (text.empty()) continue;
    if (!absl::SimpleAtoi(text, &trainers) || trainers < 1) {
      return absl::InvalidArgumentError(absl::StrCat("--trainers_of: ", text));
    }
    absl::StatusOr<json> measured = RunAlone(trainers, kEmpty, absl::GetFlag(FLAGS_rounds));
    if (!measured.ok()) return measured.status();
    const json& steps = (*measured)["steps"];
    const json& calls = (*measured)["calls"];
    const double beyond = steps["cpu_us"].get<double>() - calls["cpu_us"].get<double>();
    if (trainers == 2) beyond_calls_of_two = beyond;
    const double more = trainers > 2 ? (beyond - beyond_calls_of_two) / (trainers - 2) : 0;
    (*measured)["more_us"] = more;
    std::printf("%10d %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f\n", trainers,
                steps["p50_us"].get<double>(), steps["cpu_us"].get<double>(),
                steps["switches"].get<double>(), calls["p50_us"].get<double>(),
                calls["cpu_us"].get<double>(), calls["switches"].get<double>(), more);
    std::fflush(stdout);
    results["trainers"].push_back(*std::move(measured));
  }
  return MeasureGroup(results);
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  return dmuond::bench::RunProgram(
      {.name = "trainers_bench",
       .usage = "measures what a step costs a dmuond of its own, by the number of trainers",
       .measure = dmuond::bench::Measure,
       .train = dmuond::bench::Train},
      argc, argv);
}
