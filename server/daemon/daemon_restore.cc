// A job that goes on from a snapshot: what there is, and how it comes into the lanes.
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/registrations.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {

absl::StatusOr<std::optional<Restorable>> Daemon::FindResume(const std::string& job,
                                                             const Cancelled& cancelled) {
  if (options_.storage == nullptr) return std::nullopt;
  auto newest = std::make_shared<absl::StatusOr<std::optional<Restorable>>>(std::nullopt);
  absl::Status read =
      Read([newest, job](storage::Storage& storage,
                         const Cancelled& /*unwanted*/) { *newest = FindRestorable(storage, job); },
           cancelled);
  if (!read.ok()) return read;
  absl::StatusOr<std::optional<Restorable>>& found = *newest;
  if (found.ok()) return std::move(found);
  return Error(absl::StatusCode::kFailedPrecondition, "SNAPSHOT_BROKEN",
               Say("job '", Named("job", job), "' cannot go on from its newest snapshot: ",
                   scheduler::MessageOf(found.status()), "; docs/snapshots.md says what to do"));
}

int64_t Daemon::LastCommitted() const {
  if (job_ == nullptr) return 0;
  if (job_->steps.has_value()) return job_->steps->last_committed().value();
  if (job_->wire.restore_step() > 0) return job_->wire.restore_step();
  return job_->snapshots.resume.has_value() ? job_->snapshots.resume->id.step.value() : 0;
}

int64_t Daemon::RestoreStep() const {
  return job_->snapshots.resume.has_value() ? job_->snapshots.resume->id.step.value() : 0;
}

std::string Daemon::TrainerStateOf(int32_t rank) const {
  if (const auto kept = job_->trainer_states.find(rank); kept != job_->trainer_states.end()) {
    return kept->second.bytes;
  }
  if (job_->has_state || !job_->snapshots.resume.has_value()) return "";
  const auto& saved = job_->snapshots.resume->trainers;
  const auto kept = saved.find(scheduler::TrainerRank(rank));
  return kept == saved.end() ? "" : kept->second;
}

void Daemon::TellPlanFailed(const absl::Status& why, int64_t older_snapshot) {
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  ready.set_older_snapshot(older_snapshot);
  ready.set_node(options_.node);
  ready.set_epoch(epoch_);
  ready.set_error(std::string(why.message()));
  ready.set_reason(ReasonOf(why));
  Tell(std::move(message));
}

void Daemon::StartRestore() {
  const scheduler::StepId step(job_->wire.restore_step());
  if (job_->snapshots.host == nullptr || reads_ == nullptr) {
    return TellPlanFailed(Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                                "this node has no --snapshot_dir"));
  }
  log::Info("restoring", {{"job", job_->name}, {"epoch", epoch_}, {"step", step}});
  job_->snapshots.StopRestore();
  job_->snapshots.restore = std::make_shared<JobSnapshots::Restoring>();
  reads_->Post([this, disk = reads_.get(), step, restore = job_->snapshots.restore,
                generation = generation_, job = job_->name, inputs = job_->inputs,
                plan = job_->plan, host = job_->snapshots.host,
                groups = AnyOf(job_->wire).groups()] {
    if (restore->unwanted) return;
    const auto go_on = [&](uint64_t bytes) {
      restore->read_bytes += bytes;
      return !restore->unwanted;
    };
    absl::StatusOr<Restorable> from = FindRestorable(disk->storage(), job, step);
    absl::StatusOr<std::vector<std::vector<uint64_t>>> updates =
        from.ok() ? RestoreHostCopies(disk->storage(), from->manifest, *inputs, groups, *plan,
                                      *host, go_on)
                  : from.status();
    if (restore->unwanted) return;
    const int64_t older =
        updates.ok() ? 0 : NewestStepBefore(disk->storage(), job, step).value_or(0);
    StateLock lock(mutex_);
    if (generation != generation_ || job_ == nullptr) return;
    if (updates.ok()) return OnRestored(*from, *std::move(updates));
    log::Error("a snapshot cannot be restored",
               {{"job", job}, {"epoch", epoch_}, {"step", step}, {"what", updates.status()}});
    TellPlanFailed(WithReason(updates.status(), "SNAPSHOT_BROKEN"), older);
  });
}

void Daemon::OnRestored(const Restorable& from, std::vector<std::vector<uint64_t>> updates) {
  for (const auto& [rank, bytes] : from.trainers) {
    const auto& trainers = job_->inputs->layout.trainers;
    if (static_cast<size_t>(rank.value()) >= trainers.size() ||
        trainers[rank.value()].node.value() != options_.node) {
      continue;
    }
    job_->trainer_states[rank.value()] = {from.id.attempt, bytes};
  }
  job_->snapshots.part.set_durable_step(from.id.step.value());
  job_->lanes.BeginLoading();
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    v1::LaneCommand command;
    v1::LaneCommand::LoadState& load = *command.mutable_load_state();
    load.set_step(from.id.step.value());
    load.mutable_updates()->Add(updates[i].begin(), updates[i].end());
    ToLane(scheduler::LaneIndex(static_cast<int32_t>(i)), command);
  }
}

void Daemon::HandleStateLoaded(scheduler::LaneIndex lane,
                               const v1::LaneReport::StateLoaded& loaded) {
  if (!loaded.error().empty()) {
    return TellPlanFailed(absl::InternalError(absl::StrCat(
        "lane ", lane.value(), " cannot take the snapshot's state: ", loaded.error())));
  }
  if (!job_->lanes.OnLoaded(lane)) return;
  fault::FaultPoint("daemon.restored");
  job_->snapshots.restored = true;
  log::Info("restored",
            {{"job", job_->name}, {"epoch", epoch_}, {"step", job_->wire.restore_step()}});
  OnLanesReady();
}

}  // namespace dmuond::server
