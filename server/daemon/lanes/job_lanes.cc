#include "server/daemon/lanes/job_lanes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/registrations.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"

namespace dmuond::server {

JobLanes::JobLanes(Options options, LaneHost::Callbacks callbacks)
    : options_(std::move(options)),
      host_(options_.host, std::move(callbacks)),
      tunings_(options_.host.lanes),
      silent_ms_(options_.host.lanes) {}

absl::Status JobLanes::Start(const scheduler::node::StartLanes& order, const v1::PlanInputs& wire,
                             const scheduler::Plan& plan, NodeMemory& memory) {
  if (order.state_is_void) memory.VoidState(options_.host.lanes);
  if (order.anew) {
    // What the old lanes have said on the board belongs to the old epoch.
    absl::Status board =
        memory.memory()->AllocateBoard(lane::PublishBoardBytes(plan.buckets, options_.host.lanes));
    if (!board.ok()) return board;
  }
  for (int32_t i = 0; i < options_.host.lanes; ++i) {
    const scheduler::LaneIndex lane(i);
    silent_ms_[i] = 0;
    std::vector<int> fds;
    const v1::LaneCommand configure = ConfigureOf(order.epoch, lane, wire, memory, fds);
    absl::Status started = host_.Start(lane, generation_, configure, fds);
    if (!started.ok()) return started;
  }
  return absl::OkStatus();
}

v1::LaneCommand JobLanes::ConfigureOf(uint32_t epoch, scheduler::LaneIndex lane,
                                      const v1::PlanInputs& wire, const NodeMemory& memory,
                                      std::vector<int>& fds) const {
  const v1::LaneProgram& program = memory.programs()[lane.value()];
  const JobMemory& of_job = *memory.memory();
  v1::LaneCommand command;
  v1::LaneCommand::Configure& configure = *command.mutable_configure();
  *configure.mutable_program() = program;
  configure.set_epoch(epoch);
  configure.set_job(wire.job());
  *configure.mutable_groups() = AnyOf(wire).groups();
  *configure.mutable_choices() = wire.costs().choices();
  configure.set_state_bytes(std::max<int64_t>(1, program.state_bytes()));
  configure.set_staging_bytes(std::max<int64_t>(1, program.staging_bytes()));
  configure.set_state_table_bytes(lane::StateTableBytes(program.plan_units()));
  configure.set_publish_board_bytes(
      lane::PublishBoardBytes(program.buckets_size(), options_.host.lanes));
  configure.set_threads(options_.threads_per_lane);
  configure.set_bind_address(options_.rail_address);
  configure.set_rail_timeout_ms(options_.rail_timeout.count());
  configure.set_tuning(tunings_[lane.value()]);
  fds = {of_job.state_fd(lane), of_job.staging_fd(lane), of_job.table_fd(lane), of_job.board_fd()};
  if (const auto copy = of_job.host_copy(lane); copy != nullptr) {
    configure.set_host_copy_bytes(static_cast<int64_t>(copy->size()));
    configure.set_snapshot_staging_bytes(options_.snapshot_staging_bytes);
    fds.push_back(of_job.host_copy_fd(lane));
  }
  return command;
}

void JobLanes::Command(const scheduler::node::CommandLanes& order, const NodeMemory& memory) {
  std::vector<int> fds;
  if (order.command.has_attach()) {
    if (memory.memory() == nullptr) return;
    const scheduler::TrainerRank rank(order.command.attach().rank());
    for (const v1::Arena& arena : order.command.attach().arenas()) {
      if (arena.has_cuda_ipc()) continue;
      fds.push_back(memory.memory()->arena_fd(rank, arena.id()));
    }
    fds.push_back(memory.memory()->timeline_fd(rank));
  }
  for (const scheduler::LaneIndex lane : order.lanes) {
    if (fds.empty()) {
      host_.Keep(lane, order.command);
    } else {
      // Where it is; its end is reported by on_gone.
      host_.Send(lane, order.command, fds).IgnoreError();
    }
  }
  turn_ = turn_ || (fds.empty() && !order.may_wait);
}

void JobLanes::Broadcast(const v1::LaneCommand& command) {
  for (int32_t i = 0; i < options_.host.lanes; ++i) {
    host_.Send(scheduler::LaneIndex(i), command).IgnoreError();
  }
}

void JobLanes::Condemn(const scheduler::node::CondemnLane& order) {
  host_.Condemn(order.lane,
                absl::StrCat("it hung and was killed: ", order.why, "; awaited: ", order.awaited));
}

void JobLanes::End(bool others_follow) {
  ++generation_;
  if (others_follow) {
    host_.GiveUpAll();
  } else {
    host_.EndAll();
  }
}

}  // namespace dmuond::server
