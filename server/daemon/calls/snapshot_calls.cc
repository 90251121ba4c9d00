#include "server/daemon/calls/snapshot_calls.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/registrations.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/storage/snapshot_store.h"

namespace dmuond::server {
namespace {

// Answers of LoadSnapshot for who repeats it. A client has one call on its way.
constexpr size_t kLoadsKept = 16;

}  // namespace

// ---- saving ----

absl::StatusOr<v1::SaveSnapshotReply> SnapshotCalls::SaveSnapshot(
    const v1::SaveSnapshotRequest& request, const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  absl::StatusOr<v1::SnapshotDone> done =
      core_.SaveNow(cancelled, [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(request.key());
        return found.ok() ? scheduler::NodeJob::CheckNotRolledBack(core_.SessionOf(**found))
                          : found.status();
      });
  if (!done.ok()) return done.status();
  v1::SaveSnapshotReply reply;
  reply.set_step(done->step());
  reply.set_path(PathOf(*done));
  return reply;
}

absl::StatusOr<v1::SaveJobReply> SnapshotCalls::SaveJob(const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<v1::SnapshotDone> done = core_.SaveNow(cancelled, [] { return absl::OkStatus(); });
  if (!done.ok()) return done.status();
  v1::SaveJobReply reply;
  reply.set_step(done->step());
  reply.set_path(PathOf(*done));
  return reply;
}

std::string SnapshotCalls::PathOf(const v1::SnapshotDone& done) const {
  return core_.options.storage->Describe(
      absl::StrCat(core_.job.name(), "/",
                   storage::DirectoryName(
                       {scheduler::Attempt(done.attempt()), scheduler::StepId(done.step())})));
}

// ---- loading ----

absl::StatusOr<storage::SnapshotId> SnapshotCalls::FindSnapshot(int64_t step, NotBegun not_begun,
                                                                const Core::Cancelled& cancelled) {
  const scheduler::NodeJob& job = core_.held_job();
  if (core_.options.storage == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                 "this daemon has no --snapshot_dir: there is nothing to load");
  }
  if (!job.exists() || job.plan() == nullptr || (!job.has_state() && !job.wire().has_restore())) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                 "no job runs here that could go back: a job that begins is resumed instead");
  }
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  // Nobody gives up what is in memory while nothing can be saved.
  if (core_.disks.writes() != nullptr && core_.disks.writes()->hangs()) {
    return core_.disks.Hangs(*core_.disks.writes());
  }
  const std::string name = job.name();
  const uint64_t number = job.number();
  const scheduler::Rollback before = job.back();
  const std::shared_ptr<const scheduler::PlanInputs> inputs = job.inputs();
  const auto groups = AnyOf(job.wire()).groups();
  const auto check = [&]() DMUOND_REQUIRES(core_.mutex) {
    const absl::Status still = job.CheckStill(number);
    return still.ok() && job.back() != before ? WentElsewhere() : still;
  };
  const auto ready = [&]() DMUOND_REQUIRES(core_.mutex) {
    const bool begins = job.begins_from_snapshot() && job.epoch() != 0;
    return !check().ok() || job.settled() || (begins && not_begun == NotBegun::kGoBack);
  };
  for (;;) {
    absl::StatusOr<bool> formed = core_.Wait(ready, Core::Deadline::max(), cancelled);
    if (!formed.ok()) return formed.status();
    if (absl::Status still = check(); !still.ok()) return still;
    // What is read is of no use in a later one, in which the group may need the disk.
    const uint32_t epoch = job.epoch();
    auto way = std::make_shared<absl::StatusOr<storage::SnapshotId>>(storage::SnapshotId{});
    absl::Status read = core_.Read(
        [=](storage::Storage& storage, const Core::Cancelled& unwanted) {
          *way = FindWayBack(storage, name, step, *inputs, groups, unwanted);
        },
        [&]() DMUOND_REQUIRES(core_.mutex) {
          return cancelled() || job.epoch() != epoch || !check().ok();
        });
    if (absl::Status still = check(); !still.ok()) return still;
    if (job.epoch() != epoch) continue;
    if (!read.ok()) return read;
    return *way;
  }
}

absl::Status SnapshotCalls::WentElsewhere() const {
  const scheduler::Rollback& back = core_.job.back();
  return Error(absl::StatusCode::kFailedPrecondition, "ROLLED_BACK",
               Say("the job has gone back to step ", Named("to_step", back.to_step), " in epoch ",
                   Named("epoch", back.epoch), " meanwhile"));
}

scheduler::Rollback SnapshotCalls::TellGoBack(const storage::SnapshotId& to,
                                              const std::string& why) {
  const scheduler::Rollback told{to.step.value(), core_.job.epoch()};
  core_.Do(core_.job.AskToGoBack(to, why));
  return told;
}

absl::StatusOr<int64_t> SnapshotCalls::WaitUntilBack(const scheduler::Rollback& told,
                                                     const Core::Cancelled& cancelled) {
  const scheduler::NodeJob& job = core_.held_job();
  const uint64_t number = job.number();
  const auto went = [&]() DMUOND_REQUIRES(core_.mutex) { return job.back().epoch > told.epoch; };
  absl::StatusOr<bool> back = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        return !job.CheckStill(number).ok() || went() ||
               ((job.settled() || job.begins_from_snapshot()) && job.epoch() > told.epoch);
      },
      Core::Deadline::max(), cancelled);
  if (!back.ok()) return back.status();
  if (absl::Status still = job.CheckStill(number); !still.ok()) return still;
  // A group that goes on in a later epoch without it was broken when it was told.
  if (!went()) {
    return Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                 "the group broke and did not hear of it: ask again");
  }
  if (job.back().to_step != told.to_step) return WentElsewhere();
  return told.to_step;
}

absl::StatusOr<int64_t> SnapshotCalls::LoadOnce(const v1::LoadSnapshotRequest& request,
                                                const Core::Cancelled& cancelled) {
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  LoadCall* call = &(*found)->loads[request.call()];
  const std::string why = absl::StrCat("rank ", (*found)->rank, " asked for it");
  call->running = true;
  log::Info("a trainer asks for a snapshot", {{"rank", (*found)->rank}, {"step", request.step()}});
  absl::StatusOr<storage::SnapshotId> way = storage::SnapshotId{};
  if (!call->told.has_value()) way = FindSnapshot(request.step(), NotBegun::kWait, cancelled);
  // Only the session's own end takes the entry away while it runs.
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  call = &(*found)->loads[request.call()];
  absl::StatusOr<int64_t> answer = way.ok() ? absl::StatusOr<int64_t>(0) : way.status();
  if (answer.ok()) {
    const bool first = !call->told.has_value();
    if (first) call->told = {way->step.value(), core_.job.epoch()};
    const scheduler::Rollback told = *call->told;
    if (first) TellGoBack(*way, why);
    answer = WaitUntilBack(told, cancelled);
    if (found = core_.Find(request.key()); !found.ok()) return found.status();
    call = &(*found)->loads[request.call()];
  }
  call->running = false;
  // Whoever repeats a call whose caller has gone goes on with it.
  if (!absl::IsCancelled(answer.status())) call->answer = answer;
  core_.mutex.Changed();
  return answer;
}

absl::StatusOr<v1::LoadSnapshotReply> SnapshotCalls::LoadSnapshot(
    const v1::LoadSnapshotRequest& request, const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  std::map<uint64_t, LoadCall>& loads = (*found)->loads;
  if (!loads.contains(request.call())) {
    const uint64_t newest = loads.empty() ? 0 : loads.rbegin()->first;
    if (request.call() <= newest) {
      return Error(absl::StatusCode::kFailedPrecondition, "CALL_OUT_OF_ORDER",
                   Say("LoadSnapshot ", Named("call", request.call()), " of rank ",
                       Named("rank", (*found)->rank), " comes after ", Named("newest", newest)));
    }
    if (absl::Status back = scheduler::NodeJob::CheckNotRolledBack(core_.SessionOf(**found));
        !back.ok())
      return back;
    if (loads.size() >= kLoadsKept && !loads.begin()->second.running) loads.erase(loads.begin());
    loads[request.call()];
  }
  absl::StatusOr<bool> turn = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(request.key());
        return !found.ok() || !(*found)->loads[request.call()].running;
      },
      Core::Deadline::max(), cancelled);
  if (!turn.ok()) return turn.status();
  if (!found.ok()) return found.status();
  const std::optional<absl::StatusOr<int64_t>> known = (*found)->loads[request.call()].answer;
  absl::StatusOr<int64_t> step = known.has_value() ? *known : LoadOnce(request, cancelled);
  if (!step.ok()) return step.status();
  v1::LoadSnapshotReply reply;
  reply.set_step(*step);
  return reply;
}

absl::StatusOr<v1::LoadJobReply> SnapshotCalls::LoadJob(const v1::LoadJobRequest& request,
                                                        const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<storage::SnapshotId> way =
      FindSnapshot(request.step(), NotBegun::kGoBack, cancelled);
  if (!way.ok()) return way.status();
  absl::StatusOr<int64_t> step =
      WaitUntilBack(TellGoBack(*way, "dmuonctl asked for it"), cancelled);
  if (!step.ok()) return step.status();
  v1::LoadJobReply reply;
  reply.set_step(*step);
  return reply;
}

}  // namespace dmuond::server
