#include "server/lane/lane_job.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "server/cost_file.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"

namespace dmuond::server::lane {
namespace {

absl::Status CheckSize(const char* what, int64_t given, int64_t needed) {
  if (given >= needed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", given, " bytes, the program needs ", needed));
}

// Of the device, or of the host where there is none.
absl::StatusOr<std::unique_ptr<kernels::Mapping>> MapUnlessEmpty(kernels::Device* device, int fd,
                                                                 int64_t bytes) {
  if (bytes == 0) return std::unique_ptr<kernels::Mapping>();
  return device == nullptr ? kernels::cpu::MapShared(fd, static_cast<size_t>(bytes))
                           : device->Map(fd, static_cast<size_t>(bytes));
}

absl::Status MapHostCopy(const v1::LaneCommand::Configure& configure, int fd, LaneJob& job) {
  job.host_copy = storage::PlaceHostCopy(job.program);
  job.snapshot_staging_bytes = configure.snapshot_staging_bytes();
  absl::Status size = CheckSize("host copy", configure.host_copy_bytes(), job.host_copy.bytes());
  if (!size.ok() || job.host_copy.bytes() == 0) return size;
  ASSIGN_OR_RETURN(job.host_memory,
                   kernels::cpu::MapShared(fd, static_cast<size_t>(job.host_copy.bytes())));
  return absl::OkStatus();
}

absl::Status MapMemory(const v1::LaneCommand::Configure& configure,
                       const std::vector<wire::UniqueFd>& fds, kernels::Device& device,
                       LaneJob& job) {
  const size_t wanted = configure.host_copy_bytes() > 0 ? 5 : 4;
  if (fds.size() != wanted) {
    return absl::InvalidArgumentError(
        absl::StrCat("Configure came with ", fds.size(), " descriptors instead of ", wanted));
  }
  const scheduler::LaneProgram& program = job.program;
  absl::Status status = CheckSize("state memory", configure.state_bytes(), program.state_bytes);
  status.Update(CheckSize("staging memory", configure.staging_bytes(), program.staging_bytes));
  status.Update(CheckSize("state table", configure.state_table_bytes(),
                          static_cast<int64_t>(StateTableBytes(program.plan_units))));
  status.Update(
      CheckSize("publish board", configure.publish_board_bytes(),
                static_cast<int64_t>(PublishBoardBytes(job.buckets(), program.lanes_per_node))));
  if (!status.ok()) return status;
  const int64_t sizes[] = {program.state_bytes, program.staging_bytes,
                           configure.state_table_bytes(), configure.publish_board_bytes()};
  std::unique_ptr<kernels::Mapping>* places[] = {&job.state, &job.staging, &job.table, &job.board};
  // Table and board are host memory on every device.
  kernels::Device* const devices[] = {&device, &device, nullptr, nullptr};
  for (size_t i = 0; i < std::size(sizes); ++i) {
    ASSIGN_OR_RETURN(*places[i], MapUnlessEmpty(devices[i], fds[i].get(), sizes[i]));
  }
  return configure.host_copy_bytes() > 0 ? MapHostCopy(configure, fds[4].get(), job)
                                         : absl::OkStatus();
}

}  // namespace

absl::Status LaneJob::ReadProgram(const v1::LaneCommand::Configure& configure) {
  ASSIGN_OR_RETURN(program, FromProto(configure.program()));
  for (const v1::GroupConfig& group : configure.groups()) {
    ASSIGN_OR_RETURN(kernels::MuonConfig config, FromProto(group));
    configs.push_back(std::move(config));
  }
  for (const scheduler::LaneParameter& parameter : program.parameters) {
    if (static_cast<size_t>(parameter.group) < configs.size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("parameter \"", parameter.name,
                                                   "\" is of group ", parameter.group, " of ",
                                                   configs.size(), " groups"));
  }
  local.assign(program.world_size, false);
  for (const scheduler::TrainerRank rank : program.trainers) local[rank.value()] = true;
  has_trainers = !program.trainers.empty();
  for (size_t i = 0; i < program.staged.size(); ++i) {
    const scheduler::LaneUnit* of = program.Find(program.staged[i].unit);
    const scheduler::LaneParameter* parameter = program.FindParameter(of->unit.parameter);
    own_.emplace(of->unit.id.value(),
                 Place{.staged = static_cast<int32_t>(i),
                       .unit = static_cast<int32_t>(of - program.units.data()),
                       .parameter = static_cast<int32_t>(parameter - program.parameters.data())});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LaneJob>> LaneJob::Make(const v1::LaneCommand::Configure& configure,
                                                       const std::vector<wire::UniqueFd>& fds,
                                                       kernels::Device& device) {
  auto job = std::make_unique<LaneJob>();
  job->name = configure.job();
  job->epoch = configure.epoch();
  RETURN_IF_ERROR(job->ReadProgram(configure));
  v1::CostTable costs;
  *costs.mutable_choices() = configure.choices();
  RETURN_IF_ERROR(device.ops().UseChoices(ToChoices(FromProto(costs))));
  device.ops().UseTuning(configure.tuning());
  RETURN_IF_ERROR(MapMemory(configure, fds, device, *job));
  return job;
}

}  // namespace dmuond::server::lane
