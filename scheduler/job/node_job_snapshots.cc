// This node's part in the job's snapshots, and what the coordinator is asked for on behalf of who
// wants one, or wants the job to go back to one.
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/node_job.h"

namespace dmuond::scheduler {

void NodeJob::OnSave(TimePoint now, const v1::SaveState& save) {
  if (job_ == nullptr || !job_->host_copies) return;
  job_->ending = job_->ending || save.last();
  const SnapshotPart::Order order =
      job_->snapshot.OnSave(save, {.lanes_ready = job_->lanes.all_ready(),
                                   .applied_attempt = job_->applied_attempt,
                                   .disk_hangs = disk_hangs_});
  if (const auto* answer = std::get_if<v1::SnapshotWritten>(&order)) {
    v1::MemberMessage message;
    *message.mutable_snapshot_written() = *answer;
    return Tell(std::move(message));
  }
  const auto* write = std::get_if<SnapshotPart::Write>(&order);
  if (write == nullptr) return;
  job_->figures.saving = Attempt(save.attempt());
  job_->figures.saving_since = now;
  node::WriteSnapshot snapshot;
  snapshot.save = save;
  snapshot.abandoned = write->abandoned;
  for (const auto& [rank, state] : job_->trainer_states) {
    if (!state.bytes.empty()) snapshot.trainers[TrainerRank(rank)] = state.bytes;
  }
  Do(std::move(snapshot));
  if (!write->abandoned.empty()) return;
  v1::LaneCommand command;
  command.mutable_snapshot()->set_attempt(save.attempt());
  ToReadyLanes(command);
}

void NodeJob::OnCopied(LaneIndex lane, const v1::LaneReport::Copied& copied) {
  if (copied.attempt() != job_->snapshot.attempt()) return;
  for (const int32_t unit : copied.non_finite()) {
    const Plan& plan = *job_->planned.plan;
    if (unit < 0 || unit >= static_cast<int32_t>(plan.units.size())) continue;
    job_->snapshot.OnNonFinite(
        copied.attempt(),
        absl::StrCat("the weights of parameter '",
                     job_->planned.inputs->layout.parameters[plan.units[unit].parameter].name,
                     "' are infinite or NaN; the job ends with its next step"));
  }
  Do(node::Copied{lane, copied});
  if (!copied.complete()) return;
  Say(node::Note::Level::kDebug, "state copied",
      {{"lane", lane.value()}, {"held_us", copied.held_us()}});
}

node::Actions NodeJob::OnWritten(uint64_t attempt,
                                 const absl::StatusOr<std::vector<v1::SnapshotFile>>& files) {
  if (job_ == nullptr) return Take();
  for (const v1::SnapshotFile& file : files.value_or(std::vector<v1::SnapshotFile>())) {
    job_->figures.snapshot_bytes += file.bytes();
  }
  std::optional<v1::SnapshotWritten> answer =
      job_->snapshot.OnWritten(attempt, files.ok() ? *files : std::vector<v1::SnapshotFile>(),
                               std::string(files.status().message()));
  if (answer.has_value()) {
    v1::MemberMessage message;
    *message.mutable_snapshot_written() = *std::move(answer);
    Tell(std::move(message));
  }
  return Take();
}

node::Actions NodeJob::OnDiskHangs(const std::string& how) {
  if (job_ == nullptr) return Take();
  std::optional<v1::SnapshotWritten> answer = job_->snapshot.OnDiskHangs(how);
  if (answer.has_value()) {
    Do(node::GiveUpCopies{how});
    v1::MemberMessage message;
    *message.mutable_snapshot_written() = *std::move(answer);
    Tell(std::move(message));
  }
  return Take();
}

void NodeJob::OnSnapshotDone(TimePoint now, const v1::SnapshotDone& done) {
  if (job_ == nullptr) return;
  if (job_->snapshot.OnDone(done)) Do(node::ForgetCopies{});
  if (done.error().empty()) {
    JobFigures& figures = job_->figures;
    ++figures.snapshots_written;
    figures.saved = now;
    if (done.bytes() > 0) {
      figures.newest_snapshot_bytes = done.bytes();
      figures.newest_snapshot_ms = done.took_ms();
    }
    std::vector<node::Note::Field> fields = {{"step", done.step()}};
    if (figures.saving.value() == done.attempt()) {
      const double took_s = std::chrono::duration<double>(now - figures.saving_since).count();
      figures.snapshot_times.Add(took_s);
      fields.emplace_back("took_s", took_s);
    }
    Say(node::Note::Level::kInfo, "snapshot written", std::move(fields));
  } else if (done.reason() != "JOB_HAS_NO_STATE") {
    ++job_->figures.snapshots_failed;
    Say(node::Note::Level::kWarn, "a snapshot failed; training goes on",
        {{"step", done.step()},
         {"durable_step", done.has_durable_step() ? absl::StrCat(done.durable_step()) : "none"},
         {"what", done.error()}});
  }
  Wake();
}

void NodeJob::OnSnapshotSeen(const SnapshotId& id) {
  if (job_ == nullptr || id.attempt.value() != job_->applied_attempt) return;
  job_->snapshot.OnSeen(id);
  Wake();
}

node::Actions NodeJob::AskForSnapshot() {
  v1::MemberMessage message;
  message.mutable_snapshot_request()->set_node(options_.node);
  Tell(std::move(message));
  return Take();
}

node::Actions NodeJob::AskToGoBack(const SnapshotId& to, const std::string& why) {
  v1::MemberMessage message;
  *message.mutable_load_snapshot()->mutable_to() = ToProto(to);
  message.mutable_load_snapshot()->set_why(why);
  message.mutable_load_snapshot()->set_epoch(epoch_);
  Tell(std::move(message));
  return Take();
}

}  // namespace dmuond::scheduler
