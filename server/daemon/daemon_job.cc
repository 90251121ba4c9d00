// The job's plan on this node: memory, lanes, and their end; and what is told about them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/fault_point.h"
#include "server/convert.h"
#include "server/daemon/daemon.h"
#include "server/daemon/errors.h"
#include "server/daemon/log.h"
#include "server/daemon/refusals.h"
#include "server/lane/publish_board.h"
#include "server/lane/state_table.h"
#include "server/plan_summary.h"
#include "server/version.h"

namespace dmuond::server {
namespace {}  // namespace

void Daemon::HandlePlan(const v1::PlanInputs& wire) {
  GiveWayTo(wire);
  if (job_ == nullptr) {
    // None of its trainers is of this node, whose lanes work for it all the same.
    job_ = std::make_unique<NodeJob>();
    job_->name = wire.job();
    job_->world_size = wire.registrations_size();
    job_->number = ++generation_;
  }
  if (job_->plan != nullptr) {
    if (job_->wire.job_incarnation() == wire.job_incarnation()) return;  // told before
    return TellPlanFailed(Error(
        absl::StatusCode::kUnavailable, "NODE_NOT_READY",
        Say("job '", Named("job", wire.job()), "' cannot begin before job '",
            Named("holder", job_->name), "' has ended here: end the trainers that it still has")));
  }
  wire::FaultPoint("daemon.plan");
  absl::Status prepared = Prepare(wire);
  mutex_.Changed();
  if (!prepared.ok()) return TellPlanFailed(prepared);
  // Sessions that the plan does not know as they are: faster than the news of it, or of another
  // coordinator's mind.
  for (auto& [id, session] : sessions_) {
    if (session.state == Session::State::kOpen || !session.denied.ok()) continue;
    session.denied = CheckReplacement(session, session.registration);
  }
}

// A job that the group has never planned is nobody's but its trainers'.
void Daemon::GiveWayTo(const v1::PlanInputs& plan) {
  if (job_ == nullptr || job_->plan != nullptr) return;
  if (job_->name != plan.job()) {
    return EndJob(absl::StrCat("the group runs job '", plan.job(), "'"),
                  OtherJob(plan.job(), job_->name));
  }
  if (job_->world_size != plan.registrations_size()) {
    return EndJob(absl::StrCat("the group runs it with world_size ", plan.registrations_size()),
                  Error(absl::StatusCode::kFailedPrecondition, "WORLD_DIFFERS",
                        Say("the group runs job '", Named("job", job_->name), "' with world_size ",
                            Named("world_size", plan.registrations_size()), ", trainers of node ",
                            Named("node", options_.node), " say ",
                            Named("given_world_size", job_->world_size),
                            ": all ranks of a job have one WORLD_SIZE")));
  }
  // It is lost, and keeps the group from nothing but its own sessions, which have yet to hear of
  // that. They begin anew.
  if (!job_->failed.ok()) EndJob("its group broke while it registered");
}

absl::Status Daemon::Prepare(const v1::PlanInputs& wire) {
  absl::StatusOr<scheduler::PlanInputs> inputs = FromProto(wire);
  if (!inputs.ok()) return inputs.status();
  if (wire.registrations_size() != job_->world_size || wire.nodes() != options_.nodes ||
      wire.lanes_per_node() != options_.lanes) {
    return Error(absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
                 Say("the plan of job '", Named("job", job_->name), "' is for ",
                     Named("given_world_size", wire.registrations_size()), " ranks, ",
                     Named("given_nodes", wire.nodes()), " nodes and ",
                     Named("given_lanes", wire.lanes_per_node()), " lanes on each; here it is ",
                     Named("world_size", job_->world_size), ", ", Named("nodes", options_.nodes),
                     " and ", Named("lanes", options_.lanes)));
  }
  job_->inputs = std::make_shared<scheduler::PlanInputs>(*std::move(inputs));
  if (job_->snapshots.resume.has_value()) {
    absl::Status same = CheckRestorable(job_->snapshots.resume->manifest, *job_->inputs,
                                        wire.registrations(0).groups());
    if (!same.ok()) return same;
  }
  absl::StatusOr<scheduler::Plan> plan = scheduler::MakePlan(*job_->inputs);
  if (!plan.ok()) return plan.status();
  const std::optional<scheduler::CostTable>& costs = options_.coordinator.costs;
  if (costs.has_value() && wire.restore_step() > 0 &&
      ToProto(*costs).SerializeAsString() != wire.costs().SerializeAsString()) {
    log::Info("the job goes on with the costs that it was planned with: --replan takes others",
              {{"job", job_->name}, {"device", wire.costs().device()}});
  }
  job_->wire = wire;
  job_->launch = wire.launch();
  job_->memory = std::make_unique<JobMemory>(
      memory_, JobMemory::Options{.job = job_->name, .bytes_max = options_.job_memory_bytes});
  absl::Status board =
      job_->memory->AllocateBoard(lane::PublishBoardBytes(plan->buckets, options_.lanes));
  if (!board.ok()) return board;
  job_->lanes.resize(options_.lanes);
  for (int32_t i = 0; i < options_.lanes; ++i) {
    absl::StatusOr<scheduler::LaneProgram> program = scheduler::MakeLaneProgram(
        *job_->inputs, *plan, scheduler::LaneId((options_.node * options_.lanes) + i));
    if (!program.ok()) return program.status();
    job_->lanes[i].program = *std::move(program);
    const scheduler::LaneProgram& mine = job_->lanes[i].program;
    // A lane may own nothing: its memory is a byte then, not none.
    absl::Status allocated = job_->memory->AllocateLane(
        scheduler::LaneIndex(i), std::max<int64_t>(1, mine.state_bytes),
        std::max<int64_t>(1, mine.staging_bytes), lane::StateTableBytes(plan->units.size()));
    if (!allocated.ok()) return allocated;
    if (options_.storage != nullptr) {
      absl::Status copy = job_->memory->AllocateHostCopy(
          scheduler::LaneIndex(i), storage::PlaceHostCopy(*plan, mine).bytes());
      if (!copy.ok()) return copy;
    }
    absl::Status started = StartLane(i, *plan);
    if (!started.ok()) return started;
  }
  job_->plan = std::make_shared<scheduler::Plan>(*std::move(plan));
  if (options_.storage != nullptr) PlaceHostCopies();
  const scheduler::PlanQuality& quality = job_->plan->quality;
  log::Info("plan made", {{"job", job_->name},
                          {"epoch", absl::StrCat(epoch_)},
                          {"units", absl::StrCat(job_->plan->units.size())},
                          {"buckets", absl::StrCat(job_->plan->buckets)},
                          {"makespan_us", absl::StrCat(quality.makespan_us)},
                          {"gap", absl::StrCat(quality.gap)},
                          {"imbalance", absl::StrCat(quality.imbalance)}});
  return absl::OkStatus();
}

absl::Status Daemon::StartLane(int32_t lane_index, const scheduler::Plan& plan) {
  const scheduler::LaneIndex index(lane_index);
  LaneProcess::Options options;
  options.binary = options_.lane_binary;
  options.lane_index = lane_index;
  options.lock = options_.lock;
  options.device = absl::StrCat("cpu:", options_.threads_per_lane);
  LaneProcess::Callbacks callbacks;
  callbacks.on_report = [this, generation = generation_, lane_index](
                            const v1::LaneReport& report,
                            const std::vector<wire::UniqueFd>& /*fds*/) {
    OnLaneReport(generation, lane_index, report);
  };
  callbacks.on_gone = [this, generation = generation_, lane_index](const std::string& last_words) {
    OnLaneGone(generation, lane_index, last_words);
  };
  absl::StatusOr<std::unique_ptr<LaneProcess>> process =
      LaneProcess::Start(std::move(options), std::move(callbacks));
  if (!process.ok()) return process.status();

  const scheduler::LaneProgram& program = job_->lanes[lane_index].program;
  v1::LaneCommand command;
  v1::LaneCommand::Configure& configure = *command.mutable_configure();
  configure.set_lane(program.lane.value());
  configure.set_epoch(epoch_);
  *configure.mutable_plan() = job_->wire;
  configure.set_plan_digest(plan.digest);
  configure.set_state_bytes(std::max<int64_t>(1, program.state_bytes));
  configure.set_staging_bytes(std::max<int64_t>(1, program.staging_bytes));
  configure.set_state_table_bytes(lane::StateTableBytes(plan.units.size()));
  configure.set_publish_board_bytes(lane::PublishBoardBytes(plan.buckets, options_.lanes));
  configure.set_threads(options_.threads_per_lane);
  configure.set_bind_address(options_.rail_address);
  std::vector<int> fds = {job_->memory->state_fd(index), job_->memory->staging_fd(index),
                          job_->memory->table_fd(index), job_->memory->board_fd()};
  if (const auto copy = job_->memory->host_copy(index); copy != nullptr) {
    configure.set_host_copy_bytes(static_cast<int64_t>(copy->size()));
    configure.set_snapshot_staging_bytes(options_.snapshot_staging_bytes);
    fds.push_back(job_->memory->host_copy_fd(index));
  }
  absl::Status sent = (*process)->Send(command, fds);
  job_->lanes[lane_index].process = *std::move(process);
  job_->lanes[lane_index].watch.emplace(
      LaneWatchOptions{options_.lane_timeout, options_.coordinator.step.work_timeout()});
  job_->lane_epoch = epoch_;
  return sent;
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
  for (LaneState& lane : job_->lanes) {
    if (lane.process != nullptr) dead_lanes_.push_back(std::move(lane.process));
  }
  ++generation_;
  job_->lanes.clear();
  job_->snapshots.Abandon("the layout was refused");
  job_->snapshots.StopRestore();
  job_->snapshots.restored = false;
  job_->snapshots.loading = 0;
  job_->snapshots.host.reset();
  job_->memory.reset();
  job_->plan.reset();
  job_->inputs.reset();
  job_->wire.Clear();
  mutex_.Changed();
}

void Daemon::EndJob(const std::string& why, const absl::Status& told) {
  log::Info("job ended",
            {{"job", job_->name}, {"epoch", epoch_}, {"step", LastCommitted()}, {"what", why}});
  const int64_t durable = job_->snapshots.durable_step.value_or(0);
  const bool meant = ReasonOf(told) == kJobEnded;
  if (!meant && (job_->ending || !job_->vacancies.empty()) && job_->has_state &&
      LastCommitted() > durable) {
    log::Error("state lost: it was in memory alone, and a rank did not come back",
               {{"job", job_->name},
                {"epoch", epoch_},
                {"after_step", absl::StrCat(durable)},
                {"last_step", absl::StrCat(LastCommitted())}});
  }
  for (LaneState& lane : job_->lanes) {
    if (lane.process != nullptr) dead_lanes_.push_back(std::move(lane.process));
  }
  ++generation_;
  if (job_->memory != nullptr) job_->memory->PoisonAll();
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
                   : job_->plan != nullptr     ? "preparing"
                                               : "registering");
  status.set_skipped_steps(job_->skipped_steps);
  status.set_aborted_attempts(job_->aborted_attempts);
  status.set_gradient_norm(job_->gradient_norm);
  *status.mutable_timing() = job_->timing;
  const JobSnapshots& snapshots = job_->snapshots;
  if (snapshots.durable_step.has_value()) status.set_durable_step(*snapshots.durable_step);
  status.set_snapshots_left_out(snapshots.done.left_out());
  status.set_snapshots_failed(snapshots.done.failed());
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
  for (LaneState& lane : job_->lanes) {
    // Not ToLanes(): one that is not ready has begun with the old level.
    if (lane.process != nullptr) lane.process->Send(command).IgnoreError();
  }
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
    const LaneState& state = job_->lanes[i];
    v1::LaneStatus& lane = *reply.add_lanes();
    lane.set_lane(state.program.lane.value());
    lane.set_pid(state.process == nullptr ? 0 : state.process->pid());
    lane.set_state(state.gone ? "gone" : state.ready ? "ready" : "starting");
    lane.set_device(state.device);
    lane.set_restarts(state.restarts);
    lane.set_state_bytes(state.program.state_bytes);
    lane.set_staging_bytes(state.program.staging_bytes);
    if (job_->plan != nullptr) {
      lane.set_load_us(job_->plan->lane_load_us[state.program.lane.value()]);
    }
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
