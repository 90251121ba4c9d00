// Jobs that somebody ends, and jobs that are begun anew over one that has state (RESUME_DISCARD).
#include "absl/strings/str_cat.h"
#include "scheduler/job/group_job.h"
#include "scheduler/job/refusals.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::OnEndJob(int32_t from, const v1::EndJob& end) {
  if (job_ == nullptr || job_->name != end.job()) return {};
  if (!end.has_discard()) return EndJob(end.why(), kJobEnded);
  const v1::RankSession& discard = end.discard();
  absl::Status may = CheckUser(discard.job(), discard.rank(), discard.uid());
  if (!may.ok()) return Deny(from, discard, may);
  if (job_->launch == discard.launch()) return {};
  if (!job_->open_ranks.empty()) return Deny(from, discard, CheckLaunch(discard));
  discarded_ = {.job = job_->name, .launch = discard.launch(), .owner_uid = job_->owner_uid};
  return EndJob(end.why(), kJobEnded);
}

absl::Status GroupJob::CheckLaunch(const v1::RankSession& session) const {
  if (job_->launch == session.launch()) return absl::OkStatus();
  if (job_->open_ranks.empty()) {
    return Error(
        absl::StatusCode::kUnavailable, "GROUP_NOT_READY",
        Say("job '", Named("job", job_->name), "' of an older launch is about to end; ask again"));
  }
  const auto& [rank, place] = *job_->open_ranks.begin();
  return JobInUse(job_->name, session.rank(), rank, absl::StrCat("on node ", place.first));
}

uint32_t GroupJob::OwnerOf(const v1::RankSession& session) const {
  if (session.has_owner_uid()) return session.owner_uid();
  // Who has no part in that user's jobs begins one of his own, whatever his launch is called.
  const bool anew = session.discard() && session.job() == discarded_.job &&
                    session.launch() == discarded_.launch &&
                    options_.job_uids.MayTakePart(discarded_.owner_uid, session.uid());
  return anew ? discarded_.owner_uid : session.uid();
}

void GroupJob::BeginAnew(const v1::RankSession& session, AddressedMessages& out) {
  job_->launch = session.launch();
  if (!options_.snapshots) return;
  job_->discarding = true;
  Addressed& here = out.emplace_back();
  here.node = 0;
  here.message.mutable_discard()->set_job(job_->name);
  here.message.mutable_discard()->set_job_incarnation(job_->incarnation);
}

AddressedMessages GroupJob::OnSnapshotsDiscarded(const v1::SnapshotsDiscarded& discarded) {
  if (job_ == nullptr || job_->name != discarded.job() || !job_->discarding ||
      job_->incarnation != discarded.job_incarnation()) {
    return {};
  }
  job_->discarding = false;
  if (!discarded.error().empty()) {
    job_->discard_error = Error(
        absl::StatusCode::kUnavailable, discarded.reason(),
        Say("job '", Named("job", job_->name),
            "' cannot begin anew: its older snapshots cannot be set aside: ", discarded.error()));
  }
  if (job_->registrations.size() < static_cast<size_t>(job_->world_size)) return {};
  return PlanRegistered();
}

}  // namespace dmuond::scheduler
