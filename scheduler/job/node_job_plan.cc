// The group's plan on this node: a job takes it, has its memory made, is refused, or answers that
// it is ready.
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/impossible.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

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
  std::map<uint64_t, absl::Status> differ;
  for (const auto& [id, session] : ranks_.sessions()) {
    if (session.state == RankTable::State::kOpen) continue;
    absl::Status same = CheckReplacement(session, session.registration);
    if (!same.ok()) differ[id] = same;
  }
  for (const auto& [id, why] : differ) {
    EndSession(id, /*closed=*/false, std::string(why.message()), why);
  }
  // One that was lost meanwhile ends with its sessions.
  if (job_ == nullptr || job_->phase == Phase::kFailed) return Take();
  job_->Enter(Phase::kStarting);
  // While the group is broken there is no epoch that lanes could be started for: one that goes back
  // is told to again when it has formed.
  if (epoch_ == 0) return Take();
  Do(node::StartLanes{.epoch = epoch_});
  return Take();
}

void NodeJob::TellPlanReady() {
  job_->Enter(Phase::kAwaiting);
  // The coordinator forgets who was there when a job goes back.
  if (job_->over_old_memory || job_->goes_back) TellRanksAgain();
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  ready.set_node(options_.node);
  ready.set_digest(job_->planned.plan->digest);
  ready.set_epoch(job_->lanes.epoch());
  *ready.mutable_bits() = job_->lanes[LaneIndex(0)].bits;
  Tell(std::move(message));
  Wake();
}

void NodeJob::TellPlanFailed(const absl::Status& why, const std::optional<SnapshotId>& older) {
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  if (older.has_value()) *ready.mutable_older() = ToProto(*older);
  ready.set_node(options_.node);
  ready.set_epoch(epoch_);
  ready.set_error(std::string(why.message()));
  ready.set_reason(ReasonOf(why));
  ready.set_keeps(job_ != nullptr && job_->planned.plan != nullptr && job_->failed.ok());
  Tell(std::move(message));
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
    const RankTable::Session* session = ranks_.OfRank(refused.session().rank());
    if (session != nullptr && session->incarnation == refused.session().incarnation()) {
      EndSession(session->id, /*closed=*/false, refused.message(), status);
    }
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

}  // namespace dmuond::scheduler
