#include "scheduler/job/node_job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

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
    case NodeJob::Phase::kParked:
      return "Parked";
  }
  return "?";
}

void NodeJob::Job::Enter(Phase next) {
  const auto allowed = [&] {
    switch (next) {
      case Phase::kNone:
        return false;
      case Phase::kRegistering:
        return phase < Phase::kRunning;
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
      case Phase::kParked:
        return phase >= Phase::kStarting && phase != Phase::kFailed;
    }
    return false;
  };
  if (!allowed()) Impossible("NodeJob", Name(phase), absl::StrCat("enter ", Name(next)));
  phase = next;
}

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

bool NodeJob::Drops(std::optional<Dropped> why, const char* message) {
  if (!why.has_value()) return false;
  why->message = message;
  Do(node::CountDropped{*std::move(why)});
  return true;
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

node::Actions NodeJob::OnFormed(TimePoint /*now*/, uint32_t epoch) {
  epoch_ = epoch;
  halted_ = false;
  if (job_ != nullptr) job_->broken_since.reset();
  TellMemberState();
  Wake();
  return Take();
}

node::Actions NodeJob::OnBroken(TimePoint now, const std::string& why) {
  epoch_ = 0;
  halted_ = false;
  Wake();
  if (job_ == nullptr || job_->phase == Phase::kFailed) return Take();
  job_->lanes_wanted = false;
  job_->lane_retry.reset();
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

void NodeJob::TellMemberState() {
  v1::MemberMessage message;
  v1::MemberState& state = *message.mutable_member_state();
  state.set_epoch(epoch_);
  if (job_ != nullptr && job_->failed.ok()) {
    state.set_job(job_->name);
    state.set_job_incarnation(job_->wire.job_incarnation());
    state.set_world_size(job_->world_size);
    state.set_has_memory(job_->planned.plan != nullptr);
    state.set_has_state(job_->has_state || job_->wire.has_restore());
    if (planned()) *state.mutable_plan() = job_->wire;
  }
  Tell(std::move(message));
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
                              message.has_roll_back() || message.has_job_ended() ||
                              message.has_new_epoch();
  const bool concerns_it = begins_or_ends || !OfAnotherJob();
  switch (concerns_it ? message.message_case() : Kind::MESSAGE_NOT_SET) {
    case Kind::kNewEpoch:
      epoch_ = message.new_epoch().epoch();
      break;
    case Kind::kPlan:
      OnPlan(message.plan());
      break;
    case Kind::kRefused:
      OnRefused(message.refused());
      break;
    case Kind::kRendezvous: {
      if (job_ == nullptr) break;
      // Lanes of another epoch would take it for an error.
      const uint32_t epoch = message.rendezvous().epoch();
      if (Drops(OfAnotherEpoch(epoch, job_->lanes.epoch()), "rendezvous")) break;
      v1::LaneCommand command;
      *command.mutable_rendezvous() = message.rendezvous();
      ToLane(LaneIndex(message.rendezvous().rail()), std::move(command));
      return TakeUnrecorded();
    }
    case Kind::kOpen:
      OnOpenAttempt(now, message.open());
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
      OnDecision(now, message.decision());
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
    case Kind::kParked:
      OnParked(message.parked());
      break;
    case Kind::kHalted:
      OnHalted(message.halted());
      break;
    case Kind::kSave:
      OnSave(now, message.save());
      break;
    case Kind::kSnapshotDone:
      OnSnapshotDone(now, message.snapshot_done());
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

bool NodeJob::OfAnotherJob() const {
  return job_ != nullptr && !about_.empty() && job_->name != about_;
}

}  // namespace dmuond::scheduler
