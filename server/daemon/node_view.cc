#include "server/daemon/node_view.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "scheduler/job/node_job.h"
#include "server/daemon/calls/awaited.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;

const char* NameOf(const scheduler::RankTable::Session& session, const NodeJob& job) {
  if (job.steps() != nullptr && job.steps()->submitted(scheduler::TrainerRank(session.rank))) {
    return "submitted";
  }
  if (session.mapped()) return "attached";
  return session.state == scheduler::RankTable::State::kRegistered ? "registered" : "open";
}

const char* NameOf(const scheduler::LaneSet::Lane& lane) {
  if (lane.state == scheduler::LaneSet::State::kGone) return "gone";
  return lane.ready() ? "ready" : "starting";
}

const char* GroupState(const NodeJob& job, int32_t nodes) {
  if (job.leaves()) return "draining";
  if (job.epoch() == 0) return "joining";
  return nodes == 1 ? "alone" : "formed";
}

void FillTrainers(const NodeJob& job, v1::JobStatus& status) {
  for (const auto& [id, session] : job.ranks().sessions()) {
    v1::TrainerStatus& trainer = *status.add_trainers();
    trainer.set_rank(session.rank);
    if (session.pid > 0) trainer.set_pid(static_cast<int32_t>(session.pid));
    trainer.set_incarnation(session.incarnation);
    trainer.set_client(session.client);
    trainer.set_uid(session.uid);
    trainer.set_state(NameOf(session, job));
  }
}

void FillJob(Core& core, v1::JobStatus& status) DMUOND_REQUIRES(core.mutex) {
  const NodeJob& job = core.held_job();
  status.set_name(job.name());
  status.set_incarnation(job.wire().job_incarnation());
  status.set_world_size(job.world_size());
  if (job.planned()) status.set_owner_uid(job.wire().owner_uid());
  FillAwaited(core, *status.mutable_awaited());
  status.set_state(!job.failure().ok()         ? "failed"
                   : job.parked()              ? "parked"
                   : status.awaited_size() > 0 ? "waiting"
                   : job.steps() != nullptr    ? "running"
                   : job.planned()             ? "preparing"
                                               : "registering");
  const scheduler::JobFigures& figures = job.figures();
  status.set_skipped_steps(figures.skipped_steps);
  status.set_aborted_attempts(figures.aborted_attempts);
  status.set_gradient_norm(figures.gradient_norm);
  *status.mutable_timing() = figures.timing;
  const scheduler::SnapshotPart& snapshots = job.snapshot();
  if (const auto step = snapshots.durable_step()) status.set_durable_step(*step);
  status.set_snapshots_left_out(snapshots.done().left_out());
  status.set_snapshots_failed(snapshots.done().failed());
  status.set_snapshot_error(snapshots.failure());
  status.set_snapshot_bytes(figures.newest_snapshot_bytes);
  status.set_snapshot_ms(figures.newest_snapshot_ms);
  if (core.last_check.job == job.number()) *status.mutable_check() = core.last_check.check;
  if (job.steps() != nullptr) {
    status.set_last_committed_step(job.steps()->last_committed().value());
    status.set_attempt(job.steps()->open().attempt.value());
  }
  FillTrainers(job, status);
}

void FillLanes(Core& core, v1::GetStatusReply& status) DMUOND_REQUIRES(core.mutex) {
  const NodeJob& job = core.held_job();
  if (job.lanes().size() > 0) {
    const v1::LaneBits& bits = job.lanes()[scheduler::LaneIndex(0)].bits;
    if (!bits.code().empty()) *status.mutable_lane_bits() = bits;
    status.set_lanes_accepted(job.lanes().accepted());
  }
  for (size_t i = 0; i < job.lanes().size(); ++i) {
    const scheduler::LaneIndex index(static_cast<int32_t>(i));
    const scheduler::LaneSet::Lane& state = job.lanes()[index];
    v1::LaneStatus& lane = *status.add_lanes();
    lane.set_lane(state.id.value());
    if (const pid_t pid = core.lanes.host().pid(index); pid > 0) lane.set_pid(pid);
    lane.set_state(NameOf(state));
    lane.set_device(state.device);
    lane.set_restarts(std::max(0, state.starts - 1));
    lane.set_state_bytes(core.memory.programs()[i].state_bytes());
    lane.set_staging_bytes(core.memory.programs()[i].staging_bytes());
    const auto& copies = core.memory.host();
    if (copies != nullptr && (*copies)[i].memory != nullptr) {
      lane.set_copy_bytes(static_cast<int64_t>((*copies)[i].memory->size()));
    }
    lane.set_rail_silent_ms(core.lanes.silent_ms(index));
    lane.set_load_us(job.plan()->lane_load_us[state.id.value()]);
  }
}

}  // namespace

NodeView ViewOf(Core& core) {
  const NodeJob& job = core.held_job();
  NodeView view;
  view.taken = std::chrono::steady_clock::now();
  view.snapshots = core.options.storage != nullptr;
  view.counters = core.counters;
  view.ends = job.ends();
  view.lock_held = core.mutex.held();
  view.planned_in_s = core.planner.seconds();
  if (core.peers != nullptr) {
    view.heard = core.peers->Heard();
    view.certificates_expire = core.peers->CertificatesExpire();
  }
  v1::GetStatusReply& status = view.status;
  status.set_version(kBuildVersion);
  status.set_node(core.options.node);
  status.set_nodes(core.options.nodes);
  status.set_epoch(job.epoch());
  status.set_group_state(GroupState(job, core.options.nodes));
  status.set_device_type(core.device.type());
  status.set_core_type(core.options.core_type);
  status.set_socket(core.options.socket);
  if (job.epoch() == 0 && core.peers != nullptr) {
    GroupGaps gaps = core.peers->Gaps();
    status.mutable_missing_nodes()->Assign(gaps.missing.begin(), gaps.missing.end());
    if (core.options.node != 0) status.set_not_joined(std::move(gaps.not_joined));
  }
  for (const Disk* disk : {core.disks.writes(), core.disks.reads()}) {
    if (disk != nullptr && disk->hangs()) {
      status.set_snapshot_dir_hangs(disk->hang().Words());
      break;
    }
  }
  if (!job.exists()) return view;
  FillLanes(core, status);
  FillJob(core, *status.mutable_job());
  view.planned = {job.inputs(), job.plan()};
  view.figures = job.figures();
  return view;
}

}  // namespace dmuond::server
