// The coordinator's part in snapshots.
#include <iterator>
#include <utility>

#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

void GroupJob::AddSnapshots(TimePoint now, AddressedMessages& messages) {
  if (job_ == nullptr || job_->snapshots == nullptr) return;
  for (size_t i = 0; i < messages.size(); ++i) {
    v1::CoordinatorMessage& message = messages[i].message;
    if (message.has_republish()) job_->snapshots->OnRepublish(message.republish());
    if (!message.has_decision()) continue;
    std::optional<v1::SaveState> save = job_->snapshots->OnDecision(now, message.decision());
    if (const auto durable = job_->snapshots->durable_step()) {
      message.mutable_decision()->mutable_outcome()->set_durable_step(durable->value());
    }
    if (!save.has_value()) continue;
    Addressed begin;
    *begin.message.mutable_save() = *std::move(save);
    messages.insert(messages.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::move(begin));
  }
}

// New lanes may have to finish the last commit first: a snapshot that begins while the group is
// interrupted is told of when that commit has been told again.
void GroupJob::TellSave(std::optional<v1::SaveState> save, AddressedMessages& out) const {
  if (!save.has_value() || job_->lacks_lanes()) return;
  *out.emplace_back().message.mutable_save() = *std::move(save);
}

AddressedMessages GroupJob::OnSnapshotMessage(TimePoint now, int32_t from,
                                              const v1::MemberMessage& message) {
  AddressedMessages out;
  if (job_ == nullptr || job_->snapshots == nullptr) return out;
  if (message.has_snapshot_request()) {
    SnapshotRound::Answer answer = job_->snapshots->OnRequest(now);
    TellSave(std::move(answer.save), out);
    if (answer.done.has_value()) {
      Addressed& done = out.emplace_back();
      done.node = from;
      *done.message.mutable_snapshot_done() = *std::move(answer.done);
    }
  } else if (const uint64_t of = message.has_snapshot_written()
                                     ? message.snapshot_written().attempt()
                                     : message.manifest_written().attempt();
             Drops(OfAnotherAttempt(Attempt(of), job_->snapshots->writing()), from,
                   message.has_snapshot_written() ? "snapshot_written" : "manifest_written")) {
    return out;
  } else if (message.has_snapshot_written()) {
    std::optional<v1::WriteManifest> write =
        job_->snapshots->OnWritten(now, message.snapshot_written());
    if (!write.has_value()) return out;
    Addressed& here = out.emplace_back();
    here.node = 0;
    *here.message.mutable_write_manifest() = *std::move(write);
  } else {
    std::optional<SnapshotRound::Finished> finished =
        job_->snapshots->OnManifestWritten(now, message.manifest_written());
    if (!finished.has_value()) return out;
    *out.emplace_back().message.mutable_snapshot_done() = std::move(finished->done);
    if (finished->save.has_value()) {
      TellSave(std::move(finished->save), out);
    } else if (job_->ends.has_value()) {
      AddressedMessages ended = EndJob(*job_->ends);
      std::move(ended.begin(), ended.end(), std::back_inserter(out));
    }
  }
  return out;
}

void GroupJob::SaveLast(TimePoint now, AddressedMessages& out) {
  if (job_->snapshots == nullptr || !job_->steps->has_state()) return;
  SnapshotRound::Answer answer = job_->snapshots->OnRequest(now, /*last=*/true);
  job_->saving_last = true;
  TellSave(std::move(answer.save), out);
}

AddressedMessages GroupJob::EndWhenSaved(TimePoint now, const std::string& why) {
  if (job_->snapshots == nullptr || !job_->snapshots->busy()) return EndJob(why);
  job_->ends = why;
  job_->ends_by = now + options_.step.step_timeout;
  AddressedMessages out;
  if (!job_->saving_last) TellSave(job_->snapshots->OnEnd(), out);
  return out;
}

}  // namespace dmuond::scheduler
