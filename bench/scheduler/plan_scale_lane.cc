#include "bench/scheduler/plan_scale_lane.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"
#include "kernels/cpu/cpu_device.h"
#include "server/lane/collector.h"
#include "server/lane/publisher.h"
#include "server/lane/rail.h"
#include "server/lane/slots.h"
#include "server/lane/updater.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"

namespace dmuond::bench {
namespace {

// Memory that takes no room before it is written.
wire::UniqueFd Sparse(int64_t bytes) {
  wire::UniqueFd fd(::memfd_create("plan_scale", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(fd.get(), bytes) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    std::abort();
  }
  return fd;
}

void Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename Value>
Value Must(absl::StatusOr<Value> value) {
  if (!value.ok()) Fail(value.status());
  return *std::move(value);
}

}  // namespace

double MemoryMiB(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0)
      return std::strtod(line.c_str() + field.size() + 1, nullptr) / 1024;
  }
  return 0;
}

void RunAsLane(const v1::LaneProgram& program) {
  v1::LaneCommand command;
  v1::LaneCommand::Configure& configure = *command.mutable_configure();
  *configure.mutable_program() = program;
  configure.set_epoch(1);
  configure.add_groups()->set_preset("keller");
  configure.set_state_bytes(program.state_bytes());
  configure.set_staging_bytes(program.staging_bytes());
  configure.set_state_table_bytes(
      static_cast<int64_t>(server::lane::StateTableBytes(program.plan_units())));
  configure.set_publish_board_bytes(static_cast<int64_t>(
      server::lane::PublishBoardBytes(program.buckets_size(), program.lanes_per_node())));
  char path[] = "/tmp/plan_scale_XXXXXX";
  const wire::UniqueFd file(::mkstemp(path));
  std::ofstream(path, std::ios::binary) << command.SerializeAsString();
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl("/proc/self/exe", "plan_scale", kAsLane, path, nullptr);
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::unlink(path);
  if (status != 0) Fail(absl::InternalError("the lane has failed"));
}

int BeLane(const std::string& path) {
  auto device = Must(kernels::cpu::CpuDevice::Create(1));
  v1::LaneCommand command = Timed("a lane: read", [&] {
    std::ostringstream bytes;
    bytes << std::ifstream(path, std::ios::binary).rdbuf();
    v1::LaneCommand parsed;
    if (!parsed.ParseFromString(bytes.str())) Fail(absl::DataLossError("no command"));
    return parsed;
  });
  const v1::LaneCommand::Configure& configure = command.configure();
  std::vector<wire::UniqueFd> fds;
  for (const int64_t bytes : {configure.state_bytes(), configure.staging_bytes(),
                              configure.state_table_bytes(), configure.publish_board_bytes()}) {
    fds.push_back(Sparse(bytes));
  }
  const auto job = Timed("a lane: its job", [&] {
    return Must(server::lane::LaneJob::Make(configure, fds, *device));
  });
  server::lane::Channel channel{wire::UniqueFd()};
  server::lane::Rail rail(*job, channel, nullptr);
  const server::lane::TrainerMemory trainers(*job, *device);
  const auto stream = Must(device->CreateStream());
  const auto slots = Must(server::lane::Slots::Create(*job));
  const auto engine = Timed("a lane: its engine", [&] {
    auto collector = Must(server::lane::Collector::Create(*job, trainers, rail, *device, *stream));
    auto updater = Must(server::lane::Updater::Create(*job, *slots, *device, *stream));
    auto publisher = Must(server::lane::Publisher::Create(*job, trainers, rail, *device));
    return std::tuple(std::move(collector), std::move(updater), std::move(publisher));
  });
  return 0;
}

}  // namespace dmuond::bench
