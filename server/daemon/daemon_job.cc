// The job's plan on this node: memory, lanes, and their end; and what is told about them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"
#include "server/plan_summary.h"
#include "server/shared/publish_board.h"
#include "server/shared/state_table.h"
#include "server/version.h"

namespace dmuond::server {
namespace {}  // namespace

void Daemon::HandlePlan(const v1::PlanInputs& wire) {
  GiveWayTo(wire);
  if (job_ == nullptr) {
    // None of its trainers is of this node, whose lanes work for it all the same.
    BeginJob(wire.job(), WorldSizeOf(wire));
  }
  if (job_->planned()) {
    if (job_->wire.job_incarnation() == wire.job_incarnation()) return;  // told before
    return TellPlanFailed(Error(
        absl::StatusCode::kUnavailable, "NODE_NOT_READY",
        Say("job '", Named("job", wire.job()), "' cannot begin before job '",
            Named("holder", job_->name), "' has ended here: end the trainers that it still has")));
  }
  fault::FaultPoint("daemon.plan");
  StartPreparing(wire);
}

// A job that the group has never planned is nobody's but its trainers'.
void Daemon::GiveWayTo(const v1::PlanInputs& plan) {
  if (job_ == nullptr || job_->planned()) return;
  if (job_->name != plan.job()) {
    return EndJob(absl::StrCat("the group runs job '", plan.job(), "'"),
                  scheduler::OtherJob(plan.job(), job_->name));
  }
  if (job_->world_size != WorldSizeOf(plan)) {
    return EndJob(absl::StrCat("the group runs it with world_size ", WorldSizeOf(plan)),
                  Error(absl::StatusCode::kFailedPrecondition, "WORLD_DIFFERS",
                        Say("the group runs job '", Named("job", job_->name), "' with world_size ",
                            Named("world_size", WorldSizeOf(plan)), ", trainers of node ",
                            Named("node", options_.node), " say ",
                            Named("given_world_size", job_->world_size),
                            ": all ranks of a job have one WORLD_SIZE")));
  }
  // It is lost, and keeps the group from nothing but its own sessions, which have yet to hear of
  // that. They begin anew.
  if (!job_->failed.ok()) EndJob("its group broke while it registered");
}

void Daemon::BeginJob(const std::string& name, int32_t world_size) {
  job_ = std::make_unique<NodeJob>();
  job_->name = name;
  job_->world_size = world_size;
  job_->number = ++generation_;
  job_->snapshots.part = scheduler::SnapshotPart(options_.node);
}

void Daemon::StartPreparing(const v1::PlanInputs& wire) {
  if (WorldSizeOf(wire) != job_->world_size || wire.nodes() != options_.nodes ||
      wire.lanes_per_node() != options_.lanes) {
    return TellPlanFailed(
        Error(absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
              Say("the plan of job '", Named("job", job_->name), "' is for ",
                  Named("given_world_size", WorldSizeOf(wire)), " ranks, ",
                  Named("given_nodes", wire.nodes()), " nodes and ",
                  Named("given_lanes", wire.lanes_per_node()), " lanes on each; here it is ",
                  Named("world_size", job_->world_size), ", ", Named("nodes", options_.nodes),
                  " and ", Named("lanes", options_.lanes))));
  }
  if (worker_ == nullptr) return TellCannotGoOn();
  job_->wire = wire;
  job_->launch = wire.launch();
  job_->preparing = std::make_shared<PrepareProgress>();
  PrepareOptions options;
  options.node = options_.node;
  options.lanes = options_.lanes;
  options.job_memory_bytes = options_.job_memory_bytes;
  options.host_copies = options_.storage != nullptr;
  if (job_->snapshots.resume.has_value()) options.resume = job_->snapshots.resume->manifest;
  worker_->Post([this, wire, options = std::move(options), progress = job_->preparing] {
    absl::StatusOr<PreparedJob> prepared = PrepareJob(planner_, memory_, wire, options, *progress);
    StateLock lock(mutex_);
    if (job_ == nullptr || job_->preparing != progress) {
      // The job has ended, or is prepared anew.
      if (prepared.ok()) LetGo(std::move(prepared->memory));
      return;
    }
    OnPrepared(std::move(prepared));
  });
}

void Daemon::OnPrepared(absl::StatusOr<PreparedJob> prepared) {
  job_->preparing.reset();
  mutex_.Changed();
  if (!prepared.ok()) {
    job_->wire.Clear();
    return TellPlanFailed(prepared.status());
  }
  const v1::PlanInputs& wire = job_->wire;
  const std::optional<scheduler::CostTable>& costs = options_.coordinator.costs;
  if (costs.has_value() && wire.restore_step() > 0 &&
      ToProto(*costs).SerializeAsString() != wire.costs().SerializeAsString()) {
    log::Info("the job goes on with the costs that it was planned with: --replan takes others",
              {{"job", job_->name}, {"device", wire.costs().device()}});
  }
  job_->inputs = std::move(prepared->planned.inputs);
  job_->plan = std::move(prepared->planned.plan);
  job_->memory = std::move(prepared->memory);
  job_->snapshots.host = std::move(prepared->host);
  job_->programs = std::move(prepared->programs);
  const std::vector<scheduler::Trainer>& trainers = job_->inputs->layout.trainers;
  reports_.OnPlan(job_->programs, static_cast<int32_t>(std::count_if(
                                      trainers.begin(), trainers.end(), [this](const auto& t) {
                                        return t.node.value() == options_.node;
                                      })));
  job_->lanes =
      scheduler::LaneSet(scheduler::LaneId(options_.node * options_.lanes), options_.lanes,
                         {options_.lane_timeout, options_.coordinator.step.work_timeout()});
  const scheduler::PlanQuality& quality = job_->plan->quality;
  log::Info("plan made", {{"job", job_->name},
                          {"epoch", absl::StrCat(epoch_)},
                          {"units", absl::StrCat(job_->plan->units.size())},
                          {"buckets", absl::StrCat(job_->plan->buckets)},
                          {"makespan_us", absl::StrCat(quality.makespan_us)},
                          {"gap", absl::StrCat(quality.gap)},
                          {"imbalance", absl::StrCat(quality.imbalance)}});
  // Sessions that the plan does not know as they are: faster than the news of it, or of another
  // coordinator's mind.
  for (auto& [id, session] : sessions_) {
    if (session.state == Session::State::kOpen || !session.denied.ok()) continue;
    session.denied = CheckReplacement(session, session.registration);
  }
  // One that was lost meanwhile ends with its sessions. While the group is broken there is no epoch
  // that lanes could be started for: one that goes back is told to again when it has formed.
  if (!job_->failed.ok() || epoch_ == 0) return;
  if (absl::Status started = StartLanes(); !started.ok()) TellPlanFailed(started);
}

void Daemon::DropMemory() {
  if (job_->preparing != nullptr) job_->preparing->unwanted = true;
  job_->preparing.reset();
  job_->snapshots.host.reset();
  if (job_->memory == nullptr) return;
  job_->memory->PoisonAll();
  LetGo(std::exchange(job_->memory, nullptr));
}

void Daemon::LetGo(std::shared_ptr<void> memory) {
  if (worker_ != nullptr) worker_->Post([memory = std::move(memory)] {});
}

absl::Status Daemon::StartLanes() {
  for (int32_t i = 0; i < options_.lanes; ++i) {
    const scheduler::LaneIndex lane(i);
    std::vector<int> fds;
    const v1::LaneCommand configure = ConfigureOf(lane, fds);
    absl::Status started = lane_host_.Start(lane, generation_, configure, fds);
    if (!started.ok()) return started;
    job_->lanes.OnStarted(lane, epoch_);
  }
  return absl::OkStatus();
}

v1::LaneCommand Daemon::ConfigureOf(scheduler::LaneIndex lane, std::vector<int>& fds) const {
  const scheduler::LaneProgram& program = job_->programs[lane.value()];
  v1::LaneCommand command;
  v1::LaneCommand::Configure& configure = *command.mutable_configure();
  configure.set_lane(program.lane.value());
  configure.set_epoch(epoch_);
  *configure.mutable_plan() = job_->wire;
  configure.set_plan_digest(job_->plan->digest);
  configure.set_state_bytes(std::max<int64_t>(1, program.state_bytes));
  configure.set_staging_bytes(std::max<int64_t>(1, program.staging_bytes));
  configure.set_state_table_bytes(lane::StateTableBytes(job_->plan->units.size()));
  configure.set_publish_board_bytes(lane::PublishBoardBytes(job_->plan->buckets, options_.lanes));
  configure.set_threads(options_.threads_per_lane);
  configure.set_bind_address(options_.rail_address);
  fds = {job_->memory->state_fd(lane), job_->memory->staging_fd(lane), job_->memory->table_fd(lane),
         job_->memory->board_fd()};
  if (const auto copy = job_->memory->host_copy(lane); copy != nullptr) {
    configure.set_host_copy_bytes(static_cast<int64_t>(copy->size()));
    configure.set_snapshot_staging_bytes(options_.snapshot_staging_bytes);
    fds.push_back(job_->memory->host_copy_fd(lane));
  }
  return command;
}

void Daemon::HandleRefused(const v1::RegistrationRefused& refused) {
  if (job_ == nullptr || job_->name != refused.job()) return;
  const absl::Status status =
      Error(static_cast<absl::StatusCode>(refused.code()), refused.reason(), refused.message(),
            {refused.metadata().begin(), refused.metadata().end()});
  if (refused.has_session()) {
    // Before there is a session: the job that there is does not end for it.
    if (refused.session().discard() && refused.session().incarnation() == 0) {
      discard_refusals_[refused.session().rank()] = status;
    }
    for (auto& [id, session] : sessions_) {
      if (session.rank != refused.session().rank()) continue;
      if (session.incarnation == refused.session().incarnation()) session.denied = status;
    }
    mutex_.Changed();
    return;
  }
  log::Warn("layout refused",
            {{"job", job_->name}, {"epoch", epoch_}, {"what", refused.message()}});
  for (auto& [id, session] : sessions_) {
    session.refused = status;
    ++session.refusals;
    session.state = Session::State::kOpen;  // a corrected layout may be registered
  }
  lane_host_.EndAll();
  ++generation_;
  job_->lanes = {};
  job_->programs.clear();
  job_->snapshots.Abandon("the layout was refused");
  job_->snapshots.StopRestore();
  job_->snapshots.restored = false;
  DropMemory();
  job_->plan.reset();
  job_->inputs.reset();
  job_->wire.Clear();
  mutex_.Changed();
}

void Daemon::EndJob(const std::string& why, const absl::Status& told) {
  log::Info("job ended",
            {{"job", job_->name}, {"epoch", epoch_}, {"step", LastCommitted()}, {"what", why}});
  const int64_t durable = job_->snapshots.part.durable_step().value_or(0);
  const bool meant = ReasonOf(told) == scheduler::kJobEnded;
  if (!meant && (job_->ending || !job_->vacancies.empty()) && job_->has_state &&
      LastCommitted() > durable) {
    log::Error("state lost: it was in memory alone, and a rank did not come back",
               {{"job", job_->name},
                {"epoch", epoch_},
                {"after_step", absl::StrCat(durable)},
                {"last_step", absl::StrCat(LastCommitted())}});
  }
  lane_host_.EndAll();
  ++generation_;
  DropMemory();
  std::vector<v1::MemberMessage> news;
  for (const auto& [id, session] : sessions_) {
    if (told.ok()) {
      attach_->Close(session.attach);
    } else {
      KeepRefusal(session.attach, session.nonce, told);
      // Who was computing meanwhile must not take the daemon for gone, and the job up again.
      if (meant) refused_opens_[session.attach].forget_at = Deadline::max();
    }
    ended_sessions_.Keep(session.Key(), told);
    news.push_back(NewsOfEnd(session, /*closed=*/false, why));
  }
  sessions_.clear();
  job_.reset();
  mutex_.Changed();
  // The coordinator may have taken one that began as the job ended for the first of the next job. A
  // node that leaves says nothing more: the others wait for its successor.
  if (draining_) return;
  for (v1::MemberMessage& message : news) Tell(std::move(message));
}

void Daemon::FillJobStatus(v1::JobStatus& status) {
  status.set_name(job_->name);
  status.set_incarnation(job_->wire.job_incarnation());
  status.set_world_size(job_->world_size);
  FillAwaited(*status.mutable_awaited());
  status.set_state(!job_->failed.ok()          ? "failed"
                   : status.awaited_size() > 0 ? "waiting"
                   : job_->steps.has_value()   ? "running"
                   : job_->planned()           ? "preparing"
                                               : "registering");
  status.set_skipped_steps(job_->skipped_steps);
  status.set_aborted_attempts(job_->aborted_attempts);
  status.set_gradient_norm(job_->gradient_norm);
  *status.mutable_timing() = job_->timing;
  const scheduler::SnapshotPart& snapshots = job_->snapshots.part;
  if (const auto step = snapshots.durable_step()) status.set_durable_step(*step);
  status.set_snapshots_left_out(snapshots.done().left_out());
  status.set_snapshots_failed(snapshots.done().failed());
  if (job_->steps.has_value()) {
    status.set_last_committed_step(job_->steps->last_committed().value());
    status.set_attempt(job_->steps->open().attempt.value());
  }
  if (job_->plan != nullptr) {
    status.set_parameters(static_cast<int64_t>(job_->inputs->layout.parameters.size()));
    int64_t matrices = 0;
    for (const scheduler::Unit& unit : job_->plan->units) {
      if (unit.kind == scheduler::UnitKind::kMatrix) ++matrices;
    }
    status.set_matrices(matrices);
  }
  for (const auto& [id, session] : sessions_) {
    v1::TrainerStatus& trainer = *status.add_trainers();
    trainer.set_rank(session.rank);
    trainer.set_pid(session.pid);
    trainer.set_incarnation(session.incarnation);
    trainer.set_client(session.client);
    const bool submitted =
        job_->steps.has_value() && job_->steps->submitted(scheduler::TrainerRank(session.rank));
    trainer.set_state(submitted                                      ? "submitted"
                      : session.state == Session::State::kAttached   ? "attached"
                      : session.state == Session::State::kRegistered ? "registered"
                                                                     : "open");
  }
}

log::Level Daemon::SetLogLevel(log::Level level) {
  // Lanes start under it: each has the new level from the start, or hears it.
  StateLock lock(mutex_);
  const log::Level previous = log::SetLevel(level);
  if (job_ == nullptr) return previous;
  v1::LaneCommand command;
  command.mutable_log_level()->set_level(log::Name(level));
  // Not ToLanes(): one that is not ready has begun with the old level.
  for (int32_t i = 0; i < options_.lanes; ++i) ToLane(scheduler::LaneIndex(i), command);
  return previous;
}

v1::GetStatusReply Daemon::Status() {
  StateLock lock(mutex_);
  v1::GetStatusReply reply;
  reply.set_version(kBuildVersion);
  reply.set_node(options_.node);
  reply.set_nodes(options_.nodes);
  reply.set_epoch(epoch_);
  reply.set_group_state(draining_             ? "draining"
                        : epoch_ == 0         ? "joining"
                        : options_.nodes == 1 ? "alone"
                                              : "formed");
  reply.set_device_type("cpu");
  reply.set_core_type(options_.core_type);
  reply.set_uptime_s(
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started_)
          .count());
  reply.set_socket(options_.socket);
  if (epoch_ == 0 && peers_ != nullptr) {
    GroupGaps gaps = peers_->Gaps();
    reply.mutable_missing_nodes()->Assign(gaps.missing.begin(), gaps.missing.end());
    if (options_.node != 0) reply.set_not_joined(std::move(gaps.not_joined));
  }
  for (const auto* disk : {&writes_, &reads_}) {
    if (*disk != nullptr && (*disk)->hangs()) {
      reply.set_snapshot_dir_hangs((*disk)->hang().Words());
      break;
    }
  }
  if (job_ == nullptr) return reply;
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const scheduler::LaneIndex index(static_cast<int32_t>(i));
    const scheduler::LaneSet::Lane& state = job_->lanes[index];
    v1::LaneStatus& lane = *reply.add_lanes();
    lane.set_lane(state.id.value());
    lane.set_pid(lane_host_.pid(index));
    lane.set_state(state.state == scheduler::LaneSet::State::kGone ? "gone"
                   : state.ready()                                 ? "ready"
                                                                   : "starting");
    lane.set_device(state.device);
    lane.set_restarts(std::max(0, state.starts - 1));
    lane.set_state_bytes(job_->programs[i].state_bytes);
    lane.set_staging_bytes(job_->programs[i].staging_bytes);
    lane.set_load_us(job_->plan->lane_load_us[state.id.value()]);
  }
  FillJobStatus(*reply.mutable_job());
  return reply;
}

absl::StatusOr<v1::GetPlanReply> Daemon::Plan() {
  StateLock lock(mutex_);
  if (job_ == nullptr || job_->plan == nullptr) {
    return Error(absl::StatusCode::kNotFound, "NO_PLAN", "no job with a plan runs here");
  }
  return Summarize(*job_->plan);
}

absl::StatusOr<v1::GetRoutingReply> Daemon::Routing() {
  StateLock lock(mutex_);
  if (job_ == nullptr || job_->plan == nullptr) {
    return Error(absl::StatusCode::kNotFound, "NO_PLAN", "no job with a plan runs here");
  }
  v1::GetRoutingReply reply;
  for (v1::RoutingRow& row : RoutingRows(job_->inputs->layout, *job_->plan)) {
    *reply.add_rows() = std::move(row);
  }
  return reply;
}

}  // namespace dmuond::server
