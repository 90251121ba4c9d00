#include "server/daemon/calls/admin_calls.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/daemon/node_view.h"
#include "server/plan_summary.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;

// A daemon that leaves a broken group looks so often whether the state is in a snapshot.
constexpr std::chrono::milliseconds kLooksEvery{500};

// Says so of a picture, and how old it is.
absl::Status NoPlanIn(const Core::Seen& seen) {
  if (seen.age.count() == 0) return NoPlan();
  return Error(absl::StatusCode::kNotFound, "NO_PLAN",
               Say("no job with a plan ran here ", Named("picture_age_ms", seen.age.count()),
                   " ms ago, and the daemon's core has not turned since"));
}

}  // namespace

absl::Status NoPlan() {
  return Error(absl::StatusCode::kNotFound, "NO_PLAN", "no job with a plan runs here");
}

absl::Status NoJob(const std::string& name, std::vector<std::string> holders) {
  holders.erase(std::remove(holders.begin(), holders.end(), ""), holders.end());
  return Error(
      absl::StatusCode::kNotFound, "NO_JOB",
      Say("no job '", Named("job", name), "' is here: ",
          Named("holder", holders.empty()
                              ? "there is none at all"
                              : absl::StrCat("it is '", absl::StrJoin(holders, "', '"), "'"))));
}

// ---- looking ----

v1::GetStatusReply AdminCalls::StatusIn(const Core::Seen& seen) const {
  v1::GetStatusReply reply = seen.view->status;
  reply.set_picture_age_ms(seen.age.count());
  reply.set_uptime_s(std::chrono::duration_cast<std::chrono::seconds>(
                         std::chrono::steady_clock::now() - core_.started)
                         .count());
  const auto& [inputs, plan] = seen.view->planned;
  if (plan != nullptr) {
    v1::JobStatus& job = *reply.mutable_job();
    job.set_parameters(static_cast<int64_t>(inputs->layout.parameters.size()));
    job.set_matrices(std::count_if(
        plan->units.begin(), plan->units.end(),
        [](const scheduler::Unit& unit) { return unit.kind == scheduler::UnitKind::kMatrix; }));
  }
  return reply;
}

absl::StatusOr<v1::GetPlanReply> AdminCalls::Plan() {
  const Core::Seen seen = core_.Look();
  if (seen.view->planned.plan == nullptr) return NoPlanIn(seen);
  const scheduler::PlannedJob& planned = seen.view->planned;
  v1::GetPlanReply reply = Summarize(*planned.plan);
  if (absl::Status added = AddNetwork(*planned.inputs, *planned.plan, reply); !added.ok()) {
    return added;
  }
  reply.set_picture_age_ms(seen.age.count());
  return reply;
}

absl::StatusOr<v1::GetRoutingReply> AdminCalls::Routing() {
  const Core::Seen seen = core_.Look();
  const auto& [inputs, plan] = seen.view->planned;
  if (plan == nullptr) return NoPlanIn(seen);
  v1::GetRoutingReply reply;
  reply.set_picture_age_ms(seen.age.count());
  for (v1::RoutingRow& row : RoutingRows(inputs->layout, *plan)) *reply.add_rows() = std::move(row);
  return reply;
}

// ---- changing ----

void AdminCalls::SetLogLevel(log::Level level) {
  // Lanes start under it: each has the new level from the start, or hears it.
  StateLock lock(core_.mutex);
  log::SetLevel(level);
  v1::LaneCommand command;
  command.mutable_log_level()->set_level(log::Name(level));
  core_.lanes.Broadcast(command);
}

absl::StatusOr<v1::EndJobReply> AdminCalls::EndJobNamed(const v1::EndJobRequest& request,
                                                        const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  NodeJob& job = core_.held_job();
  if (!job.exists() || job.name() != request.name()) {
    return NoJob(request.name(), {job.exists() ? job.name() : ""});
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
    absl::StatusOr<bool> ended = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          return gone() || job.epoch() != epoch || job.phase() == NodeJob::Phase::kFailed;
        },
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

absl::StatusOr<v1::AcceptLanesReply> AdminCalls::AcceptLanes(const std::string& name) {
  StateLock lock(core_.mutex);
  NodeJob& job = core_.held_job();
  if (!job.exists() || job.name() != name) return NoJob(name, {job.exists() ? job.name() : ""});
  scheduler::node::Actions actions;
  absl::StatusOr<std::string> what = job.AcceptLanes(std::chrono::steady_clock::now(), actions);
  if (!what.ok()) return what.status();
  core_.Do(std::move(actions));
  v1::AcceptLanesReply reply;
  reply.set_node(core_.options.node);
  reply.set_what(*std::move(what));
  return reply;
}

// ---- leaving ----

absl::Status AdminCalls::CheckSnapshots() {
  StateLock lock(core_.mutex);
  const NodeJob& job = core_.held_job();
  if (!job.exists() || !job.failure().ok() || job.leaves()) return absl::OkStatus();
  const std::string why = job.snapshot().failure();
  if (why.empty()) return absl::OkStatus();
  const auto durable = job.snapshot().durable_step();
  const std::string since = durable.has_value() ? absl::StrCat("since step ", *durable, " ") : "";
  return Error(absl::StatusCode::kFailedPrecondition, "SNAPSHOTS_FAIL",
               Say("the daemon stays: the newest snapshot of job '", Named("job", job.name()),
                   "' failed, and what it has computed ", since,
                   "would be lost if the next one did, too. Mend that and save first (dmuonctl "
                   "snapshot save), or give it up (--force). The cause: ",
                   Named("cause", why)));
}

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
    const bool looks = core_.departure.LooksForSnapshot(job);
    if (looks) LookForSnapshot(deadline);
    (void)core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          return core_.departure.HasNews(job) || core_.departure.LooksForSnapshot(job) != looks;
        },
        looks ? std::min(deadline, std::chrono::steady_clock::now() + kLooksEvery) : deadline,
        [] { return false; });
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
  if (job.exists()) {
    v1::DrainReply::Job& left = *reply.add_jobs();
    left.set_name(name);
    left.set_last_committed_step(last);
    if (const auto step = job.snapshot().durable_step()) left.set_durable_step(*step);
  }
  prepared_ = saved.ok() ? absl::StatusOr<v1::DrainReply>(std::move(reply)) : saved;
  core_.mutex.Changed();
  return *prepared_;
}

void AdminCalls::LookForSnapshot(Core::Deadline deadline) {
  auto newest = std::make_shared<absl::StatusOr<std::optional<storage::SnapshotId>>>(std::nullopt);
  // One that hangs is in the log, and in what is said of steps that are not saved.
  absl::Status read =
      core_.Read([newest, name = core_.job.name()](
                     storage::Storage& storage,
                     const Core::Cancelled& /*unwanted*/) { *newest = NewestOf(storage, name); },
                 [deadline] { return std::chrono::steady_clock::now() >= deadline; });
  if (!read.ok() || !newest->ok() || !(*newest)->has_value()) return;
  core_.job.OnSnapshotSeen(***newest);
  core_.WriteRecord();
}

absl::StatusOr<v1::DrainReply> AdminCalls::WaitUntilPrepared(const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  const absl::StatusOr<bool> prepared =
      core_.Wait([this]() DMUOND_REQUIRES(core_.mutex) { return prepared_.has_value(); },
                 Core::Deadline::max(), cancelled);
  if (!prepared.ok()) return prepared.status();
  return *prepared_;
}

bool AdminCalls::Leave(Core::Deadline deadline) {
  std::array<std::unique_ptr<Disk>, 3> disks;
  std::unique_ptr<WorkThread> worker;
  {
    StateLock lock(core_.mutex);
    core_.Do(core_.job.Leave());
    disks = core_.disks.TakeDisks();
    worker = core_.memory.TakeWorker();
    core_.mutex.Changed();
  }
  // Their last work takes the lock. A thread that hangs in the directory cannot be ended, and one
  // that is joined would hold up the process for as long: it stays, with all that it uses, and the
  // process ends with it. (exit_group() kills a thread that waits for a file server, as SIGKILL
  // does.)
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
