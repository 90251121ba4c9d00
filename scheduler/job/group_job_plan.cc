// The plan of a job: it is ordered when all ranks have registered, told, prepared by every node, or
// refused.
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/bits_difference.h"
#include "scheduler/job/group_job.h"
#include "scheduler/limits.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::PlanRegistered() {
  if (job_->discarding) return {};
  job_->register_deadline.reset();
  if (!job_->discard_error.ok()) return Refuse(job_->discard_error);
  if (EpochOf(job_->restore.attempt).value() >= kEpochMax) {
    return Refuse(
        Error(absl::StatusCode::kFailedPrecondition, "EPOCH_EXHAUSTED",
              Say("the snapshot of job '", Named("job", job_->name), "' is of group epoch ",
                  Named("epoch", EpochOf(job_->restore.attempt).value()), "; a group ends at ",
                  Named("epoch_max", kEpochMax), ", and none comes so far")));
  }
  v1::PlanInputs message;
  message.set_job(job_->name);
  message.set_job_incarnation(job_->incarnation);
  message.set_nodes(options_.nodes);
  message.set_lanes_per_node(options_.lanes_per_node);
  message.set_lane_memory_bytes(options_.lane_memory_bytes);
  message.set_landing_bytes_max(options_.landing_bytes_max);
  if (options_.memory_granule_bytes != 1) {
    message.set_memory_granule_bytes(options_.memory_granule_bytes);
  }
  if (std::optional<v1::CostTable> costs = CostsOfPlan()) {
    *message.mutable_costs() = *std::move(costs);
  }
  if (job_->from_snapshot()) *message.mutable_restore() = ToProto(job_->restore);
  message.set_launch(job_->launch);
  message.set_owner_uid(job_->owner_uid);
  if (absl::Status added = job_->registrations.AddTo(message); !added.ok()) {
    return Refuse(WithReason(added, "LAYOUT_INVALID"));
  }
  if (absl::Status fits = CheckPlanBytes(message); !fits.ok()) return Refuse(fits);
  job_->wire = std::make_shared<const v1::PlanInputs>(std::move(message));
  OrderPlan();
  return {};
}

std::optional<v1::CostTable> GroupJob::CostsOfPlan() const {
  const v1::CostTable here = ToProto(options_.costs.value_or(options_.estimates));
  if (!job_->from_snapshot() || options_.replan) return here;
  const std::optional<v1::CostTable>& before = job_->restore_costs;
  // What was measured on another device says nothing of this one.
  const bool other =
      options_.costs.has_value() && before.has_value() && here.device() != before->device();
  if (other) return here;
  return before;
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
  PassSnapshot(out);
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

// The snapshot may be of another group, which has come further than this one.
void GroupJob::PassSnapshot(AddressedMessages& out) {
  if (job_->restore.attempt <= MakeAttempt(GroupEpoch(epoch_), attempts_)) return;
  epoch_ = EpochOf(job_->restore.attempt).value();
  NextEpoch();
  out.emplace_back().message.mutable_new_epoch()->set_epoch(epoch_);
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
  job_->bits.clear();
  job_->blobs.clear();
  return out;
}

AddressedMessages GroupJob::OnRendezvous(const v1::Rendezvous& rendezvous) {
  if (job_ == nullptr || !job_->has_plan()) return {};
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

absl::Status GroupJob::CheckBits(const v1::PlanReady& ready) const {
  // A job that goes on keeps what each node has begun with: nodes compare that themselves, and an
  // operator may have accepted another build on one of them.
  if (job_->has_steps() || job_->goes_back) return absl::OkStatus();
  for (const auto& [node, bits] : job_->bits) {
    const std::vector<BitsDifference> differences =
        CodeDifferences(bits, ready.bits(), Between::kNodes);
    if (differences.empty()) continue;
    const BitsDifference& differs = differences.front();
    return Error(absl::StatusCode::kFailedPrecondition, "LANE_DIFFERS",
                 Say("lanes of node ", Named("node", ready.node()), " and node ",
                     Named("other_node", node), " would compute other bits: ",
                     Named("what", differs.what), " is ", Named("now", differs.now), " on node ",
                     ready.node(), ", and ", Named("began", differs.began), " on node ", node,
                     ". Install the same build on all nodes, and start the ranks again"));
  }
  return absl::OkStatus();
}

AddressedMessages GroupJob::OnPlanReady(TimePoint now, const v1::PlanReady& ready) {
  if (job_ == nullptr) return {};
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
  } else if (const absl::Status same = CheckBits(ready); !same.ok()) {
    reason = ReasonOf(same);
    code = same.code();
    error = MessageOf(same);
  }
  // It has left already, and the end of its stream is on the way.
  if (reason == "DRAINING") return MemberGone(now, ready.node(), "it leaves");
  if (!reason.empty()) {
    if (job_->goes_back && !job_->has_steps()) {
      // The newest one that every owner has: not this one. Each time it is an older one.
      const SnapshotId older = FromProto(ready.older());
      if (reason != "SNAPSHOT_BROKEN" || !ready.has_older() || older >= job_->restore) {
        return EndJob(error.text, reason);
      }
      RollBack(*job_->wire, older, error.text);
      return {};
    }
    if (job_->has_steps() && ready.keeps()) return LanesLost(now, error.text);
    if (job_->has_steps()) {
      if (job_->steps->lost()) return EndJob(error.text, "LANE_LOST");
      job_->Enter(Phase::kRunning);
      return Lost(now, OutcomeReason::kLaneLost, error.text);
    }
    return Refuse(Error(code, reason, error));
  }
  job_->ready[ready.node()] = ready.digest();
  job_->bits[ready.node()] = ready.bits();
  if (job_->ready.size() < static_cast<size_t>(options_.nodes)) return {};
  const Attempt first = MakeAttempt(GroupEpoch(epoch_), ++attempts_);
  job_->running_since = now;
  if (job_->interrupted()) {
    job_->Enter(Phase::kRunning);
    const Interruption why = std::exchange(job_->interruption, {});
    if (job_->parks > 0 && job_->parked_in == job_->steps->Current().step) {
      // What is in memory alone is saved before the lanes may fail again. It is told below.
      if (job_->snapshots != nullptr && !job_->snapshots->has_newest()) {
        (void)job_->snapshots->OnRequest(now);
      }
    }
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
                                                  job_->restore.step, options_.step);
  job_->goes.emplace(job_->steps->tables(), options_.nodes);
  job_->check = std::make_unique<ReplicaCheck>(*job_->planned.inputs, *job_->planned.plan,
                                               options_.check_every, now);
  if (options_.snapshots) {
    job_->snapshots = std::make_unique<SnapshotRound>(
        SnapshotRound::Job{job_->wire.get(), job_->planned.inputs.get(), job_->planned.plan.get()},
        options_.snapshot, job_->from_snapshot() ? std::optional(job_->restore.step) : std::nullopt,
        now, job_->snapshot_counts);
  }
  AddressedMessages out = Broadcast(now, {job_->steps->Current()});
  AddressedMessages restarted = RestartWhenAttached(now);
  std::move(restarted.begin(), restarted.end(), std::back_inserter(out));
  return out;
}

}  // namespace dmuond::scheduler
