#include "server/lane/lane_job.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "server/cost_file.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"

namespace dmuond::server::lane {
namespace {

absl::Status CheckSize(const char* what, int64_t given, int64_t needed) {
  if (given >= needed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", given, " bytes, the plan needs ", needed));
}

// Of the device, or of the host where there is none.
absl::StatusOr<std::unique_ptr<kernels::Mapping>> MapUnlessEmpty(kernels::Device* device, int fd,
                                                                 int64_t bytes) {
  if (bytes == 0) return std::unique_ptr<kernels::Mapping>();
  return device == nullptr ? kernels::cpu::MapShared(fd, static_cast<size_t>(bytes))
                           : device->Map(fd, static_cast<size_t>(bytes));
}

absl::Status MapHostCopy(const v1::LaneCommand::Configure& configure, int fd, LaneJob& job) {
  job.host_copy = storage::PlaceHostCopy(job.plan, job.program);
  job.snapshot_staging_bytes = configure.snapshot_staging_bytes();
  absl::Status size = CheckSize("host copy", configure.host_copy_bytes(), job.host_copy.bytes());
  if (!size.ok() || job.host_copy.bytes() == 0) return size;
  auto mapping = kernels::cpu::MapShared(fd, static_cast<size_t>(job.host_copy.bytes()));
  if (!mapping.ok()) return mapping.status();
  job.host_memory = *std::move(mapping);
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
                          static_cast<int64_t>(StateTableBytes(job.plan.units.size()))));
  status.Update(
      CheckSize("publish board", configure.publish_board_bytes(),
                static_cast<int64_t>(PublishBoardBytes(job.buckets(), job.inputs.lanes_per_node))));
  if (!status.ok()) return status;
  const int64_t sizes[] = {program.state_bytes, program.staging_bytes,
                           configure.state_table_bytes(), configure.publish_board_bytes()};
  std::unique_ptr<kernels::Mapping>* places[] = {&job.state, &job.staging, &job.table, &job.board};
  // Table and board are host memory on every device.
  kernels::Device* const devices[] = {&device, &device, nullptr, nullptr};
  for (size_t i = 0; i < std::size(sizes); ++i) {
    auto mapping = MapUnlessEmpty(devices[i], fds[i].get(), sizes[i]);
    if (!mapping.ok()) return mapping.status();
    *places[i] = *std::move(mapping);
  }
  return configure.host_copy_bytes() > 0 ? MapHostCopy(configure, fds[4].get(), job)
                                         : absl::OkStatus();
}

// Which lanes of this node publish a part of which bucket.
void FindPublishers(LaneJob& job) {
  job.publishers.resize(job.buckets());
  for (const scheduler::Unit& unit : job.plan.units) {
    const scheduler::Indices& holders = job.plan.holders[unit.id.value()];
    const bool held_here = std::any_of(holders.begin(), holders.end(), [&](int32_t f) {
      return job.is_local(job.inputs.layout.fragments[f]);
    });
    if (!held_here) continue;
    std::vector<int32_t>& lanes = job.publishers[unit.bucket.value()];
    const int32_t lane = unit.owner.value() % job.inputs.lanes_per_node;
    if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(lane);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<LaneJob>> LaneJob::Make(const v1::LaneCommand::Configure& configure,
                                                       const std::vector<wire::UniqueFd>& fds,
                                                       kernels::Device& device) {
  auto job = std::make_unique<LaneJob>();
  absl::StatusOr<scheduler::PlanInputs> inputs = FromProto(configure.plan());
  if (!inputs.ok()) return inputs.status();
  job->name = configure.plan().job();
  job->epoch = configure.epoch();
  job->inputs = *std::move(inputs);
  absl::StatusOr<scheduler::Plan> plan = scheduler::MakePlan(job->inputs);
  if (!plan.ok()) return plan.status();
  job->plan = *std::move(plan);
  if (job->plan.digest != configure.plan_digest()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon's plan has digest ", configure.plan_digest(), ", lane ",
                     configure.lane(), " made one of ", job->plan.digest));
  }
  absl::StatusOr<scheduler::LaneProgram> program =
      scheduler::MakeLaneProgram(job->inputs, job->plan, scheduler::LaneId(configure.lane()));
  if (!program.ok()) return program.status();
  job->program = *std::move(program);
  if (absl::Status chosen = device.ops().UseChoices(ToChoices(job->inputs.costs)); !chosen.ok()) {
    return chosen;
  }
  for (const v1::GroupConfig& group : AnyOf(configure.plan()).groups()) {
    absl::StatusOr<kernels::MuonConfig> config = FromProto(group);
    if (!config.ok()) return config.status();
    job->configs.push_back(*std::move(config));
  }
  for (const scheduler::Trainer& trainer : job->inputs.layout.trainers) {
    job->local.push_back(trainer.node == job->program.node);
  }
  job->staged_index.assign(job->plan.units.size(), -1);
  for (size_t i = 0; i < job->program.staged.size(); ++i) {
    job->staged_index[job->program.staged[i].unit.value()] = static_cast<int32_t>(i);
  }
  job->has_trainers = std::find(job->local.begin(), job->local.end(), true) != job->local.end();
  FindPublishers(*job);
  if (absl::Status mapped = MapMemory(configure, fds, device, *job); !mapped.ok()) return mapped;
  return job;
}

}  // namespace dmuond::server::lane
