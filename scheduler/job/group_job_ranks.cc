// What the coordinator hears of ranks: their sessions, registrations, memory and end.
#include <iterator>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/group_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::OnRankSession(int32_t from, const v1::RankSession& session) {
  const uint64_t joined = session.job_incarnation();
  if (joined != 0 && (job_ == nullptr || job_->incarnation != joined)) return {};
  AddressedMessages out;
  if (job_ == nullptr) {
    // Its node may let in whom this one does not: the strictest --job_uids counts.
    if (session.has_owner_uid() &&
        !options_.job_uids.MayTakePart(session.owner_uid(), session.uid())) {
      return Deny(
          from, session,
          JobOfAnotherUser(session.job(), session.owner_uid(), session.rank(), session.uid()));
    }
    job_ = std::make_unique<Job>();
    job_->name = session.job();
    job_->world_size = session.world_size();
    job_->incarnation = ++incarnations_;
    job_->restore = FromProto(session.restore());
    if (session.has_costs()) job_->restore_costs = session.costs();
    job_->owner_uid = OwnerOf(session);
    if (session.discard()) BeginAnew(session, out);
  } else if (absl::Status may = CheckUser(session.job(), session.rank(), session.uid());
             !may.ok()) {
    return Deny(from, session, may);
  } else if (session.discard() && job_->name == session.job()) {
    if (absl::Status same = CheckLaunch(session); !same.ok()) return Deny(from, session, same);
  }
  Message refusal;
  absl::string_view reason;
  if (job_->name != session.job()) {
    return Deny(from, session, OtherJob(job_->name, session.job()));
  }
  if (job_->world_size != session.world_size()) {
    return Deny(from, session,
                WorldDiffers(job_->name, job_->world_size, session.rank(), session.world_size()));
  }
  // What nodes say that do not know yet where the job goes back to, or have a plan, is of no
  // matter.
  if (!job_->has_plan() && !job_->goes_back && job_->restore != FromProto(session.restore())) {
    reason = "SNAPSHOTS_DIFFER";
    refusal =
        Say("job '", Named("job", job_->name), "' goes on from step ",
            Named("restore_step", job_->restore.step.value()), ", and node ", Named("node", from),
            " finds step ", Named("newest_step", session.restore().step()),
            " to be that of its newest snapshot (0: none; one step may have several): "
            "`dmuonctl snapshot list DIRECTORY ",
            job_->name,
            "` on both nodes shows whether they see one directory; ranks of one "
            "start all say discard, or none");
  } else if (const auto held = job_->open_ranks.find(session.rank());
             held != job_->open_ranks.end() && held->second.first != from) {
    reason = "RANK_TWICE";
    refusal = Say("rank ", Named("rank", session.rank()), " of job '", Named("job", job_->name),
                  "' has a live session on node ", Named("live_node", held->second.first),
                  ": end that process, or give this one a RANK of its own");
  }
  if (reason.empty()) {
    job_->open_ranks[session.rank()] = {from, session.incarnation()};
    job_->places[session.rank()] = {.node = from, .pid = session.pid()};
    return out;
  }
  AddressedMessages denied =
      Deny(from, session, Error(absl::StatusCode::kFailedPrecondition, reason, refusal));
  std::move(denied.begin(), denied.end(), std::back_inserter(out));
  return out;
}

absl::Status GroupJob::CheckUser(const std::string& job, int32_t rank, uint32_t uid) const {
  if (job_ == nullptr || job_->name != job) return absl::OkStatus();
  if (options_.job_uids.MayTakePart(job_->owner_uid, uid)) return absl::OkStatus();
  return JobOfAnotherUser(job, job_->owner_uid, rank, uid);
}

AddressedMessages GroupJob::Deny(int32_t node, const v1::RankSession& session,
                                 const absl::Status& why) {
  AddressedMessages out;
  Addressed& addressed = out.emplace_back();
  addressed.node = node;
  v1::RegistrationRefused& refused = *addressed.message.mutable_refused();
  refused.set_job(session.job());
  refused.set_code(static_cast<int32_t>(why.code()));
  refused.set_message(std::string(why.message()));
  for (const auto& [name, value] : MetadataOf(why)) (*refused.mutable_metadata())[name] = value;
  refused.set_reason(ReasonOf(why));
  *refused.mutable_session() = session;
  return out;
}

AddressedMessages GroupJob::OnRegistration(TimePoint now, int32_t from,
                                           const v1::Registration& registration) {
  if (job_ == nullptr || job_->name != registration.job() || job_->has_plan() || job_->goes_back) {
    return {};
  }
  // One whose session was refused may have sent it before it knew.
  const auto open = job_->open_ranks.find(registration.rank());
  if (open == job_->open_ranks.end() || open->second.first != from) return {};
  const bool news = job_->registrations.Set(registration);
  // Of a rank's successor, whose predecessor's end was not heard; or only said again.
  if (job_->phase == Phase::kPlanning && !news) return {};
  if (!job_->register_deadline.has_value()) {
    job_->register_deadline = now + options_.register_timeout;
  }
  if (job_->registrations.size() < static_cast<size_t>(job_->world_size)) return {};
  return PlanRegistered();
}

AddressedMessages GroupJob::OnRankAttached(TimePoint now, int32_t from,
                                           const v1::RankAttached& attached) {
  if (job_ == nullptr) return {};
  // A job that was lost, and is begun again in the same epoch, may have sessions of its first life
  // left on a node. A node says of a session that it is open before it says that it is attached.
  const auto open = job_->open_ranks.find(attached.rank());
  if (open == job_->open_ranks.end() || open->second != std::pair(from, attached.incarnation())) {
    return {};
  }
  job_->attached.insert(attached.rank());
  if (!job_->has_steps()) return {};
  job_->steps->OnRankBack(now, TrainerRank(attached.rank()), attached.incarnation());
  if (AddressedMessages ended = CompareFirstWeights(attached); !ended.empty()) return ended;
  const bool complete = job_->attached.size() == static_cast<size_t>(job_->world_size);
  // It restarts when its nodes have lanes.
  if (job_->lacks_lanes()) return {};
  if (!complete || !job_->from_snapshot() || job_->steps->has_state()) return {};
  return Restart(now);
}

AddressedMessages GroupJob::OnRankGone(TimePoint now, int32_t from, const v1::RankGone& gone) {
  if (job_ == nullptr) return {};
  const auto open = job_->open_ranks.find(gone.rank());
  // A session that was never taken, or one with a successor, which stays. A predecessor is gone
  // with it, though its own end was not heard.
  if (open == job_->open_ranks.end() || open->second.first != from ||
      open->second.second > gone.incarnation()) {
    return {};
  }
  job_->open_ranks.erase(open);
  job_->attached.erase(gone.rank());
  job_->first_weights.Remove(TrainerRank(gone.rank()));
  // One that goes back has its state in a snapshot, and ranks that come back one by one.
  if (job_->goes_back && !job_->has_steps()) {
    return gone.closed() ? EndJob(gone.detail(), "TRAINER_LOST") : AddressedMessages();
  }
  if (!job_->has_plan()) job_->registrations.Erase(gone.rank());
  if (job_->phase == Phase::kPlanning) DropOrder(now);
  const bool replaceable = !gone.closed() && job_->has_steps() && !job_->steps->lost();
  const bool keeps = job_->goes_back || (job_->has_steps() && job_->steps->has_state());
  if (job_->open_ranks.empty() && !(replaceable && keeps)) {
    return EndWhenSaved(now, "every rank has left");
  }
  if (gone.closed() || !job_->has_steps()) {
    return Lost(now, OutcomeReason::kTrainerMissing, gone.detail());
  }
  AddressedMessages out = Broadcast(
      now,
      job_->steps->OnRankGone(now, TrainerRank(gone.rank()), gone.incarnation(), gone.detail()));
  EndIfDeserted(now, out);
  return out;
}

// Nobody is left, and nobody can come back.
void GroupJob::EndIfDeserted(TimePoint now, AddressedMessages& out) {
  if (!job_->steps->lost() || !job_->open_ranks.empty() || job_->ends.has_value()) return;
  AddressedMessages ended =
      EndWhenSaved(now, "every rank has died, and no replacement came in time");
  std::move(ended.begin(), ended.end(), std::back_inserter(out));
}

}  // namespace dmuond::scheduler
