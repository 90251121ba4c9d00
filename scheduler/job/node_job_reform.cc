// A job goes on in a new epoch: with new lanes over its memory, or from a snapshot.
#include "scheduler/convert/convert.h"
#include "scheduler/job/node_job.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// A job goes back under the plan that it has.
bool SameButForTheSnapshot(v1::PlanInputs a, const v1::PlanInputs& b) {
  a.clear_restore();
  if (b.has_restore()) *a.mutable_restore() = b.restore();
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

void NodeJob::OnReform(const v1::Reform& reform) {
  epoch_ = reform.epoch();
  if (job_ == nullptr || OfAnotherJob() || job_->planned.plan == nullptr || !job_->failed.ok()) {
    return TellCannotGoOn();
  }
  // Its part is over: what a parked job has come to is saved, and no step may follow.
  if (leaves_ && parked() && Saved()) {
    return TellPlanFailed(
        Error(absl::StatusCode::kUnavailable, "DRAINING",
              scheduler::Say("the daemon of node ", Named("node", options_.node), " is leaving")));
  }
  ReplaceLanes(reform.why());
}

void NodeJob::OnRollBack(const v1::RollBack& back) {
  epoch_ = back.epoch();
  const v1::PlanInputs& plan = back.plan();
  GiveWayTo(plan);
  if (job_ != nullptr && (job_->name != plan.job() || !job_->failed.ok())) return TellCannotGoOn();
  Say(node::Note::Level::kWarn, "the job goes back to a snapshot",
      {{"from_step", LastCommitted()}, {"to_step", plan.restore().step()}, {"what", back.why()}});
  if (job_ == nullptr || !planned()) {
    OnPlan(plan);
    job_->goes_back = planned();
    return;
  }
  if (!SameButForTheSnapshot(plan, job_->wire)) {
    return TellPlanFailed(
        Error(absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
              scheduler::Say("job '", Named("job", plan.job()), "' is to go back to step ",
                             Named("to_step", plan.restore().step()),
                             " under another plan than the one that it has here")));
  }
  job_->goes_back = true;
  ++job_->figures.rollbacks;
  job_->back = {plan.restore().step(), back.epoch(), back.asked()};
  ranks_.GoBack(job_->back);
  // A host that waits for its stream does not ask, and later weights, which would end the stream's
  // wait, come when every rank has acknowledged. Without steps it has gone back already.
  if (job_->steps.has_value()) {
    Do(node::MarkRollback{back.epoch(), job_->steps->open().attempt.value() - 1});
  }
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
  if (options_.node == 0) Do(node::SetSnapshotsAside{FromProto(job_->wire.restore())});
}

void NodeJob::TellCannotGoOn() {
  if (job_ != nullptr && !OfAnotherJob() && !job_->failed.ok()) {
    return TellPlanFailed(job_->failed);
  }
  TellPlanFailed(Error(absl::StatusCode::kUnavailable, leaves_ ? "DRAINING" : "JOB_ENDED",
                       scheduler::Say("this node does not have the job any more")));
}

}  // namespace dmuond::scheduler
