#include "server/daemon/memory/prepared_job.h"

#include <algorithm>
#include <utility>

#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/lane_program.h"
#include "scheduler/plan.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"
#include "server/storage/host_copy.h"

namespace dmuond::server {

absl::StatusOr<PreparedJob> PrepareJob(Planner& planner, NodeDevice& device,
                                       const v1::PlanInputs& wire, const PrepareOptions& options,
                                       PrepareProgress& progress) {
  absl::StatusOr<scheduler::PlannedJob> planned = planner.Make(wire);
  if (!planned.ok()) return planned.status();
  const scheduler::PlanInputs& inputs = *planned->inputs;
  const scheduler::Plan& plan = *planned->plan;
  if (options.resume.has_value()) {
    absl::Status same = CheckRestorable(*options.resume, inputs, AnyOf(wire).groups());
    if (!same.ok()) return same;
  }
  progress.planned = true;
  PreparedJob prepared;
  prepared.memory = std::make_unique<JobMemory>(
      device, JobMemory::Options{.job = wire.job(), .bytes_max = options.job_memory_bytes});
  JobMemory& memory = *prepared.memory;
  absl::Status board = memory.AllocateBoard(lane::PublishBoardBytes(plan.buckets, options.lanes));
  if (!board.ok()) return board;
  auto host = std::make_shared<std::vector<HostState>>();
  for (int32_t i = 0; i < options.lanes; ++i) {
    if (progress.unwanted) return absl::CancelledError("nobody wants the job any more");
    const scheduler::LaneIndex index(i);
    absl::StatusOr<scheduler::LaneProgram> program = scheduler::MakeLaneProgram(
        inputs, plan, scheduler::LaneId((options.node * options.lanes) + i));
    if (!program.ok()) return program.status();
    // A lane may own nothing: its memory is a byte then, not none.
    absl::Status allocated = memory.AllocateLane(index, std::max<int64_t>(1, program->state_bytes),
                                                 std::max<int64_t>(1, program->staging_bytes),
                                                 lane::StateTableBytes(plan.units.size()));
    if (!allocated.ok()) return allocated;
    progress.done = memory.bytes();
    if (options.host_copies) {
      HostState& state = host->emplace_back();
      state.lane = program->lane;
      state.layout = storage::PlaceHostCopy(*program);
      state.units = storage::StateUnitsOf(inputs.layout, plan, state.layout.units);
      absl::Status copy = memory.AllocateHostCopy(index, state.layout.bytes());
      if (!copy.ok()) return copy;
      state.memory = memory.host_copy(index);
      progress.done = memory.bytes();
    }
    prepared.programs.push_back(ToProto(*program));
  }
  if (options.host_copies) prepared.host = std::move(host);
  prepared.planned = *std::move(planned);
  return prepared;
}

}  // namespace dmuond::server
