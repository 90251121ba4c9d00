#include "scheduler/job/snapshot_round.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/registrations.h"

namespace dmuond::scheduler {
namespace {

google::protobuf::Duration ToProto(TimePoint::duration time) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(time);
  google::protobuf::Duration duration;
  duration.set_seconds(seconds.count());
  duration.set_nanos(static_cast<int32_t>(std::chrono::nanoseconds(time - seconds).count()));
  return duration;
}

}  // namespace

std::optional<v1::SaveState> SnapshotRound::OnDecision(TimePoint now,
                                                       const v1::Decision& decision) {
  const bool step = decision.kind() == v1::ATTEMPT_KIND_STEP;
  const bool commit = decision.verdict() == v1::Decision::VERDICT_COMMIT;
  if (!commit && decision.verdict() != v1::Decision::VERDICT_SKIP) return std::nullopt;
  // One that is told again, to nodes of a new epoch, changes nothing.
  if (state_.has_value() && Attempt(decision.attempt()) <= state_->attempt) return std::nullopt;
  // Pushes and loads change the state without a step of their own.
  const int64_t at = step ? decision.step() : state_.has_value() ? state_->step.value() : 0;
  ++changes_;
  state_ = SnapshotId{Attempt(decision.attempt()), StepId(at)};
  if (!step || !schedule_.OnCommitted(state_->step, now)) return std::nullopt;
  return Begin(now);
}

void SnapshotRound::OnRepublish(const v1::Republish& republish) {
  state_ = SnapshotId{Attempt(republish.attempt()), StepId(republish.step())};
}

v1::SaveState SnapshotRound::Begin(TimePoint now) {
  requested_ = false;
  writing_ = Writing{.id = *state_, .since = now, .changes = changes_};
  return SaveOf(writing_->id);
}

v1::SaveState SnapshotRound::SaveOf(const SnapshotId& id) const {
  v1::SaveState save;
  save.set_attempt(id.attempt.value());
  save.set_step(id.step.value());
  save.set_last(last_);
  return save;
}

std::optional<v1::SaveState> SnapshotRound::OnReformed() const {
  if (!writing_.has_value()) return std::nullopt;
  return SaveOf(writing_->id);
}

SnapshotRound::Answer SnapshotRound::OnRequest(TimePoint now, bool last) {
  Answer answer;
  last_ = last_ || last;
  if (!state_.has_value() || state_->step.value() == 0) {
    answer.done = Done(state_.value_or(SnapshotId{}));
    answer.done->set_reason("JOB_HAS_NO_STATE");
    answer.done->set_error("no step has been committed yet: there is nothing to save");
  } else if (durable_ == state_) {
    answer.done = Done(*state_);
  } else if (writing_.has_value()) {
    requested_ = writing_->id != *state_;
  } else {
    schedule_.Request();
    if (schedule_.OnCommitted(state_->step, now)) answer.save = Begin(now);
  }
  return answer;
}

std::optional<v1::WriteManifest> SnapshotRound::OnWritten(TimePoint now,
                                                          const v1::SnapshotWritten& written) {
  if (!writing_.has_value() || written.attempt() != writing_->id.attempt.value()) {
    return std::nullopt;
  }
  if (!writing_->nodes.insert(written.node()).second) return std::nullopt;
  if (!written.error().empty() && writing_->error.empty()) {
    writing_->error = absl::StrCat("node ", written.node(), ": ", written.error());
    writing_->reason = written.reason();
  }
  for (const v1::SnapshotFile& file : written.files()) *writing_->manifest.add_files() = file;
  // Whoever still writes would write beside the next one.
  if (static_cast<int32_t>(writing_->nodes.size()) < job_.inputs->nodes) return std::nullopt;
  v1::WriteManifest message;
  v1::SnapshotManifest& manifest = *message.mutable_manifest();
  manifest = std::move(writing_->manifest);
  if (writing_->error.empty()) {
    Describe(manifest);
    *manifest.mutable_took() = ToProto(now - writing_->since);
    const auto took = std::chrono::ceil<std::chrono::milliseconds>(now - writing_->since);
    writing_->costs.set_took_ms(took.count());
    int64_t bytes = 0;
    for (const v1::SnapshotFile& file : manifest.files()) bytes += file.bytes();
    writing_->costs.set_bytes(bytes);
  }
  manifest.set_job(job_.wire->job());
  manifest.set_step(writing_->id.step.value());
  manifest.set_attempt(writing_->id.attempt.value());
  if (!writing_->error.empty()) manifest.clear_files();
  return message;
}

void SnapshotRound::Describe(v1::SnapshotManifest& manifest) const {
  std::sort(
      manifest.mutable_files()->begin(), manifest.mutable_files()->end(),
      [](const v1::SnapshotFile& a, const v1::SnapshotFile& b) { return a.name() < b.name(); });
  manifest.set_job_incarnation(job_.wire->job_incarnation());
  manifest.set_world_size(WorldSizeOf(*job_.wire));
  manifest.set_owner_uid(job_.wire->owner_uid());
  v1::SnapshotPlan& plan = *manifest.mutable_plan();
  plan.set_nodes(job_.inputs->nodes);
  plan.set_lanes_per_node(job_.inputs->lanes_per_node);
  plan.set_lane_memory_bytes(job_.inputs->lane_memory_bytes);
  plan.set_bucket_bytes(job_.inputs->bucket_bytes);
  if (job_.wire->has_costs()) *plan.mutable_costs() = job_.wire->costs();
  plan.set_digest(job_.plan->digest);
}

std::optional<SnapshotRound::Finished> SnapshotRound::OnManifestWritten(
    TimePoint now, const v1::ManifestWritten& written) {
  if (!writing_.has_value() || written.attempt() != writing_->id.attempt.value()) {
    return std::nullopt;
  }
  const SnapshotId id = writing_->id;
  const bool first = writing_->error.empty();
  const std::string error = first ? written.error() : writing_->error;
  const std::string reason = first ? written.reason() : writing_->reason;
  if (error.empty()) durable_changes_ = writing_->changes;
  const v1::SnapshotDone costs = std::exchange(writing_, std::nullopt)->costs;
  schedule_.OnFinished(error.empty());
  if (error.empty()) durable_ = id;
  Finished finished{.done = Done(id)};
  if (error.empty()) finished.done.MergeFrom(costs);
  finished.done.set_error(error);
  if (!error.empty()) finished.done.set_reason(reason.empty() ? "SNAPSHOT_FAILED" : reason);
  if (requested_) {
    schedule_.Request();
    if (schedule_.OnCommitted(state_->step, now)) finished.save = Begin(now);
  }
  return finished;
}

v1::SnapshotDone SnapshotRound::Done(const SnapshotId& id) const {
  v1::SnapshotDone done;
  done.set_attempt(id.attempt.value());
  done.set_step(id.step.value());
  done.set_left_out(schedule_.counts().left_out);
  done.set_failed(schedule_.counts().failed);
  if (const auto durable = schedule_.durable_step()) done.set_durable_step(durable->value());
  return done;
}

}  // namespace dmuond::scheduler
