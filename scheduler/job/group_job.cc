#include "scheduler/job/group_job.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/job/impossible.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// It may begin a job, or is of whatever job there is.
bool OfAnyJob(const v1::MemberMessage& message) {
  return message.has_rank_session() || message.has_member_state() || message.has_leaving();
}

// What is said of trainers: it waits until it is known which job goes on.
bool OfRanks(const v1::MemberMessage& message) {
  return message.has_rank_session() || message.has_registration() || message.has_rank_gone() ||
         message.has_rank_attached() || message.has_end_job();
}

const char* Name(GroupJob::Phase phase) {
  switch (phase) {
    case GroupJob::Phase::kRegistering:
      return "Registering";
    case GroupJob::Phase::kPlanning:
      return "Planning";
    case GroupJob::Phase::kPreparing:
      return "Preparing";
    case GroupJob::Phase::kRunning:
      return "Running";
    case GroupJob::Phase::kInterrupted:
      return "Interrupted";
    case GroupJob::Phase::kParked:
      return "Parked";
  }
  return "";
}

// Nonsense would overflow.
std::chrono::milliseconds PatienceOf(const v1::Leaving& leaving) {
  constexpr std::chrono::milliseconds kMax = std::chrono::hours(24);
  return std::chrono::milliseconds(std::clamp<int64_t>(leaving.patience_ms(), 0, kMax.count()));
}

}  // namespace

void GroupJob::Job::Enter(Phase next) {
  const auto may_follow = [this](std::initializer_list<Phase> phases) {
    return std::find(phases.begin(), phases.end(), phase) != phases.end();
  };
  bool allowed = false;
  switch (next) {
    case Phase::kRegistering:
      allowed = may_follow({Phase::kRegistering, Phase::kPlanning, Phase::kPreparing});
      break;
    case Phase::kPlanning:
      allowed = may_follow({Phase::kRegistering, Phase::kPlanning});
      break;
    case Phase::kPreparing:
      allowed = phase == Phase::kPlanning;
      break;
    case Phase::kRunning:
      allowed = may_follow({Phase::kPreparing, Phase::kInterrupted, Phase::kParked});
      break;
    case Phase::kInterrupted:
      allowed = may_follow({Phase::kRunning, Phase::kInterrupted, Phase::kParked});
      break;
    case Phase::kParked:
      allowed = may_follow({Phase::kRunning, Phase::kInterrupted});
      break;
  }
  // What members say does not choose a phase.
  if (!allowed) {
    Impossible("GroupJob", Name(phase), Name(next));
    return;
  }
  phase = next;
}

GroupActions GroupJob::OnFormed(TimePoint now, uint32_t epoch) {
  epoch_ = epoch;
  told_epoch_ = epoch;
  attempts_ = options_.attempts_from;
  finding_ = false;
  leavers_.clear();
  waiting_.Forget();
  std::erase_if(states_, [epoch](const auto& entry) { return entry.second.epoch() != epoch; });
  // One that was registering is gone: its trainers were told when the group broke.
  if (job_ != nullptr && !job_->has_steps()) job_.reset();
  return Complete(now, {});
}

GroupActions GroupJob::OnMessage(TimePoint now, int32_t from, const v1::MemberMessage& message) {
  AddressedMessages out = Dispatch(now, from, message);
  HaltForLeavers(now, out);
  return Complete(now, std::move(out));
}

AddressedMessages GroupJob::Dispatch(TimePoint now, int32_t from,
                                     const v1::MemberMessage& message) {
  using Kind = v1::MemberMessage::MessageCase;
  if (!Formed() && OfRanks(message)) {
    early_.emplace_back(from, message);
    return {};
  }
  if (OfAnotherJob(message)) return {};
  if (std::optional<Dropped> why = WhyDropped(message); why.has_value()) {
    const auto* field = message.GetDescriptor()->FindFieldByNumber(message.message_case());
    Drops(std::move(why), from, std::string(field->name()));
    return {};
  }
  switch (message.message_case()) {
    case Kind::kRankSession:
      return OnRankSession(from, message.rank_session());
    case Kind::kRegistration:
      return OnRegistration(now, from, message.registration());
    case Kind::kRankGone:
      return OnRankGone(now, from, message.rank_gone());
    case Kind::kRankAttached:
      return OnRankAttached(now, from, message.rank_attached());
    case Kind::kPlanReady:
      return OnPlanReady(now, message.plan_ready());
    case Kind::kLoadSnapshot:
      OnLoadSnapshot(message.load_snapshot());
      return {};
    case Kind::kNodeProgress:
      if (job_ != nullptr) job_->progress[from] = message.node_progress();
      return {};
    case Kind::kMemberState:
      return OnMemberState(now, from, message.member_state());
    case Kind::kNewestSnapshot:
      return OnNewestSnapshot(now, from, message.newest_snapshot());
    case Kind::kRendezvous:
      return OnRendezvous(message.rendezvous());
    case Kind::kSnapshotRequest:
    case Kind::kSnapshotWritten:
    case Kind::kManifestWritten:
      return OnSnapshotMessage(now, from, message);
    case Kind::kCheckRequest:
      return OnCheckRequest(now, from, message.check_request());
    case Kind::kChecked:
      if (job_ != nullptr && job_->check != nullptr) job_->check->OnChecked(message.checked());
      return {};
    case Kind::kLaneLost:
      return OnLaneLost(now, message.lane_lost());
    case Kind::kLanesAccepted:
      return OnLanesAccepted();
    case Kind::kEndJob:
      return OnEndJob(from, message.end_job());
    case Kind::kDiscarded:
      return OnSnapshotsDiscarded(message.discarded());
    case Kind::kLeaving:
      leavers_[from] = {now + PatienceOf(message.leaving()), false};
      return {};
    default:
      break;
  }
  if (job_ == nullptr || !job_->has_steps()) return {};
  switch (message.message_case()) {
    case Kind::kReports:
      return OnReports(now, from, message.reports());
    case Kind::kVote:
      return OnVote(now, message.vote());
    default:
      return {};
  }
}

std::optional<Dropped> GroupJob::WhyDropped(const v1::MemberMessage& message) const {
  using Kind = v1::MemberMessage::MessageCase;
  const bool steps = job_ != nullptr && job_->has_steps();
  switch (message.message_case()) {
    case Kind::kPlanReady:
      return OfAnotherEpoch(message.plan_ready().epoch(), epoch_);
    case Kind::kNodeProgress:
      return OfAnotherEpoch(message.node_progress().epoch(), epoch_);
    case Kind::kNewestSnapshot:
      return OfAnotherEpoch(message.newest_snapshot().epoch(), epoch_);
    case Kind::kRendezvous:
      return OfAnotherEpoch(message.rendezvous().epoch(), epoch_);
    // Of lanes that have been given up since.
    case Kind::kLaneLost:
      return OfAnotherEpoch(message.lane_lost().epoch(), epoch_);
    // One of a newer epoch is ahead of the news that the group has formed.
    case Kind::kMemberState:
      return OfAnOlderEpoch(message.member_state().epoch(), epoch_);
    // Every node says again who is attached when it has prepared for a new epoch. What it said
    // before may be of ranks that have yet to acknowledge that the job goes back.
    case Kind::kRankAttached:
      return OfAnOlderEpoch(message.rank_attached().epoch(), epoch_);
    // The job has gone back since: who asked hears of that.
    case Kind::kLoadSnapshot:
      if (job_ == nullptr) return std::nullopt;
      return OfAnOlderEpoch(message.load_snapshot().epoch(), job_->back_epoch);
    case Kind::kVote:
      if (!steps) return std::nullopt;
      return OfAnotherAttempt(Attempt(message.vote().attempt()), job_->steps->Current().attempt);
    default:
      return std::nullopt;
  }
}

bool GroupJob::Drops(std::optional<Dropped> why, int32_t from, const std::string& message) {
  if (!why.has_value()) return false;
  why->from = from;
  why->message = message;
  dropped_.push_back(*std::move(why));
  return true;
}

bool GroupJob::OfAnotherJob(const v1::MemberMessage& message) const {
  return job_ != nullptr && !message.job().empty() && message.job() != job_->name &&
         !OfAnyJob(message);
}

GroupActions GroupJob::OnMemberGone(TimePoint now, int32_t node, const std::string& why) {
  return Complete(now, MemberGone(now, node, why));
}

AddressedMessages GroupJob::MemberGone(TimePoint now, int32_t node, const std::string& why) {
  const std::string detail = absl::StrCat("the daemon of node ", node, " is gone: ", why);
  states_.clear();
  finding_ = false;
  early_.clear();
  leavers_.clear();
  if (job_ != nullptr && !job_->has_steps() && job_->goes_back) return {};
  const bool waits = options_.step.session_linger.count() > 0;
  if (job_ == nullptr || !job_->has_steps() || job_->steps->lost() || !waits) {
    return Lost(now, OutcomeReason::kPeerLost, detail);
  }
  ForgetOldLosses(now);
  job_->steps->Suspend();
  job_->goes->Forget();
  job_->Enter(Phase::kInterrupted);
  job_->interruption = Interruption{OutcomeReason::kPeerLost, detail};
  return {};
}

AddressedMessages GroupJob::Lost(TimePoint now, OutcomeReason reason, const std::string& detail) {
  if (job_ == nullptr) return {};
  if (job_->parked()) job_->Enter(Phase::kRunning);  // no lanes are tried for it any more
  if (job_->has_steps()) return Broadcast(now, job_->steps->OnLost(now, reason, detail));
  if (!job_->has_plan() && reason == OutcomeReason::kTrainerMissing) {
    return {};  // others may still register; the deadline names who is missing
  }
  return Refuse(GivenUp(reason, detail));
}

GroupActions GroupJob::OnTick(TimePoint now) {
  AddressedMessages out = Advance(now);
  HaltForLeavers(now, out);
  TellWaiting(now, out);
  return Complete(now, std::move(out));
}

AddressedMessages GroupJob::Advance(TimePoint now) {
  if (job_ == nullptr) return {};
  const bool complete = job_->registrations.size() == static_cast<size_t>(job_->world_size);
  if (job_->register_deadline.has_value() && now >= *job_->register_deadline && !complete) {
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < job_->world_size; ++rank) {
      if (!job_->registrations.Contains(rank)) missing.push_back(rank);
    }
    return Refuse(Error(
        absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
        Say("job '", Named("job", job_->name), "': of ", Named("world_size", job_->world_size),
            " ranks these have not registered in time: ",
            Named("missing", absl::StrJoin(missing, ", ")),
            ": look at their logs, and start all of them again")));
  }
  if (AddressedMessages unready = GiveUpUnready(now); !unready.empty()) return unready;
  if (job_ == nullptr || !job_->has_steps()) return {};
  if (job_->steps->has_state()) job_->first_weights.Clear();
  if (AddressedMessages expelled = ExpelUnattached(now); !expelled.empty()) return expelled;
  if (job_->ends.has_value() && now >= job_->ends_by) return EndJob(*job_->ends);
  // Nobody can take a dead rank's place before there are lanes.
  if (job_->lacks_lanes()) job_->steps->AwaitAnew(now);
  if (job_->parked()) return AdvanceParked(now);
  const bool lost = job_->steps->lost();
  AddressedMessages out = Broadcast(now, job_->steps->OnTick(now));
  if (!lost && job_->steps->lost()) SaveLast(now, out);
  EndIfDeserted(now, out);
  return out;
}

GroupActions GroupJob::Complete(TimePoint now, AddressedMessages messages) {
  AddSnapshots(now, messages);
  AddChecks(now, messages);
  TellEpoch(messages);
  if (const auto held = due(); held.has_value() && (!messages.empty() || *held <= now)) {
    AddressedMessages goes = job_->goes->Take(now);
    messages.insert(messages.begin(), std::make_move_iterator(goes.begin()),
                    std::make_move_iterator(goes.end()));
  }
  if (job_ != nullptr) name_ = job_->name;
  for (auto& [node, message] : messages) {
    message.set_job(message.has_refused()         ? message.refused().job()
                    : message.has_job_ended()     ? message.job_ended().job()
                    : message.has_find_snapshot() ? message.find_snapshot().job()
                                                  : name_);
  }
  GroupActions actions{std::move(messages), {}, std::exchange(dropped_, {})};
  if (order_.has_value()) actions.plans.push_back(*std::exchange(order_, std::nullopt));
  return actions;
}

void GroupJob::TellEpoch(AddressedMessages& messages) {
  for (const Addressed& addressed : messages) {
    const v1::CoordinatorMessage& message = addressed.message;
    if (message.has_reform() || message.has_roll_back() || message.has_new_epoch()) {
      told_epoch_ = epoch_;
    }
  }
  // A job that goes back tells its epoch with its plan. While the group is broken nobody hears it,
  // and the next group has an epoch of its own.
  if (told_epoch_ == epoch_ || job_ != nullptr || !Formed()) return;
  told_epoch_ = epoch_;
  Addressed raised;
  raised.message.mutable_new_epoch()->set_epoch(epoch_);
  messages.insert(messages.begin(), std::move(raised));
}

AddressedMessages GroupJob::EndJob(const std::string& why, const std::string& reason,
                                   const Metadata& metadata) {
  AddressedMessages out;
  v1::JobEnded& ended = *out.emplace_back().message.mutable_job_ended();
  ended.set_job(job_->name);
  ended.set_why(why);
  ended.set_reason(reason);
  for (const auto& [name, value] : metadata) (*ended.mutable_metadata())[name] = value;
  ended_ = {job_->incarnation, out.back().message};
  if (job_->has_steps()) {
    // Attempts only grow, whatever job they belong to.
    attempts_ = static_cast<uint32_t>(job_->steps->Current().attempt.value());
  }
  job_.reset();
  return out;
}

}  // namespace dmuond::scheduler
