#include "server/daemon/coordinator.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dmuond/wire/fault_point.h"
#include "scheduler/reason.h"
#include "server/convert.h"
#include "server/daemon/errors.h"
#include "server/daemon/refusals.h"

namespace dmuond::server {
namespace {

using scheduler::TimePoint;

// What is said of trainers: it waits until it is known which job goes on.
bool OfRanks(const v1::MemberMessage& message) {
  return message.has_rank_session() || message.has_registration() || message.has_rank_gone() ||
         message.has_rank_attached() || message.has_end_job();
}

// Nonsense would overflow.
std::chrono::milliseconds PatienceOf(const v1::Leaving& leaving) {
  constexpr std::chrono::milliseconds kMax = std::chrono::hours(24);
  return std::chrono::milliseconds(std::clamp<int64_t>(leaving.patience_ms(), 0, kMax.count()));
}

}  // namespace

AddressedMessages Coordinator::Broadcast(const std::vector<scheduler::CoordinatorAction>& actions) {
  AddressedMessages out;
  for (const scheduler::CoordinatorAction& action : actions) {
    Addressed& addressed = out.emplace_back();
    if (const auto* open = std::get_if<scheduler::OpenAttempt>(&action)) {
      wire::FaultPoint("coordinator.open");
      *addressed.message.mutable_open() = ToProto(*open);
    } else if (const auto* go = std::get_if<scheduler::Go>(&action)) {
      wire::FaultPoint("coordinator.go");
      *addressed.message.mutable_go() = ToProto(*go);
    } else if (const auto* begun = std::get_if<scheduler::Begun>(&action)) {
      addressed.node = begun->node.value();
      *addressed.message.mutable_submitted() = ToProto(begun->submission);
    } else if (const auto* expel = std::get_if<scheduler::Expel>(&action)) {
      addressed.message.mutable_expel()->set_rank(expel->rank.value());
      addressed.message.mutable_expel()->set_attempt(expel->attempt.value());
      addressed.message.mutable_expel()->set_detail(expel->detail);
    } else if (const auto* overdue = std::get_if<scheduler::GatherOverdue>(&action)) {
      addressed.node = overdue->node.value();
      addressed.message.mutable_gather_overdue()->set_attempt(overdue->attempt.value());
      addressed.message.mutable_gather_overdue()->set_detail(overdue->detail);
    } else if (const auto* republish = std::get_if<scheduler::Republish>(&action)) {
      addressed.message.mutable_republish()->set_attempt(republish->attempt.value());
      addressed.message.mutable_republish()->set_step(republish->step.value());
    } else {
      wire::FaultPoint("coordinator.decided");
      *addressed.message.mutable_decision() = ToProto(std::get<scheduler::Decision>(action));
    }
  }
  return out;
}

AddressedMessages Coordinator::OnFormed(TimePoint /*now*/, uint32_t epoch) {
  epoch_ = epoch;
  attempts_ = 0;
  finding_ = false;
  leavers_.clear();
  waiting_.Forget();
  std::erase_if(states_, [epoch](const auto& entry) { return entry.second.epoch() != epoch; });
  // One that was registering is gone: its trainers were told when the group broke.
  if (job_ != nullptr && job_->steps == nullptr) job_.reset();
  return {};
}

AddressedMessages Coordinator::OnMessage(TimePoint now, int32_t from,
                                         const v1::MemberMessage& message) {
  AddressedMessages out = Dispatch(now, from, message);
  HaltForLeavers(now, out);
  return out;
}

AddressedMessages Coordinator::Dispatch(TimePoint now, int32_t from,
                                        const v1::MemberMessage& message) {
  using Kind = v1::MemberMessage::MessageCase;
  if (!Formed() && OfRanks(message)) {
    early_.emplace_back(from, message);
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
      return OnRankAttached(now, message.rank_attached());
    case Kind::kPlanReady:
      return OnPlanReady(now, message.plan_ready());
    case Kind::kLoadSnapshot:
      return OnLoadSnapshot(message.load_snapshot());
    case Kind::kNodeProgress:
      if (job_ != nullptr) job_->progress[from] = message.node_progress();
      return {};
    case Kind::kMemberState:
      return OnMemberState(now, from, message.member_state());
    case Kind::kNewestSnapshot:
      return OnNewestSnapshot(now, message.newest_snapshot());
    case Kind::kRendezvous:
      return OnRendezvous(message.rendezvous());
    case Kind::kSnapshotRequest:
    case Kind::kSnapshotWritten:
    case Kind::kManifestWritten:
      return OnSnapshotMessage(now, from, message);
    case Kind::kLaneLost:
      return OnLaneLost(now, message.lane_lost());
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
  if (job_ == nullptr || job_->steps == nullptr) return {};
  switch (message.message_case()) {
    case Kind::kSubmitted: {
      absl::StatusOr<scheduler::Submission> submission = FromProto(message.submitted());
      wire::FaultPoint("coordinator.submission");
      if (!submission.ok()) return {};  // the member checked it: a member of another build is out
      return Broadcast(job_->steps->OnSubmission(now, *submission));
    }
    case Kind::kRailReady: {
      const v1::RailReady& ready = message.rail_ready();
      const auto operation = ready.operation() == v1::RAIL_OPERATION_PUBLISH
                                 ? scheduler::RailOperation::kPublish
                                 : scheduler::RailOperation::kCollect;
      const auto kind = ready.kind() == v1::ATTEMPT_KIND_PUSH ? scheduler::AttemptKind::kPush
                                                              : scheduler::AttemptKind::kStep;
      return Broadcast(job_->steps->OnRailReady(now, scheduler::Attempt(ready.attempt()),
                                                scheduler::NodeRank(ready.node()),
                                                scheduler::LaneIndex(ready.rail()), operation,
                                                scheduler::BucketId(ready.bucket()), kind));
    }
    case Kind::kVote: {
      const v1::Vote& vote = message.vote();
      wire::FaultPoint("coordinator.vote");
      if (AddressedMessages ended = EndWhereNotFinite(vote); !ended.empty()) return ended;
      std::vector<scheduler::UnitNorm> norms;
      norms.reserve(vote.norms_size());
      for (const v1::UnitNorm& norm : vote.norms()) norms.push_back(FromProto(norm));
      return Broadcast(job_->steps->OnVote(now, scheduler::Attempt(vote.attempt()),
                                           scheduler::NodeRank(vote.node()), vote.plan_digest(),
                                           norms, vote.error()));
    }
    default:
      return {};
  }
}

AddressedMessages Coordinator::OnRankSession(int32_t from, const v1::RankSession& session) {
  AddressedMessages out;
  if (job_ == nullptr) {
    job_ = std::make_unique<Job>();
    job_->name = session.job();
    job_->world_size = session.world_size();
    job_->incarnation = ++incarnations_;
    job_->restore_step = session.restore_step();
    if (session.has_costs()) job_->restore_costs = session.costs();
    if (session.discard()) BeginAnew(session, out);
  } else if (session.discard() && job_->name == session.job()) {
    if (absl::Status same = CheckLaunch(session); !same.ok()) return Deny(from, session, same);
  }
  scheduler::Message refusal;
  absl::string_view reason;
  if (job_->name != session.job()) {
    return Deny(from, session, OtherJob(job_->name, session.job()));
  }
  if (job_->world_size != session.world_size()) {
    return Deny(from, session,
                WorldDiffers(job_->name, job_->world_size, session.rank(), session.world_size()));
  }
  if (job_->plan == nullptr && job_->restore_step != session.restore_step()) {
    reason = "SNAPSHOTS_DIFFER";
    refusal =
        Say("job '", Named("job", job_->name), "' goes on from step ",
            Named("restore_step", job_->restore_step), ", and node ", Named("node", from),
            " finds step ", Named("newest_step", session.restore_step()),
            " to be that of its newest snapshot (0: none): `dmuonctl snapshot list DIRECTORY ",
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

AddressedMessages Coordinator::OnRegistration(TimePoint now, int32_t from,
                                              const v1::Registration& registration) {
  if (job_ == nullptr || job_->name != registration.job() || job_->plan != nullptr) return {};
  // One whose session was refused may have sent it before it knew.
  const auto open = job_->open_ranks.find(registration.rank());
  if (open == job_->open_ranks.end() || open->second.first != from) return {};
  wire::FaultPoint("coordinator.registration");
  job_->registrations[registration.rank()] = registration;
  if (!job_->register_deadline.has_value()) {
    job_->register_deadline = now + options_.register_timeout;
  }
  if (job_->registrations.size() < static_cast<size_t>(job_->world_size)) return {};
  return MakePlanAndTell();
}

std::optional<v1::CostTable> Coordinator::CostsOfPlan() const {
  const v1::CostTable here = ToProto(options_.costs.value_or(options_.estimates));
  if (job_->restore_step == 0 || options_.replan) return here;
  const std::optional<v1::CostTable>& before = job_->restore_costs;
  // What was measured on another device says nothing of this one.
  const bool other =
      options_.costs.has_value() && before.has_value() && here.device() != before->device();
  if (other) return here;
  return before;
}

AddressedMessages Coordinator::MakePlanAndTell() {
  if (job_->discarding) return {};
  job_->register_deadline.reset();
  if (!job_->discard_error.ok()) return Refuse(job_->discard_error);
  v1::PlanInputs message;
  message.set_job(job_->name);
  message.set_job_incarnation(job_->incarnation);
  message.set_nodes(options_.nodes);
  message.set_lanes_per_node(options_.lanes_per_node);
  message.set_lane_memory_bytes(options_.lane_memory_bytes);
  if (std::optional<v1::CostTable> costs = CostsOfPlan()) {
    *message.mutable_costs() = *std::move(costs);
  }
  message.set_restore_step(job_->restore_step);
  message.set_launch(job_->launch);
  for (const auto& [rank, registration] : job_->registrations) {
    *message.add_registrations() = registration;
  }
  if (absl::Status fits = CheckPlanBytes(message); !fits.ok()) return Refuse(fits);
  absl::StatusOr<scheduler::PlanInputs> inputs = FromProto(message);
  if (!inputs.ok()) return Refuse(WithReason(inputs.status(), "LAYOUT_INVALID"));
  job_->inputs = std::make_unique<scheduler::PlanInputs>(*std::move(inputs));
  absl::StatusOr<scheduler::Plan> plan = scheduler::MakePlan(*job_->inputs);
  if (!plan.ok()) return Refuse(WithReason(plan.status(), "LAYOUT_INVALID"));
  if (plan->units.empty()) {
    return Refuse(Error(
        absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
        Say("job '", Named("job", job_->name), "': of ", Named("world_size", job_->world_size),
            " trainers none has registered "
            "a parameter on route muon or adamw: there is nothing to update")));
  }
  job_->plan = std::make_unique<scheduler::Plan>(*std::move(plan));
  AddressedMessages out;
  job_->wire = message;
  *out.emplace_back().message.mutable_plan() = std::move(message);
  return out;
}

absl::Status Coordinator::CheckPlanBytes(const v1::PlanInputs& inputs) const {
  const auto bytes = static_cast<int64_t>(inputs.ByteSizeLong());
  if (options_.nodes == 1 || bytes <= options_.peer_message_bytes_max) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
               Say("job '", Named("job", inputs.job()), "': what its ",
                   Named("world_size", inputs.registrations_size()), " trainers register has ",
                   Named("bytes", bytes), " bytes, at most ",
                   Named("limit_bytes", options_.peer_message_bytes_max),
                   " cross between daemons: a larger --peer_message_bytes_max, on all of them"));
}

AddressedMessages Coordinator::Refuse(const absl::Status& status) {
  AddressedMessages out;
  v1::RegistrationRefused& refused = *out.emplace_back().message.mutable_refused();
  refused.set_job(job_->name);
  refused.set_code(static_cast<int32_t>(status.code()));
  refused.set_message(std::string(status.message()));
  refused.set_reason(ReasonOf(status));
  for (const auto& [name, value] : MetadataOf(status)) (*refused.mutable_metadata())[name] = value;
  job_->registrations.clear();
  job_->register_deadline.reset();
  job_->inputs.reset();
  job_->plan.reset();
  job_->ready.clear();
  job_->blobs.clear();
  return out;
}

AddressedMessages Coordinator::OnPlanReady(TimePoint now, const v1::PlanReady& ready) {
  if (job_ == nullptr || job_->plan == nullptr || ready.epoch() != epoch_) return {};
  if (job_->steps != nullptr && !job_->interruption.has_value()) return {};
  scheduler::Message error;
  std::string reason;
  absl::StatusCode code = absl::StatusCode::kResourceExhausted;
  if (!ready.error().empty()) {
    reason = ready.reason().empty() ? "NODE_NOT_READY" : ready.reason();
    if (!ready.reason().empty()) code = absl::StatusCode::kFailedPrecondition;
    error = Say("node ", Named("node", ready.node()), ": ", ready.error());
  } else if (ready.digest() != job_->plan->digest) {
    reason = "PLAN_DIFFERS";
    code = absl::StatusCode::kInternal;
    error =
        Say("node ", Named("node", ready.node()), " made plan ", Named("digest", ready.digest()),
            ", the coordinator ", Named("coordinators_digest", job_->plan->digest));
  }
  // It has left already, and the end of its stream is on the way.
  if (reason == "DRAINING") return OnMemberGone(now, ready.node(), "it leaves");
  if (!reason.empty()) {
    if (job_->rolled_back && job_->steps == nullptr) {
      // The newest step that every owner has: not this one. Each time it is an older one.
      const int64_t older = ready.older_snapshot();
      if (reason != "SNAPSHOT_BROKEN" || older <= 0 || older >= job_->restore_step) {
        return EndJob(error.text, reason);
      }
      NextEpoch();
      return RollBack(job_->wire, older, error.text);
    }
    if (job_->steps != nullptr) return LanesLost(now, error.text);
    return Refuse(Error(code, reason, error));
  }
  job_->ready[ready.node()] = ready.digest();
  if (job_->ready.size() < static_cast<size_t>(options_.nodes)) return {};
  const scheduler::Attempt first =
      scheduler::MakeAttempt(scheduler::GroupEpoch(epoch_), ++attempts_);
  if (job_->steps != nullptr) {
    const Interruption why = *std::exchange(job_->interruption, std::nullopt);
    AddressedMessages out = Broadcast(job_->steps->OnReformed(first, why.reason, why.detail));
    std::optional<v1::SaveState> again;
    if (job_->snapshots != nullptr) again = job_->snapshots->OnReformed();
    if (again.has_value()) {
      // After the commit that is told again: lanes copy what they have finished.
      const bool told = out.size() > 1 && out[1].message.has_decision();
      Addressed save;
      *save.message.mutable_save() = *std::move(again);
      out.insert(out.begin() + (told ? 1 : 0), std::move(save));
    }
    AddressedMessages restarted = RestartWhenAttached(now);
    std::move(restarted.begin(), restarted.end(), std::back_inserter(out));
    return out;
  }
  job_->steps = std::make_unique<scheduler::StepCoordinator>(
      *job_->inputs, *job_->plan, first, scheduler::StepId(job_->restore_step), options_.step);
  if (options_.snapshots) {
    job_->snapshots = std::make_unique<SnapshotCoordinator>(
        SnapshotCoordinator::Job{&job_->wire, job_->inputs.get(), job_->plan.get()},
        options_.snapshot,
        job_->restore_step > 0 ? std::optional(scheduler::StepId(job_->restore_step))
                               : std::nullopt,
        now);
  }
  AddressedMessages out = Broadcast({job_->steps->Current()});
  AddressedMessages restarted = RestartWhenAttached(now);
  std::move(restarted.begin(), restarted.end(), std::back_inserter(out));
  return out;
}

AddressedMessages Coordinator::OnRendezvous(const v1::Rendezvous& rendezvous) {
  if (job_ == nullptr || rendezvous.epoch() != epoch_) return {};
  std::map<int32_t, std::string>& blobs = job_->blobs[rendezvous.rail()];
  blobs[rendezvous.node()] = rendezvous.blob();
  if (blobs.size() < static_cast<size_t>(options_.nodes)) return {};
  AddressedMessages out;
  v1::RendezvousComplete& complete = *out.emplace_back().message.mutable_rendezvous();
  complete.set_rail(rendezvous.rail());
  complete.set_epoch(epoch_);
  for (const auto& [node, blob] : blobs) complete.add_blobs(blob);
  return out;
}

AddressedMessages Coordinator::OnRankGone(TimePoint now, int32_t from, const v1::RankGone& gone) {
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
  job_->first_weights.Remove(scheduler::TrainerRank(gone.rank()));
  if (job_->plan == nullptr) job_->registrations.erase(gone.rank());
  // One that was rolled back has its state in a snapshot, and ranks that come back one by one.
  if (job_->rolled_back && job_->steps == nullptr) {
    return gone.closed() ? EndJob(gone.detail(), "TRAINER_LOST") : AddressedMessages();
  }
  const bool replaceable = !gone.closed() && job_->steps != nullptr && !job_->steps->lost();
  const bool keeps = job_->rolled_back || (job_->steps != nullptr && job_->steps->has_state());
  if (job_->open_ranks.empty() && !(replaceable && keeps)) {
    return EndWhenSaved(now, "every rank has left");
  }
  if (gone.closed() || job_->steps == nullptr) {
    return Lost(now, scheduler::OutcomeReason::kTrainerMissing, gone.detail());
  }
  AddressedMessages out = Broadcast(job_->steps->OnRankGone(
      now, scheduler::TrainerRank(gone.rank()), gone.incarnation(), gone.detail()));
  EndIfDeserted(now, out);
  return out;
}

// Nobody is left, and nobody can come back.
void Coordinator::EndIfDeserted(TimePoint now, AddressedMessages& out) {
  if (!job_->steps->lost() || !job_->open_ranks.empty() || job_->ends.has_value()) return;
  AddressedMessages ended =
      EndWhenSaved(now, "every rank has died, and no replacement came in time");
  std::move(ended.begin(), ended.end(), std::back_inserter(out));
}

AddressedMessages Coordinator::OnMemberGone(TimePoint now, int32_t node, const std::string& why) {
  const std::string detail = absl::StrCat("the daemon of node ", node, " is gone: ", why);
  states_.clear();
  finding_ = false;
  early_.clear();
  leavers_.clear();
  if (job_ != nullptr && job_->steps == nullptr && job_->rolled_back) return {};
  const bool waits = options_.step.session_linger.count() > 0;
  if (job_ == nullptr || job_->steps == nullptr || job_->steps->lost() || !waits) {
    return Lost(now, scheduler::OutcomeReason::kPeerLost, detail);
  }
  job_->steps->Suspend();
  job_->interruption = Interruption{scheduler::OutcomeReason::kPeerLost, detail};
  return {};
}

AddressedMessages Coordinator::Lost(TimePoint now, scheduler::OutcomeReason reason,
                                    const std::string& detail) {
  if (job_ == nullptr) return {};
  if (job_->steps != nullptr) return Broadcast(job_->steps->OnLost(now, reason, detail));
  if (job_->plan == nullptr && reason == scheduler::OutcomeReason::kTrainerMissing) {
    return {};  // others may still register; the deadline names who is missing
  }
  const char* name = reason == scheduler::OutcomeReason::kTrainerMissing ? "TRAINER_LOST"
                     : reason == scheduler::OutcomeReason::kLaneLost     ? "LANE_LOST"
                                                                         : "NODE_NOT_READY";
  return Refuse(Error(absl::StatusCode::kUnavailable, name, detail));
}

AddressedMessages Coordinator::OnTick(TimePoint now) {
  AddressedMessages out = Advance(now);
  HaltForLeavers(now, out);
  TellWaiting(now, out);
  return out;
}

AddressedMessages Coordinator::Advance(TimePoint now) {
  if (job_ == nullptr) return {};
  const bool complete = job_->registrations.size() == static_cast<size_t>(job_->world_size);
  if (job_->register_deadline.has_value() && now >= *job_->register_deadline && !complete) {
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < job_->world_size; ++rank) {
      if (!job_->registrations.contains(rank)) missing.push_back(rank);
    }
    return Refuse(Error(
        absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
        Say("job '", Named("job", job_->name), "': of ", Named("world_size", job_->world_size),
            " ranks these have not registered in time: ",
            Named("missing", absl::StrJoin(missing, ", ")),
            ": look at their logs, and start all of them again")));
  }
  if (AddressedMessages unready = GiveUpUnready(now); !unready.empty()) return unready;
  if (job_ == nullptr || job_->steps == nullptr) return {};
  if (job_->steps->has_state()) job_->first_weights.Clear();
  if (AddressedMessages expelled = ExpelUnattached(now); !expelled.empty()) return expelled;
  if (job_->ends.has_value() && now >= job_->ends_by) return EndJob(*job_->ends);
  const bool lost = job_->steps->lost();
  AddressedMessages out = Broadcast(job_->steps->OnTick(now));
  if (!lost && job_->steps->lost()) SaveLast(now, out);
  EndIfDeserted(now, out);
  return out;
}

AddressedMessages Coordinator::EndJob(const std::string& why, const std::string& reason,
                                      const scheduler::Metadata& metadata) {
  AddressedMessages out;
  v1::JobEnded& ended = *out.emplace_back().message.mutable_job_ended();
  ended.set_job(job_->name);
  ended.set_why(why);
  ended.set_reason(reason);
  for (const auto& [name, value] : metadata) (*ended.mutable_metadata())[name] = value;
  ended_ = {job_->incarnation, out.back().message};
  if (job_->steps != nullptr) {
    // Attempts only grow, whatever job they belong to.
    attempts_ = static_cast<uint32_t>(job_->steps->Current().attempt.value());
  }
  job_.reset();
  return out;
}

}  // namespace dmuond::server
