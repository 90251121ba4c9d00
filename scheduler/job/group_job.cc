#include "scheduler/job/group_job.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
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
  }
  return "";
}

// Nonsense would overflow.
std::chrono::milliseconds PatienceOf(const v1::Leaving& leaving) {
  constexpr std::chrono::milliseconds kMax = std::chrono::hours(24);
  return std::chrono::milliseconds(std::clamp<int64_t>(leaving.patience_ms(), 0, kMax.count()));
}

}  // namespace

AddressedMessages GroupJob::Broadcast(TimePoint now, std::vector<CoordinatorAction> actions) {
  AddressedMessages out;
  for (CoordinatorAction& action : actions) {
    if (auto* go = std::get_if<Go>(&action)) {
      job_->goes->Add(now, job_->steps->Current().gather, std::move(*go));
      continue;
    }
    Addressed& addressed = out.emplace_back();
    if (const auto* open = std::get_if<OpenAttempt>(&action)) {
      *addressed.message.mutable_open() = ToProto(*open);
    } else if (const auto* begun = std::get_if<Begun>(&action)) {
      addressed.node = begun->node.value();
      *addressed.message.mutable_submitted() = ToProto(begun->submission);
    } else if (const auto* expel = std::get_if<Expel>(&action)) {
      addressed.message.mutable_expel()->set_rank(expel->rank.value());
      addressed.message.mutable_expel()->set_attempt(expel->attempt.value());
      addressed.message.mutable_expel()->set_detail(expel->detail);
    } else if (const auto* overdue = std::get_if<GatherOverdue>(&action)) {
      addressed.node = overdue->node.value();
      addressed.message.mutable_gather_overdue()->set_attempt(overdue->attempt.value());
      addressed.message.mutable_gather_overdue()->set_detail(overdue->detail);
    } else if (const auto* republish = std::get_if<Republish>(&action)) {
      addressed.message.mutable_republish()->set_attempt(republish->attempt.value());
      addressed.message.mutable_republish()->set_step(republish->step.value());
    } else {
      *addressed.message.mutable_decision() = ToProto(std::get<Decision>(action));
    }
  }
  return out;
}

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
      allowed = may_follow({Phase::kPreparing, Phase::kInterrupted});
      break;
    case Phase::kInterrupted:
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

GroupActions GroupJob::Complete(TimePoint now, AddressedMessages messages) {
  AddSnapshots(now, messages);
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
  GroupActions actions{std::move(messages), {}};
  if (order_.has_value()) actions.plans.push_back(*std::exchange(order_, std::nullopt));
  return actions;
}

GroupActions GroupJob::OnFormed(TimePoint now, uint32_t epoch) {
  epoch_ = epoch;
  attempts_ = 0;
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

bool GroupJob::OfAnotherJob(const v1::MemberMessage& message) const {
  return job_ != nullptr && !message.job().empty() && message.job() != job_->name &&
         !OfAnyJob(message);
}

AddressedMessages GroupJob::Dispatch(TimePoint now, int32_t from,
                                     const v1::MemberMessage& message) {
  using Kind = v1::MemberMessage::MessageCase;
  if (!Formed() && OfRanks(message)) {
    early_.emplace_back(from, message);
    return {};
  }
  if (OfAnotherJob(message)) return {};
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
  if (job_ == nullptr || !job_->has_steps()) return {};
  switch (message.message_case()) {
    case Kind::kReports:
      return OnReports(now, from, message.reports());
    case Kind::kVote: {
      const v1::Vote& vote = message.vote();
      if (AddressedMessages ended = EndWhereNotFinite(vote); !ended.empty()) return ended;
      std::vector<UnitNorm> norms;
      norms.reserve(vote.norms_size());
      for (const v1::UnitNorm& norm : vote.norms()) norms.push_back(FromProto(norm));
      return Broadcast(now, job_->steps->OnVote(now, Attempt(vote.attempt()), NodeRank(vote.node()),
                                                vote.plan_digest(), norms, vote.error()));
    }
    default:
      return {};
  }
}

AddressedMessages GroupJob::OnReports(TimePoint now, int32_t from, const v1::Reports& reports) {
  AddressedMessages out;
  const auto perform = [&](std::vector<CoordinatorAction> actions) {
    if (actions.empty()) return;
    AddressedMessages told = Broadcast(now, std::move(actions));
    std::move(told.begin(), told.end(), std::back_inserter(out));
  };
  // What cannot be read comes from another build, which does not come so far.
  for (const v1::RankSubmitted& submitted : reports.submitted()) {
    const absl::StatusOr<Submission> submission = FromProto(submitted);
    if (submission.ok()) perform(job_->steps->OnSubmission(now, *submission));
  }
  for (const v1::RailReady& wire : reports.ready()) {
    const absl::StatusOr<RailReady> ready = FromProto(wire);
    if (ready.ok()) perform(job_->steps->OnRailReady(now, NodeRank(from), *ready));
  }
  return out;
}

AddressedMessages GroupJob::OnRankSession(int32_t from, const v1::RankSession& session) {
  const uint64_t joined = session.job_incarnation();
  if (joined != 0 && (job_ == nullptr || job_->incarnation != joined)) return {};
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
  if (!job_->has_plan() && !job_->goes_back && job_->restore_step != session.restore_step()) {
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

std::optional<v1::CostTable> GroupJob::CostsOfPlan() const {
  const v1::CostTable here = ToProto(options_.costs.value_or(options_.estimates));
  if (job_->restore_step == 0 || options_.replan) return here;
  const std::optional<v1::CostTable>& before = job_->restore_costs;
  // What was measured on another device says nothing of this one.
  const bool other =
      options_.costs.has_value() && before.has_value() && here.device() != before->device();
  if (other) return here;
  return before;
}

AddressedMessages GroupJob::PlanRegistered() {
  if (job_->discarding) return {};
  job_->register_deadline.reset();
  if (!job_->discard_error.ok()) return Refuse(job_->discard_error);
  v1::PlanInputs message;
  message.set_job(job_->name);
  message.set_job_incarnation(job_->incarnation);
  message.set_nodes(options_.nodes);
  message.set_lanes_per_node(options_.lanes_per_node);
  message.set_lane_memory_bytes(options_.lane_memory_bytes);
  if (options_.memory_granule_bytes != 1) {
    message.set_memory_granule_bytes(options_.memory_granule_bytes);
  }
  if (std::optional<v1::CostTable> costs = CostsOfPlan()) {
    *message.mutable_costs() = *std::move(costs);
  }
  message.set_restore_step(job_->restore_step);
  message.set_launch(job_->launch);
  if (absl::Status added = job_->registrations.AddTo(message); !added.ok()) {
    return Refuse(WithReason(added, "LAYOUT_INVALID"));
  }
  if (absl::Status fits = CheckPlanBytes(message); !fits.ok()) return Refuse(fits);
  job_->wire = std::make_shared<const v1::PlanInputs>(std::move(message));
  OrderPlan();
  return {};
}

void GroupJob::OrderPlan() {
  job_->Enter(Phase::kPlanning);
  order_ = PlanOrder{job_->wire};
}

void GroupJob::DropOrder(TimePoint now) {
  job_->Enter(Phase::kRegistering);
  job_->register_deadline = now + options_.register_timeout;
}

bool GroupJob::Awaits(const PlanOrder& order) const {
  return job_ != nullptr && job_->phase == Phase::kPlanning && order.inputs == job_->wire;
}

GroupActions GroupJob::OnPlanMade(TimePoint now, const PlanOrder& order,
                                  absl::StatusOr<PlannedJob> made) {
  // The job has ended, or is planned anew. Of one that goes back while the group is broken, it is
  // known when the group has formed what is left.
  if (!Awaits(order) || !Formed()) return {};
  AddressedMessages out;
  if (!made.ok()) {
    out = job_->goes_back ? EndJob(std::string(made.status().message()), "STATE_LOST")
                          : Refuse(made.status());
    return Complete(now, std::move(out));
  }
  job_->planned = *std::move(made);
  job_->Enter(Phase::kPreparing);
  v1::CoordinatorMessage& message = out.emplace_back().message;
  if (job_->goes_back) {
    v1::RollBack& back = *message.mutable_roll_back();
    back.set_epoch(epoch_);
    *back.mutable_plan() = *job_->wire;
    back.set_why(job_->back_why);
    back.set_asked(job_->back_asked);
  } else {
    *message.mutable_plan() = *job_->wire;
  }
  HaltForLeavers(now, out);
  return Complete(now, std::move(out));
}

absl::Status GroupJob::CheckPlanBytes(const v1::PlanInputs& inputs) const {
  const auto bytes = static_cast<int64_t>(inputs.ByteSizeLong());
  if (options_.nodes == 1 || bytes <= options_.peer_message_bytes_max) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
               Say("job '", Named("job", inputs.job()), "': what its ",
                   Named("world_size", WorldSizeOf(inputs)), " trainers register has ",
                   Named("bytes", bytes), " bytes, at most ",
                   Named("limit_bytes", options_.peer_message_bytes_max),
                   " cross between daemons: a larger --peer_message_bytes_max, on all of them"));
}

AddressedMessages GroupJob::Refuse(const absl::Status& status) {
  AddressedMessages out;
  v1::RegistrationRefused& refused = *out.emplace_back().message.mutable_refused();
  refused.set_job(job_->name);
  refused.set_code(static_cast<int32_t>(status.code()));
  refused.set_message(std::string(status.message()));
  refused.set_reason(ReasonOf(status));
  for (const auto& [name, value] : MetadataOf(status)) (*refused.mutable_metadata())[name] = value;
  job_->Enter(Phase::kRegistering);
  job_->registrations.Clear();
  job_->register_deadline.reset();
  job_->ready.clear();
  job_->blobs.clear();
  return out;
}

AddressedMessages GroupJob::OnPlanReady(TimePoint now, const v1::PlanReady& ready) {
  if (job_ == nullptr || ready.epoch() != epoch_) return {};
  if (job_->phase != Phase::kPreparing && job_->phase != Phase::kInterrupted) return {};
  Message error;
  std::string reason;
  absl::StatusCode code = absl::StatusCode::kResourceExhausted;
  if (!ready.error().empty()) {
    reason = ready.reason().empty() ? "NODE_NOT_READY" : ready.reason();
    if (!ready.reason().empty()) code = absl::StatusCode::kFailedPrecondition;
    error = Say("node ", Named("node", ready.node()), ": ", ready.error());
  } else if (ready.digest() != job_->planned.plan->digest) {
    reason = "PLAN_DIFFERS";
    code = absl::StatusCode::kInternal;
    error =
        Say("node ", Named("node", ready.node()), " made plan ", Named("digest", ready.digest()),
            ", the coordinator ", Named("coordinators_digest", job_->planned.plan->digest));
  }
  // It has left already, and the end of its stream is on the way.
  if (reason == "DRAINING") return MemberGone(now, ready.node(), "it leaves");
  if (!reason.empty()) {
    if (job_->goes_back && !job_->has_steps()) {
      // The newest step that every owner has: not this one. Each time it is an older one.
      const int64_t older = ready.older_snapshot();
      if (reason != "SNAPSHOT_BROKEN" || older <= 0 || older >= job_->restore_step) {
        return EndJob(error.text, reason);
      }
      RollBack(*job_->wire, older, error.text);
      return {};
    }
    if (job_->has_steps()) return LanesLost(now, error.text);
    return Refuse(Error(code, reason, error));
  }
  job_->ready[ready.node()] = ready.digest();
  if (job_->ready.size() < static_cast<size_t>(options_.nodes)) return {};
  const Attempt first = MakeAttempt(GroupEpoch(epoch_), ++attempts_);
  if (job_->interrupted()) {
    job_->Enter(Phase::kRunning);
    const Interruption why = std::exchange(job_->interruption, {});
    AddressedMessages out = Broadcast(now, job_->steps->OnReformed(first, why.reason, why.detail));
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
  job_->Enter(Phase::kRunning);
  job_->steps = std::make_unique<StepCoordinator>(*job_->planned.inputs, *job_->planned.plan, first,
                                                  StepId(job_->restore_step), options_.step);
  job_->goes.emplace(job_->steps->tables(), options_.nodes);
  if (options_.snapshots) {
    job_->snapshots = std::make_unique<SnapshotRound>(
        SnapshotRound::Job{job_->wire.get(), job_->planned.inputs.get(), job_->planned.plan.get()},
        options_.snapshot,
        job_->restore_step > 0 ? std::optional(StepId(job_->restore_step)) : std::nullopt, now,
        job_->snapshot_counts);
  }
  AddressedMessages out = Broadcast(now, {job_->steps->Current()});
  AddressedMessages restarted = RestartWhenAttached(now);
  std::move(restarted.begin(), restarted.end(), std::back_inserter(out));
  return out;
}

AddressedMessages GroupJob::OnRendezvous(const v1::Rendezvous& rendezvous) {
  if (job_ == nullptr || !job_->has_plan() || rendezvous.epoch() != epoch_) return {};
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
  job_->steps->Suspend();
  job_->goes->Forget();
  job_->Enter(Phase::kInterrupted);
  job_->interruption = Interruption{OutcomeReason::kPeerLost, detail};
  return {};
}

AddressedMessages GroupJob::Lost(TimePoint now, OutcomeReason reason, const std::string& detail) {
  if (job_ == nullptr) return {};
  if (job_->has_steps()) return Broadcast(now, job_->steps->OnLost(now, reason, detail));
  if (!job_->has_plan() && reason == OutcomeReason::kTrainerMissing) {
    return {};  // others may still register; the deadline names who is missing
  }
  const char* name = reason == OutcomeReason::kTrainerMissing ? "TRAINER_LOST"
                     : reason == OutcomeReason::kLaneLost     ? "LANE_LOST"
                                                              : "NODE_NOT_READY";
  return Refuse(Error(absl::StatusCode::kUnavailable, name, Message{detail, {}}));
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
  const bool lost = job_->steps->lost();
  AddressedMessages out = Broadcast(now, job_->steps->OnTick(now));
  if (!lost && job_->steps->lost()) SaveLast(now, out);
  EndIfDeserted(now, out);
  return out;
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
