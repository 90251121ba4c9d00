#include "scheduler/job/node_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/impossible.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// A job goes back under the plan that it has.
bool SameButForTheStep(v1::PlanInputs a, const v1::PlanInputs& b) {
  a.set_restore_step(b.restore_step());
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

const char* Name(NodeJob::Phase phase) {
  switch (phase) {
    case NodeJob::Phase::kNone:
      return "None";
    case NodeJob::Phase::kRegistering:
      return "Registering";
    case NodeJob::Phase::kPreparing:
      return "Preparing";
    case NodeJob::Phase::kStarting:
      return "Starting";
    case NodeJob::Phase::kRestoring:
      return "Restoring";
    case NodeJob::Phase::kMapping:
      return "Mapping";
    case NodeJob::Phase::kAwaiting:
      return "Awaiting";
    case NodeJob::Phase::kRunning:
      return "Running";
    case NodeJob::Phase::kFailed:
      return "Failed";
  }
  return "?";
}

void NodeJob::Job::Enter(Phase next) {
  const auto allowed = [&] {
    switch (next) {
      case Phase::kNone:
        return false;
      case Phase::kRegistering:
        return phase != Phase::kRunning && phase != Phase::kFailed;
      case Phase::kPreparing:
        return phase == Phase::kRegistering;
      case Phase::kStarting:
        return phase >= Phase::kPreparing && phase != Phase::kFailed;
      case Phase::kRestoring:
        return phase == Phase::kStarting;
      case Phase::kMapping:
        return phase == Phase::kStarting || phase == Phase::kRestoring;
      case Phase::kAwaiting:
        return phase >= Phase::kStarting && phase <= Phase::kMapping;
      case Phase::kRunning:
        return phase == Phase::kAwaiting || phase == Phase::kRunning;
      case Phase::kFailed:
        return true;
    }
    return false;
  };
  if (!allowed()) Impossible("NodeJob", Name(phase), absl::StrCat("enter ", Name(next)));
  phase = next;
}

// ---- what is done ----

void NodeJob::Say(node::Note::Level level, const char* message,
                  std::vector<node::Note::Field> fields) {
  node::Note note;
  note.level = level;
  note.message = message;
  if (job_ != nullptr) note.fields.emplace_back("job", job_->name);
  note.fields.emplace_back("epoch", epoch_);
  for (auto& field : fields) note.fields.push_back(std::move(field));
  Do(std::move(note));
}

void NodeJob::Tell(v1::MemberMessage message) {
  if (message.job().empty()) {
    message.set_job(!about_.empty() || job_ == nullptr ? about_ : job_->name);
  }
  Do(node::TellCoordinator{std::move(message)});
}

void NodeJob::ToLane(LaneIndex lane, v1::LaneCommand command) {
  Do(node::CommandLanes{{lane}, std::move(command)});
}

// One that is new hears what it needs when it is ready.
void NodeJob::ToReadyLanes(const v1::LaneCommand& command, bool may_wait) {
  node::CommandLanes order;
  order.may_wait = may_wait;
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const LaneIndex lane(static_cast<int32_t>(i));
    if (job_->lanes[lane].ready()) order.lanes.push_back(lane);
  }
  if (order.lanes.empty()) return;
  order.command = command;
  Do(std::move(order));
}

// ---- the group ----

node::Actions NodeJob::OnFormed(TimePoint /*now*/, uint32_t epoch) {
  epoch_ = epoch;
  halted_ = false;
  if (job_ != nullptr) job_->broken_since.reset();
  TellMemberState();
  Wake();
  return Take();
}

void NodeJob::TellMemberState() {
  v1::MemberMessage message;
  v1::MemberState& state = *message.mutable_member_state();
  state.set_epoch(epoch_);
  if (job_ != nullptr && job_->failed.ok()) {
    state.set_job(job_->name);
    state.set_job_incarnation(job_->wire.job_incarnation());
    state.set_world_size(job_->world_size);
    state.set_has_memory(job_->planned.plan != nullptr);
    state.set_has_state(job_->has_state || job_->wire.restore_step() > 0);
    if (planned()) *state.mutable_plan() = job_->wire;
  }
  Tell(std::move(message));
}

node::Actions NodeJob::OnBroken(TimePoint now, const std::string& why) {
  epoch_ = 0;
  halted_ = false;
  Wake();
  if (job_ == nullptr || job_->phase == Phase::kFailed) return Take();
  job_->lanes_wanted = false;
  // One that goes back to a snapshot begins to do so again when the group has formed.
  const bool waits = job_->steps.has_value() || job_->goes_back;
  if (!waits || options_.session_linger.count() == 0) {
    Abandon(Error(absl::StatusCode::kUnavailable, "PEER_LOST", scheduler::Say(why)));
    return Take();
  }
  if (!job_->broken_since.has_value()) job_->broken_since = now;
  Say(node::Note::Level::kWarn, "the job waits for the group to form anew",
      {{"step", LastCommitted()}, {"what", why}});
  return Take();
}

bool NodeJob::OfAnotherJob() const {
  return job_ != nullptr && !about_.empty() && job_->name != about_;
}

node::Actions NodeJob::OnMessage(TimePoint now, const v1::CoordinatorMessage& message) {
  about_ = message.job();
  node::Actions actions = Hear(now, message);
  about_.clear();
  return actions;
}

node::Actions NodeJob::Hear(TimePoint now, const v1::CoordinatorMessage& message) {
  using Kind = v1::CoordinatorMessage::MessageCase;
  const bool begins_or_ends = message.has_plan() || message.has_refused() || message.has_reform() ||
                              message.has_roll_back() || message.has_job_ended();
  const bool concerns_it = begins_or_ends || !OfAnotherJob();
  switch (concerns_it ? message.message_case() : Kind::MESSAGE_NOT_SET) {
    case Kind::kPlan:
      OnPlan(message.plan());
      break;
    case Kind::kRefused:
      OnRefused(message.refused());
      break;
    case Kind::kRendezvous: {
      if (job_ == nullptr) break;
      v1::LaneCommand command;
      *command.mutable_rendezvous() = message.rendezvous();
      ToLane(LaneIndex(message.rendezvous().rail()), std::move(command));
      return TakeUnrecorded();
    }
    case Kind::kOpen:
      OnOpenAttempt(message.open());
      break;
    case Kind::kGoes:
      if (job_ != nullptr) OnGoes(message.goes());
      return TakeUnrecorded();
    case Kind::kSubmitted: {
      if (job_ == nullptr) break;
      v1::LaneCommand command;
      *command.mutable_submitted() = message.submitted();
      ToReadyLanes(command);
      return TakeUnrecorded();
    }
    case Kind::kDecision:
      OnDecision(message.decision());
      break;
    case Kind::kRepublish:
      OnRepublish(message.republish());
      break;
    case Kind::kExpel:
      OnExpel(message.expel());
      break;
    case Kind::kGatherOverdue:
      OnGatherOverdue(now, message.gather_overdue());
      break;
    case Kind::kReform:
      OnReform(message.reform());
      break;
    case Kind::kHalted:
      OnHalted(message.halted());
      break;
    case Kind::kSave:
      OnSave(message.save());
      break;
    case Kind::kSnapshotDone:
      OnSnapshotDone(message.snapshot_done());
      break;
    case Kind::kRollBack:
      OnRollBack(message.roll_back());
      break;
    case Kind::kWaiting:
      if (job_ == nullptr) break;
      job_->waiting = message.waiting();
      job_->waiting_told = now;
      return TakeUnrecorded();
    case Kind::kJobEnded:
      OnJobEnded(message.job_ended());
      break;
    default:
      break;
  }
  return Take();
}

// ---- a plan, and what it needs ----

bool NodeJob::planned() const { return WorldSizeOf(job_->wire) > 0; }

void NodeJob::BeginJob(const std::string& name, int32_t world_size) {
  job_ = std::make_unique<Job>();
  job_->name = name;
  job_->world_size = world_size;
  job_->number = ++jobs_;
  job_->snapshot = SnapshotPart(options_.node);
  ++plan_version_;
}

void NodeJob::OnPlan(const v1::PlanInputs& wire) {
  GiveWayTo(wire);
  if (job_ == nullptr) {
    // None of its trainers is of this node, whose lanes work for it all the same.
    BeginJob(wire.job(), WorldSizeOf(wire));
  }
  if (planned()) {
    if (job_->wire.job_incarnation() == wire.job_incarnation()) return;  // told before
    return TellPlanFailed(
        Error(absl::StatusCode::kUnavailable, "NODE_NOT_READY",
              scheduler::Say("job '", Named("job", wire.job()), "' cannot begin before job '",
                             Named("holder", job_->name),
                             "' has ended here: end the trainers that it still has")));
  }
  StartPreparing(wire);
}

// A job that the group has never planned is nobody's but its trainers'.
void NodeJob::GiveWayTo(const v1::PlanInputs& plan) {
  if (job_ == nullptr || planned()) return;
  if (job_->name != plan.job()) {
    return EndJob(absl::StrCat("the group runs job '", plan.job(), "'"),
                  OtherJob(plan.job(), job_->name));
  }
  if (job_->world_size != WorldSizeOf(plan)) {
    return EndJob(absl::StrCat("the group runs it with world_size ", WorldSizeOf(plan)),
                  Error(absl::StatusCode::kFailedPrecondition, "WORLD_DIFFERS",
                        scheduler::Say("the group runs job '", Named("job", job_->name),
                                       "' with world_size ", Named("world_size", WorldSizeOf(plan)),
                                       ", trainers of node ", Named("node", options_.node), " say ",
                                       Named("given_world_size", job_->world_size),
                                       ": all ranks of a job have one WORLD_SIZE")));
  }
  // It is lost, and keeps the group from nothing but its own sessions, which have yet to hear of
  // that. They begin anew.
  if (!job_->failed.ok()) EndJob("its group broke while it registered");
}

void NodeJob::StartPreparing(const v1::PlanInputs& wire) {
  if (WorldSizeOf(wire) != job_->world_size || wire.nodes() != options_.nodes ||
      wire.lanes_per_node() != options_.lanes) {
    return TellPlanFailed(Error(
        absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
        scheduler::Say("the plan of job '", Named("job", job_->name), "' is for ",
                       Named("given_world_size", WorldSizeOf(wire)), " ranks, ",
                       Named("given_nodes", wire.nodes()), " nodes and ",
                       Named("given_lanes", wire.lanes_per_node()), " lanes on each; here it is ",
                       Named("world_size", job_->world_size), ", ", Named("nodes", options_.nodes),
                       " and ", Named("lanes", options_.lanes))));
  }
  job_->Enter(Phase::kPreparing);
  job_->wire = wire;
  job_->launch = wire.launch();
  ++plan_version_;
  node::Prepare prepare;
  prepare.inputs = wire;
  if (job_->resume.has_value()) prepare.resume = job_->resume->manifest;
  Do(std::move(prepare));
}

node::Actions NodeJob::OnPrepared(TimePoint /*now*/, absl::StatusOr<Prepared> prepared) {
  if (job_ == nullptr || job_->planned.plan != nullptr || !planned()) {
    Impossible("NodeJob", Name(phase()), "prepared");
    return Take();
  }
  Wake();
  if (!prepared.ok()) {
    job_->wire.Clear();
    ++plan_version_;
    if (job_->phase == Phase::kPreparing) job_->Enter(Phase::kRegistering);
    TellPlanFailed(prepared.status());
    return Take();
  }
  job_->planned = std::move(prepared->planned);
  job_->host_copies = prepared->host_copies;
  job_->lanes = LaneSet(LaneId(options_.node * options_.lanes), options_.lanes, options_.watch);
  const PlanQuality& quality = job_->planned.plan->quality;
  Say(node::Note::Level::kInfo, "plan made",
      {{"units", job_->planned.plan->units.size()},
       {"buckets", job_->planned.plan->buckets},
       {"makespan_us", quality.makespan_us},
       {"gap", quality.gap},
       {"imbalance", quality.imbalance}});
  // Sessions that the plan does not know as they are: faster than the news of it, or of another
  // coordinator's mind.
  for (const auto& [id, session] : ranks_.sessions()) {
    if (session.state == RankTable::State::kOpen || !session.denied.ok()) continue;
    absl::Status same = CheckReplacement(session, session.registration);
    if (!same.ok()) ranks_.Deny(session.rank, session.incarnation, same);
  }
  // One that was lost meanwhile ends with its sessions.
  if (job_->phase == Phase::kFailed) return Take();
  job_->Enter(Phase::kStarting);
  // While the group is broken there is no epoch that lanes could be started for: one that goes back
  // is told to again when it has formed.
  if (epoch_ == 0) return Take();
  Do(node::StartLanes{.epoch = epoch_});
  return Take();
}

void NodeJob::TellPlanFailed(const absl::Status& why, int64_t older_snapshot) {
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  ready.set_older_snapshot(older_snapshot);
  ready.set_node(options_.node);
  ready.set_epoch(epoch_);
  ready.set_error(std::string(why.message()));
  ready.set_reason(ReasonOf(why));
  Tell(std::move(message));
}

void NodeJob::TellCannotGoOn() {
  if (job_ != nullptr && !OfAnotherJob() && !job_->failed.ok()) {
    return TellPlanFailed(job_->failed);
  }
  TellPlanFailed(Error(absl::StatusCode::kUnavailable, leaves_ ? "DRAINING" : "JOB_ENDED",
                       scheduler::Say("this node does not have the job any more")));
}

void NodeJob::OnRefused(const v1::RegistrationRefused& refused) {
  if (job_ == nullptr || job_->name != refused.job()) return;
  const absl::Status status =
      WithMetadata(Error(static_cast<absl::StatusCode>(refused.code()), refused.reason(),
                         scheduler::Say(refused.message())),
                   {refused.metadata().begin(), refused.metadata().end()});
  Wake();
  if (refused.has_session()) {
    // Before there is a session: the job that there is does not end for it.
    if (refused.session().discard() && refused.session().incarnation() == 0) {
      Do(node::DiscardRefused{refused.session().rank(), status});
    }
    ranks_.Deny(refused.session().rank(), refused.session().incarnation(), status);
    return;
  }
  // One that was lost is refused nothing: this is about the next job of its name, on other nodes.
  if (job_->phase == Phase::kFailed) return;
  Say(node::Note::Level::kWarn, "layout refused", {{"what", refused.message()}});
  ranks_.RefuseAll(status);  // a corrected layout may be registered
  Do(node::AbandonCopies{"the layout was refused"});
  Do(node::StopRestoring{});
  Do(node::EndLanes{});
  Do(node::DropMemory{});
  job_->lanes = {};
  job_->restored = false;
  job_->goes_back = false;
  job_->planned = {};
  job_->wire.Clear();
  ++plan_version_;
  job_->Enter(Phase::kRegistering);
}

// ---- lanes ----

void NodeJob::GiveUpLanes() {
  Do(node::AbandonCopies{"the lanes are replaced"});
  Do(node::StopRestoring{});
  // Killed: the state table says what they have come to, and whoever waits in a lane's queue is
  // answered by its successor.
  Do(node::EndLanes{.kill = true});
  job_->lanes.GiveUp();
}

void NodeJob::ReplaceLanes(const std::string& why) {
  Say(node::Note::Level::kWarn, "new lanes", {{"step", LastCommitted()}, {"what", why}});
  job_->Enter(Phase::kStarting);
  job_->over_old_memory = true;
  job_->lanes_wanted = true;
  job_->broken_since.reset();
  ranks_.ForgetMappings();
  GiveUpLanes();
  Wake();
}

node::Actions NodeJob::OnPlacesFree() {
  if (job_ == nullptr || job_->phase != Phase::kStarting || !job_->lanes_wanted ||
      !job_->lanes.all_absent()) {
    return {};
  }
  Do(node::StartLanes{.epoch = epoch_, .anew = true, .state_is_void = job_->state_is_void});
  return Take();
}

node::Actions NodeJob::OnLanesStarted(TimePoint now, const absl::Status& started) {
  if (job_ == nullptr || job_->phase != Phase::kStarting) {
    Impossible("NodeJob", Name(phase()), "lanes started");
    return Take();
  }
  if (!absl::IsResourceExhausted(started)) job_->lanes_lack_resources_since.reset();
  if (started.ok()) {
    job_->lanes_wanted = false;
    job_->state_is_void = false;
    for (size_t i = 0; i < job_->lanes.size(); ++i) {
      job_->lanes.OnStarted(LaneIndex(static_cast<int32_t>(i)), epoch_);
    }
    return Take();
  }
  Do(node::EndLanes{.kill = true});
  // The job's state may be in this memory alone, and what is lacking now there may be at the next
  // tick. The coordinator waits for a --register_timeout, and is told why before that.
  if (job_->over_old_memory && absl::IsResourceExhausted(started)) {
    std::optional<TimePoint>& since = job_->lanes_lack_resources_since;
    if (!since.has_value()) {
      since = now;
      Say(node::Note::Level::kWarn, "new lanes wait for what the machine lacks",
          {{"what", started.ToString(absl::StatusToStringMode::kWithNoExtraData)}});
    }
    if (now - *since < options_.register_timeout / 2) return Take();
  }
  job_->lanes_wanted = false;
  TellPlanFailed(started);
  return Take();
}

void NodeJob::PrepareLanes() {
  if (job_->wire.restore_step() > 0 && !job_->restored) {
    if (!job_->host_copies) {
      return TellPlanFailed(Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                                  scheduler::Say("this node has no --snapshot_dir")));
    }
    job_->Enter(Phase::kRestoring);
    Say(node::Note::Level::kInfo, "restoring", {{"step", job_->wire.restore_step()}});
    Do(node::Restore{StepId(job_->wire.restore_step())});
    return;
  }
  if (job_->over_old_memory) {
    for (const auto& [rank, command] : ranks_.attachments()) {
      for (size_t i = 0; i < job_->lanes.size(); ++i) {
        const LaneIndex lane(static_cast<int32_t>(i));
        ToLane(lane, command);
        job_->lanes.BeginMapping(rank, lane);
      }
    }
  }
  if (!job_->lanes.mapping()) return TellPlanReady();
  job_->Enter(Phase::kMapping);
}

node::Actions NodeJob::OnRestored(TimePoint /*now*/, absl::StatusOr<Restored> restored,
                                  int64_t older_snapshot) {
  // A node that cannot restore ends the job on all of them; others may be at it.
  if (job_ != nullptr && job_->phase == Phase::kFailed) return Take();
  if (job_ == nullptr || job_->phase != Phase::kRestoring || job_->lanes.loading()) {
    Impossible("NodeJob", Name(phase()), "restored");
    return Take();
  }
  if (!restored.ok()) {
    Say(node::Note::Level::kError, "a snapshot cannot be restored",
        {{"step", job_->wire.restore_step()},
         {"what", restored.status().ToString(absl::StatusToStringMode::kWithNoExtraData)}});
    absl::Status why = restored.status();
    if (ReasonOf(why).empty()) why = WithReason(why, "SNAPSHOT_BROKEN");
    TellPlanFailed(why, older_snapshot);
    return Take();
  }
  const auto& trainers = job_->planned.inputs->layout.trainers;
  const Attempt attempt(restored->from.manifest.attempt());
  for (const auto& [rank, bytes] : restored->from.trainers) {
    if (static_cast<size_t>(rank.value()) >= trainers.size() ||
        trainers[rank.value()].node.value() != options_.node) {
      continue;
    }
    job_->trainer_states[rank.value()] = {attempt, bytes};
  }
  job_->snapshot.set_durable_step(restored->from.step());
  job_->lanes.BeginLoading();
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    v1::LaneCommand command;
    v1::LaneCommand::LoadState& load = *command.mutable_load_state();
    load.set_step(restored->from.step());
    load.mutable_updates()->Add(restored->updates[i].begin(), restored->updates[i].end());
    ToLane(LaneIndex(static_cast<int32_t>(i)), std::move(command));
  }
  return Take();
}

void NodeJob::OnStateLoaded(LaneIndex lane, const v1::LaneReport::StateLoaded& loaded) {
  if (job_->phase != Phase::kRestoring) return;
  if (!loaded.error().empty()) {
    return TellPlanFailed(absl::InternalError(absl::StrCat(
        "lane ", lane.value(), " cannot take the snapshot's state: ", loaded.error())));
  }
  if (!job_->lanes.OnLoaded(lane)) return;
  job_->restored = true;
  Say(node::Note::Level::kInfo, "restored", {{"step", job_->wire.restore_step()}});
  PrepareLanes();
}

void NodeJob::TellPlanReady() {
  job_->Enter(Phase::kAwaiting);
  if (job_->over_old_memory) TellRanksAgain();
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  ready.set_node(options_.node);
  ready.set_digest(job_->planned.plan->digest);
  ready.set_epoch(job_->lanes.epoch());
  Tell(std::move(message));
  Wake();
}

// The coordinator may have missed what happened here while the link was down; it ignores what it
// knows already.
void NodeJob::TellRanksAgain() {
  for (const auto& [rank, gone] : ranks_.gone()) {
    v1::MemberMessage message;
    *message.mutable_rank_gone() = gone;
    Tell(std::move(message));
  }
  for (const auto& [id, session] : ranks_.sessions()) {
    Tell(NewsOfSession(session));
    if (session.mapped() && !session.must_acknowledge.has_value()) Tell(NewsOfAttached(session));
  }
}

node::Actions NodeJob::OnLaneReport(TimePoint /*now*/, LaneIndex lane,
                                    const v1::LaneReport& report) {
  using Kind = v1::LaneReport::ReportCase;
  if (job_ == nullptr) return Take();
  job_->lanes.OnReport(lane);
  switch (report.report_case()) {
    case Kind::kReady:
      if (job_->lanes.OnReady(lane, report.ready().device()) && job_->phase == Phase::kStarting) {
        PrepareLanes();
      }
      break;
    case Kind::kRendezvous: {
      v1::MemberMessage message;
      *message.mutable_rendezvous() = report.rendezvous();
      Tell(std::move(message));
      return TakeUnrecorded();
    }
    case Kind::kRailReady: {
      v1::MemberMessage message;
      *message.mutable_reports()->add_ready() = report.rail_ready();
      Tell(std::move(message));
      return TakeUnrecorded();
    }
    case Kind::kGathered:
      OnGathered(lane, report.gathered());
      break;
    case Kind::kPublished:
      OnPublished(lane, report.published());
      break;
    case Kind::kAttached: {
      const v1::LaneReport::Attached& attached = report.attached();
      ranks_.OnLaneMapped(attached.rank(), attached.incarnation(), lane, attached.error());
      if (job_->lanes.OnMapped(attached.rank(), lane) && job_->phase == Phase::kMapping) {
        TellPlanReady();
      }
      Wake();
      break;
    }
    case Kind::kCopied:
      OnCopied(lane, report.copied());
      break;
    case Kind::kStateLoaded:
      OnStateLoaded(lane, report.state_loaded());
      break;
    case Kind::kPong: {
      const v1::LaneReport::Pong& pong = report.pong();
      LaneWatch::Answer answer;
      answer.number = pong.number();
      answer.progress = pong.progress();
      answer.device_busy = pong.device_busy();
      answer.awaits_rail = pong.awaits_rail();
      answer.awaited_ranks = {pong.awaited_ranks().begin(), pong.awaited_ranks().end()};
      job_->lanes.OnPong(lane, answer);
      return TakeUnrecorded();
    }
    case Kind::kFailed:
      Say(node::Note::Level::kError, "lane failed",
          {{"lane", lane.value()}, {"what", report.failed().what()}});
      return TakeUnrecorded();
    default:
      break;
  }
  return Take();
}

node::Actions NodeJob::OnLaneGone(TimePoint /*now*/, LaneIndex lane,
                                  const std::string& last_words) {
  if (job_ == nullptr || !job_->lanes.OnGone(lane)) return Take();
  Do(node::AbandonCopies{absl::StrCat("lane ", lane.value(), " ended: ", last_words)});
  const int32_t id = job_->lanes[lane].id.value();
  Say(node::Note::Level::kError, "lane lost",
      {{"step", LastCommitted()}, {"lane", id}, {"what", last_words}});
  v1::MemberMessage message;
  message.mutable_lane_lost()->set_lane(id);
  message.mutable_lane_lost()->set_detail(last_words);
  message.mutable_lane_lost()->set_epoch(job_->lanes.epoch());
  // The coordinator says what comes of it: other lanes, or that this was once too often, or that a
  // job that had not begun is refused.
  Tell(std::move(message));
  return Take();
}

// ---- new epochs and rollbacks ----

void NodeJob::OnReform(const v1::Reform& reform) {
  epoch_ = reform.epoch();
  if (job_ == nullptr || OfAnotherJob() || job_->planned.plan == nullptr || !job_->failed.ok()) {
    return TellCannotGoOn();
  }
  ReplaceLanes(reform.why());
}

void NodeJob::OnRollBack(const v1::RollBack& back) {
  epoch_ = back.epoch();
  const v1::PlanInputs& plan = back.plan();
  GiveWayTo(plan);
  if (job_ != nullptr && (job_->name != plan.job() || !job_->failed.ok())) return TellCannotGoOn();
  Say(node::Note::Level::kWarn, "the job goes back to a snapshot",
      {{"from_step", LastCommitted()}, {"to_step", plan.restore_step()}, {"what", back.why()}});
  if (job_ == nullptr || !planned()) {
    OnPlan(plan);
    job_->goes_back = planned();
    return;
  }
  if (!SameButForTheStep(plan, job_->wire)) {
    return TellPlanFailed(
        Error(absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
              scheduler::Say("job '", Named("job", plan.job()), "' is to go back to step ",
                             Named("to_step", plan.restore_step()),
                             " under another plan than the one that it has here")));
  }
  job_->goes_back = true;
  job_->back = {plan.restore_step(), back.epoch(), back.asked()};
  ranks_.GoBack(job_->back);
  job_->wire = plan;
  ++plan_version_;
  // What is being prepared has no state yet, and no lanes: they start when it is there.
  if (job_->phase == Phase::kPreparing) return;
  ForgetState();
  ReplaceLanes(back.why());
}

void NodeJob::ForgetState() {
  job_->steps.reset();
  job_->has_state = false;
  job_->applied_attempt = 0;
  job_->published_attempt = 0;
  job_->publishing_attempt = 0;
  job_->lanes.ForgetState();
  Do(node::ForgetLoads{});
  job_->submitted_states.clear();
  job_->trainer_states.clear();
  Do(node::GiveUpCopies{"the job goes back to an older step"});
  job_->restored = false;
  job_->snapshot.GoBack();
  // In a new epoch every attempt is newer than those that trainers have died in.
  ranks_.VacanciesEndNothing();
  job_->state_is_void = true;
  if (options_.node == 0) Do(node::SetSnapshotsAside{StepId(job_->wire.restore_step())});
}

// ---- the end ----

void NodeJob::OnJobEnded(const v1::JobEnded& ended) {
  if (job_ == nullptr || job_->name != ended.job()) return;
  if (ended.reason().empty()) {
    // One that was lost ends with its last session, which has yet to hear of that. And of one that
    // registers, the news of who is here now has crossed with this.
    if (job_->phase == Phase::kFailed || (!planned() && !ranks_.empty())) return;
    return EndJob(ended.why());
  }
  if (ended.reason() == kJobEnded) {
    return EndJob(ended.why(), JobWasEnded(job_->name, LastCommitted(), ended.why()));
  }
  const bool state_lost = ended.reason() == "STATE_LOST";
  // What is wrong with the trainers' weights is told as an error, under its own reason.
  const bool weights = absl::StartsWith(ended.reason(), "WEIGHTS_");
  if (job_->steps.has_value() && !weights) {
    // The outcome of the step that was open, for whoever waits for it.
    const OpenAttempt open = job_->steps->open();
    Decision decision;
    decision.attempt = open.attempt;
    decision.step = open.step;
    decision.verdict = Verdict::kAbort;
    decision.outcome.step = open.step;
    decision.outcome.attempt = open.attempt;
    decision.outcome.reason = state_lost ? OutcomeReason::kStateLost : OutcomeReason::kPeerLost;
    decision.outcome.detail = ended.why();
    decision.outcome.next_attempt = Attempt(open.attempt.value() + 1);
    job_->steps->OnDecision(decision);
  }
  const absl::StatusCode code = weights      ? absl::StatusCode::kFailedPrecondition
                                : state_lost ? absl::StatusCode::kDataLoss
                                             : absl::StatusCode::kUnavailable;
  Abandon(WithMetadata(Error(code, ended.reason(), scheduler::Say(ended.why())),
                       {ended.metadata().begin(), ended.metadata().end()}));
}

void NodeJob::Abandon(const absl::Status& why) {
  Say(node::Note::Level::kError, "job lost",
      {{"step", LastCommitted()}, {"what", std::string(why.message())}});
  if (job_->failed.ok()) job_->failed = why;
  job_->Enter(Phase::kFailed);
  Do(node::StopRestoring{});
  // Who waits for weights that nobody will publish is woken by poison, and then asks why.
  Do(node::Poison{});
  Wake();
  if (ranks_.empty()) EndJob("nobody is left in a job that was lost");
}

void NodeJob::EndJob(const std::string& why, const absl::Status& told) {
  Say(node::Note::Level::kInfo, "job ended", {{"step", LastCommitted()}, {"what", why}});
  const int64_t durable = job_->snapshot.durable_step().value_or(0);
  if (ReasonOf(told) != kJobEnded && (job_->ending || !ranks_.vacancies().empty()) &&
      job_->has_state && LastCommitted() > durable) {
    Say(node::Note::Level::kError,
        "state lost: it was in memory alone, and a rank did not come back",
        {{"after_step", durable}, {"last_step", LastCommitted()}});
  }
  Do(node::AbandonCopies{"the job has ended"});
  Do(node::StopRestoring{});
  Do(node::EndLanes{});
  Do(node::DropMemory{});
  Do(node::ForgetLoads{});
  std::vector<v1::MemberMessage> news;
  for (const auto& [id, session] : ranks_.sessions()) {
    Do(node::SessionEnded{id, /*with_job=*/true, told});
    news.emplace_back().set_job(job_->name);
    v1::RankGone& gone = *news.back().mutable_rank_gone();
    gone.set_rank(session.rank);
    gone.set_detail(why);
    gone.set_incarnation(session.incarnation);
  }
  ranks_.Clear();
  job_.reset();
  Wake();
  // The coordinator may have taken one that began as the job ended for the first of the next job. A
  // node that leaves says nothing more: the others wait for its successor.
  if (leaves_) return;
  for (v1::MemberMessage& message : news) Tell(std::move(message));
}

node::Actions NodeJob::EndHere(const std::string& why, const absl::Status& told) {
  EndJob(why, told);
  return Take();
}

node::Actions NodeJob::Leave() {
  leaves_ = true;
  if (job_ != nullptr) {
    if (job_->failed.ok()) {
      job_->failed =
          Error(absl::StatusCode::kUnavailable, "DRAINING",
                scheduler::Say("the daemon of node ", Named("node", options_.node), " is leaving"));
    }
    Do(node::GiveUpCopies{"the daemon is leaving"});
    EndJob("the daemon is leaving");
  }
  Wake();
  return Take();
}

// ---- for who watches ----

absl::Status NodeJob::CheckStill(uint64_t number) const {
  if (job_ == nullptr || job_->number != number) {
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED",
                 scheduler::Say("the job ended meanwhile"));
  }
  return job_->failed;
}

bool NodeJob::HasOrGetsState() const {
  return job_ != nullptr &&
         (job_->has_state || job_->wire.restore_step() > 0 || job_->resume.has_value());
}

bool NodeJob::restores() const {
  return job_ != nullptr && job_->failed.ok() && job_->wire.restore_step() > 0 && !job_->restored;
}

bool NodeJob::restores_somewhere() const {
  return job_ != nullptr && job_->failed.ok() && epoch_ != 0 && job_->wire.restore_step() > 0 &&
         !job_->steps.has_value();
}

bool NodeJob::settled() const {
  return job_ != nullptr && job_->phase == Phase::kRunning && job_->has_state && epoch_ != 0 &&
         job_->steps.has_value() && EpochOf(job_->steps->open().attempt).value() == epoch_;
}

int64_t NodeJob::LastCommitted() const {
  if (job_ == nullptr) return 0;
  if (job_->steps.has_value()) return job_->steps->last_committed().value();
  if (job_->wire.restore_step() > 0) return job_->wire.restore_step();
  return job_->resume.has_value() ? job_->resume->step() : 0;
}

std::string NodeJob::TrainerStateOf(int32_t rank) const {
  if (const auto kept = job_->trainer_states.find(rank); kept != job_->trainer_states.end()) {
    return kept->second.bytes;
  }
  if (job_->has_state || !job_->resume.has_value()) return "";
  const auto kept = job_->resume->trainers.find(TrainerRank(rank));
  return kept == job_->resume->trainers.end() ? "" : kept->second;
}

bool NodeJob::Restarted() const {
  return job_->has_state && job_->steps.has_value() &&
         job_->steps->open().attempt.value() > job_->applied_attempt;
}

// A job that goes back opens attempts, and has no state before all ranks have come to it: the only
// decision that is for good then is that somebody will not.
std::optional<std::string> NodeJob::WhyNotRestarted() const {
  if (job_ == nullptr || job_->has_state || !job_->steps.has_value()) return std::nullopt;
  const std::optional<Decision>& decided = job_->steps->last_decision();
  if (!decided.has_value() || decided->verdict != Verdict::kAbort || decided->outcome.retry) {
    return std::nullopt;
  }
  return decided->outcome.detail;
}

}  // namespace dmuond::scheduler
