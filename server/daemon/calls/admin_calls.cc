#include "server/daemon/calls/admin_calls.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/daemon/calls/awaited.h"
#include "server/plan_summary.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;

// Time for the threads of disks and memory to see that nobody wants what they do any more.
constexpr std::chrono::seconds kThreadsEndWithin{2};

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

}  // namespace

// ---- looking ----

void AdminCalls::FillJobStatus(v1::JobStatus& status) {
  const NodeJob& job = core_.held_job();
  status.set_name(job.name());
  status.set_incarnation(job.wire().job_incarnation());
  status.set_world_size(job.world_size());
  FillAwaited(core_, *status.mutable_awaited());
  status.set_state(!job.failure().ok()         ? "failed"
                   : status.awaited_size() > 0 ? "waiting"
                   : job.steps() != nullptr    ? "running"
                   : job.planned()             ? "preparing"
                                               : "registering");
  const NodeJob::Figures& figures = job.figures();
  status.set_skipped_steps(figures.skipped_steps);
  status.set_aborted_attempts(figures.aborted_attempts);
  status.set_gradient_norm(figures.gradient_norm);
  *status.mutable_timing() = figures.timing;
  const scheduler::SnapshotPart& snapshots = job.snapshot();
  if (const auto step = snapshots.durable_step()) status.set_durable_step(*step);
  status.set_snapshots_left_out(snapshots.done().left_out());
  status.set_snapshots_failed(snapshots.done().failed());
  if (job.steps() != nullptr) {
    status.set_last_committed_step(job.steps()->last_committed().value());
    status.set_attempt(job.steps()->open().attempt.value());
  }
  if (job.plan() != nullptr) {
    status.set_parameters(static_cast<int64_t>(job.inputs()->layout.parameters.size()));
    status.set_matrices(std::count_if(
        job.plan()->units.begin(), job.plan()->units.end(),
        [](const scheduler::Unit& unit) { return unit.kind == scheduler::UnitKind::kMatrix; }));
  }
  for (const auto& [id, session] : job.ranks().sessions()) {
    v1::TrainerStatus& trainer = *status.add_trainers();
    trainer.set_rank(session.rank);
    trainer.set_pid(session.pid);
    trainer.set_incarnation(session.incarnation);
    trainer.set_client(session.client);
    trainer.set_state(NameOf(session, job));
  }
}

v1::GetStatusReply AdminCalls::Status() {
  StateLock lock(core_.mutex);
  const NodeJob& job = core_.held_job();
  const DaemonOptions& options = core_.options;
  v1::GetStatusReply reply;
  reply.set_version(kBuildVersion);
  reply.set_node(options.node);
  reply.set_nodes(options.nodes);
  reply.set_epoch(job.epoch());
  reply.set_group_state(job.leaves()         ? "draining"
                        : job.epoch() == 0   ? "joining"
                        : options.nodes == 1 ? "alone"
                                             : "formed");
  reply.set_device_type(core_.device.type());
  reply.set_core_type(options.core_type);
  reply.set_uptime_s(std::chrono::duration_cast<std::chrono::seconds>(
                         std::chrono::steady_clock::now() - core_.started)
                         .count());
  reply.set_socket(options.socket);
  if (job.epoch() == 0 && core_.peers != nullptr) {
    GroupGaps gaps = core_.peers->Gaps();
    reply.mutable_missing_nodes()->Assign(gaps.missing.begin(), gaps.missing.end());
    if (options.node != 0) reply.set_not_joined(std::move(gaps.not_joined));
  }
  for (const Disk* disk : {core_.disks.writes(), core_.disks.reads()}) {
    if (disk != nullptr && disk->hangs()) {
      reply.set_snapshot_dir_hangs(disk->hang().Words());
      break;
    }
  }
  if (!job.exists()) return reply;
  for (size_t i = 0; i < job.lanes().size(); ++i) {
    const scheduler::LaneIndex index(static_cast<int32_t>(i));
    const scheduler::LaneSet::Lane& state = job.lanes()[index];
    v1::LaneStatus& lane = *reply.add_lanes();
    lane.set_lane(state.id.value());
    lane.set_pid(core_.lanes.host().pid(index));
    lane.set_state(NameOf(state));
    lane.set_device(state.device);
    lane.set_restarts(std::max(0, state.starts - 1));
    lane.set_state_bytes(core_.memory.programs()[i].state_bytes());
    lane.set_staging_bytes(core_.memory.programs()[i].staging_bytes());
    lane.set_load_us(job.plan()->lane_load_us[state.id.value()]);
  }
  FillJobStatus(*reply.mutable_job());
  return reply;
}

absl::StatusOr<v1::GetPlanReply> AdminCalls::Plan() {
  StateLock lock(core_.mutex);
  if (!core_.job.exists() || core_.job.plan() == nullptr) {
    return Error(absl::StatusCode::kNotFound, "NO_PLAN", "no job with a plan runs here");
  }
  return Summarize(*core_.job.plan());
}

absl::StatusOr<v1::GetRoutingReply> AdminCalls::Routing() {
  StateLock lock(core_.mutex);
  if (!core_.job.exists() || core_.job.plan() == nullptr) {
    return Error(absl::StatusCode::kNotFound, "NO_PLAN", "no job with a plan runs here");
  }
  v1::GetRoutingReply reply;
  for (v1::RoutingRow& row : RoutingRows(core_.job.inputs()->layout, *core_.job.plan())) {
    *reply.add_rows() = std::move(row);
  }
  return reply;
}

// ---- changing ----

log::Level AdminCalls::SetLogLevel(log::Level level) {
  // Lanes start under it: each has the new level from the start, or hears it.
  StateLock lock(core_.mutex);
  const log::Level previous = log::SetLevel(level);
  v1::LaneCommand command;
  command.mutable_log_level()->set_level(log::Name(level));
  core_.lanes.Broadcast(command);
  return previous;
}

absl::StatusOr<v1::EndJobReply> AdminCalls::EndJobNamed(const v1::EndJobRequest& request,
                                                        const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  NodeJob& job = core_.held_job();
  if (!job.exists() || job.name() != request.name()) {
    return Error(absl::StatusCode::kNotFound, "NO_JOB",
                 Say("no job '", Named("job", request.name()), "' is here: ",
                     Named("holder", !job.exists() ? "there is none at all"
                                                   : absl::StrCat("it is '", job.name(), "'"))));
  }
  const uint64_t number = job.number();
  const auto gone = [&]() DMUOND_REQUIRES(core_.mutex) { return job.number() != number; };
  if (request.save()) {
    absl::StatusOr<v1::SnapshotDone> saved =
        core_.SaveNow(cancelled, [] { return absl::OkStatus(); });
    if (!saved.ok()) return saved.status();
  }
  v1::EndJobReply reply;
  const Core::Deadline deadline =
      std::chrono::steady_clock::now() + core_.options.coordinator.register_timeout;
  while (!gone()) {
    reply.set_last_committed_step(job.LastCommitted());
    if (const auto step = job.snapshot().durable_step()) reply.set_durable_step(*step);
    const uint32_t epoch = job.epoch();
    constexpr char kWhy[] = "`dmuonctl job end` has ended it";
    if (job.phase() == NodeJob::Phase::kFailed) {  // the coordinator knows it no longer
      core_.Do(job.EndHere(kWhy, scheduler::JobWasEnded(job.name(), job.LastCommitted(), kWhy)));
      break;
    }
    core_.Do(job.AskForEnd(kWhy));
    absl::StatusOr<bool> ended =
        core_.Wait([&]() DMUOND_REQUIRES(core_.mutex) { return gone() || job.epoch() != epoch; },
                   deadline, cancelled);
    if (!ended.ok()) return ended.status();
    if (!*ended) {
      return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                   Say("job '", Named("job", request.name()),
                       "' has not ended in time: the group is broken; `dmuonctl status` on every "
                       "node says who is missing"));
    }
  }
  return reply;
}

// ---- leaving ----

absl::StatusOr<v1::DrainReply> AdminCalls::PrepareToLeave(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  StateLock lock(core_.mutex);
  NodeJob& job = core_.held_job();
  const std::string name = job.exists() ? job.name() : "";
  // Half of the time is for the attempt in flight: the rest is to save.
  core_.Do(core_.departure.Begin(job, deadline, timeout / 2, core_.options.storage != nullptr));
  const bool halts = core_.departure.state() == scheduler::Departure::State::kHalting;
  core_.mutex.Changed();
  ++core_.waiting_for_published;
  for (;;) {
    core_.Do(core_.departure.Advance(std::chrono::steady_clock::now(), job));
    if (core_.departure.state() == scheduler::Departure::State::kPrepared) break;
    (void)core_.Wait([&]() DMUOND_REQUIRES(core_.mutex) { return core_.departure.HasNews(job); },
                     deadline, [] { return false; });
  }
  --core_.waiting_for_published;
  absl::Status saved = core_.departure.saved();
  const int64_t last = job.LastCommitted();
  const int64_t durable = job.exists() ? job.snapshot().durable_step().value_or(0) : 0;
  if (halts && saved.ok() && core_.options.storage == nullptr) {
    log::Warn("the job's state goes with this daemon: there is no --snapshot_dir",
              {{"job", name}, {"last_step", last}});
  }
  if (!saved.ok()) {
    log::Error("the last steps are not in a snapshot",
               {{"job", name}, {"after_step", durable}, {"last_step", last}, {"what", saved}});
    saved = Error(saved.code(), ReasonOf(saved),
                  Say("steps ", Named("first_lost", durable + 1), " to ", Named("last_lost", last),
                      " of job '", Named("job", name),
                      "' are in no snapshot: ", scheduler::MessageOf(saved)));
  }
  v1::DrainReply reply;
  reply.set_last_committed_step(last);
  if (job.exists()) {
    if (const auto step = job.snapshot().durable_step()) reply.set_durable_step(*step);
  }
  prepared_ = saved.ok() ? absl::StatusOr<v1::DrainReply>(std::move(reply)) : saved;
  core_.mutex.Changed();
  return *prepared_;
}

absl::StatusOr<v1::DrainReply> AdminCalls::WaitUntilPrepared(const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  const absl::StatusOr<bool> prepared =
      core_.Wait([this]() DMUOND_REQUIRES(core_.mutex) { return prepared_.has_value(); },
                 Core::Deadline::max(), cancelled);
  if (!prepared.ok()) return prepared.status();
  return *prepared_;
}

bool AdminCalls::Leave() {
  std::array<std::unique_ptr<Disk>, 2> disks;
  std::unique_ptr<WorkThread> worker;
  {
    StateLock lock(core_.mutex);
    core_.Do(core_.job.Leave());
    disks = core_.disks.TakeDisks();
    worker = core_.memory.TakeWorker();
    core_.mutex.Changed();
  }
  core_.Tick();
  // Their last work takes the lock. A thread that hangs in the directory cannot be ended, and one
  // that is joined would hold up the process for as long: it stays, with all that it uses, and the
  // process ends with it. (exit_group() kills a thread that waits for a file server, as SIGKILL
  // does.)
  const auto deadline = std::chrono::steady_clock::now() + kThreadsEndWithin;
  bool ended = worker == nullptr || worker->Stop(deadline);
  // It makes memory that nobody wants any more, gigabytes of it perhaps.
  if (!ended) (void)worker.release();
  for (std::unique_ptr<Disk>& disk : disks) {
    if (disk == nullptr || disk->Stop(deadline)) continue;
    log::Error("leaving while the snapshot directory hangs: what is being written there is lost",
               {{"what", disk->Current().value_or("between two operations")}});
    (void)disk.release();
    ended = false;
  }
  return ended;
}

}  // namespace dmuond::server
