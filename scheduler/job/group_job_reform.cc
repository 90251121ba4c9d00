// The coordinator of a job whose lanes or members were lost: who goes on from where.
#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

AddressedMessages GroupJob::OnLaneLost(TimePoint now, const v1::LaneLost& lost) {
  const std::string detail = absl::StrCat("lane ", lost.lane(), " ended: ", lost.detail());
  // A broken group forms with new lanes anyway, and a parked job has none.
  if (!Formed() || (job_ != nullptr && job_->parked())) return {};
  // Lanes are started with the plan: these are of a plan that was given up.
  if (job_ == nullptr || !job_->has_plan()) return {};
  if (job_->goes_back && !job_->has_steps()) {
    if (!MayLoseALane()) return EndJob(detail, "LANE_LOST");
    RollBack(*job_->wire, job_->restore, detail);
    return {};
  }
  if (!job_->has_steps()) {
    return Lost(now, OutcomeReason::kLaneLost, detail);
  }
  ForgetOldLosses(now);
  // Also of a job that is lost: ranks may wait for what its last step has published.
  if (!MayLoseALane()) {
    return LanesLost(now,
                     absl::StrCat(detail, "; lanes have died ", job_->deaths, " times before step ",
                                  job_->deaths_in.value(), " came to its end"));
  }
  job_->Enter(Phase::kInterrupted);
  job_->interruption = Interruption{OutcomeReason::kLaneLost, detail};
  NextEpoch();
  return Reform();
}

void GroupJob::ForgetOldLosses(TimePoint now) {
  if (job_->phase == Phase::kRunning && now - job_->running_since >= kLanesWork) {
    job_->deaths = job_->parks = 0;
  }
}

AddressedMessages GroupJob::OnLanesAccepted() {
  if (job_ == nullptr) return {};
  job_->deaths = job_->parks = 0;
  if (!job_->parked()) return {};
  return TryAgain();
}

AddressedMessages GroupJob::TryAgain() {
  job_->Enter(Phase::kInterrupted);
  NextEpoch();
  return Reform();
}

// There will be no lanes for now. Who knows that the job is lost hears of this as its end.
AddressedMessages GroupJob::LanesLost(TimePoint now, const std::string& detail) {
  if (job_->steps->lost()) return EndJob(detail, "LANE_LOST");
  const bool waits = options_.step.session_linger.count() > 0;
  if (waits && job_->steps->has_state()) return Park(now, detail);
  if (job_->interrupted()) job_->Enter(Phase::kRunning);
  return Lost(now, OutcomeReason::kLaneLost, detail);
}

AddressedMessages GroupJob::Park(TimePoint now, const std::string& why) {
  job_->Enter(Phase::kParked);
  job_->interruption = Interruption{OutcomeReason::kLaneLost, why};
  job_->steps->Suspend();
  job_->goes->Forget();
  const StepId step = job_->steps->Current().step;
  if (job_->parks == 0 || job_->parked_in != step) {
    job_->parks = 0;
    job_->parked_in = step;
    job_->parked_since = now;
  }
  const auto pause = kParkedFirst * (int64_t{1} << std::min(job_->parks, 16));
  ++job_->parks;
  job_->tried_again = now + std::min(pause, kParkedMax);
  AddressedMessages out;
  out.emplace_back().message.mutable_parked()->set_why(why);
  return out;
}

AddressedMessages GroupJob::AdvanceParked(TimePoint now) {
  const bool saved = job_->snapshots != nullptr && job_->snapshots->has_newest();
  if (saved && now - job_->parked_since >= options_.step.session_linger) {
    return Lost(
        now, OutcomeReason::kLaneLost,
        absl::StrCat(job_->interruption.detail, "; the job was parked for --session_linger, ",
                     options_.step.session_linger.count(),
                     " ms, and a snapshot has all of its state: start it again with resume "
                     "when lanes can work"));
  }
  if (now < job_->tried_again) return {};
  return TryAgain();
}

bool GroupJob::MayLoseALane() {
  const StepId step =
      job_->has_steps() ? job_->steps->Current().step : StepId(job_->restore.step.value() + 1);
  job_->deaths = job_->deaths_in == step ? job_->deaths + 1 : 1;
  job_->deaths_in = step;
  return job_->deaths < kLaneDeathsMax;
}

void GroupJob::NextEpoch() {
  ++epoch_;
  attempts_ = options_.attempts_from;
  for (auto& [node, state] : states_) state.set_epoch(epoch_);
}

AddressedMessages GroupJob::Reform() {
  job_->steps->Suspend();
  job_->goes->Forget();
  job_->ready.clear();
  job_->blobs.clear();
  AddressedMessages out;
  v1::Reform& reform = *out.emplace_back().message.mutable_reform();
  reform.set_epoch(epoch_);
  reform.set_why(job_->interruption.detail);
  return out;
}

AddressedMessages GroupJob::OnMemberState(TimePoint now, int32_t from,
                                          const v1::MemberState& state) {
  v1::MemberState& known = states_[from] = state;
  // A predecessor may have given more of them.
  incarnations_ = std::max(incarnations_, state.job_incarnation());
  AddressedMessages out;
  if (ended_.has_value() && state.job() == ended_->message.job_ended().job() &&
      state.job_incarnation() == ended_->incarnation) {
    out.push_back({from, ended_->message});
    known.Clear();  // the rest of what it says is of that job
    known.set_epoch(state.epoch());
  }
  if (states_.size() < static_cast<size_t>(options_.nodes)) return out;
  for (const auto& [node, told] : states_) {
    if (told.epoch() != epoch_) return out;  // ahead of our own news
  }
  AddressedMessages more = FormAnew(now, nullptr);
  std::move(more.begin(), more.end(), std::back_inserter(out));
  return out;
}

AddressedMessages GroupJob::OnNewestSnapshot(TimePoint now, int32_t from,
                                             const v1::NewestSnapshot& newest) {
  // Only node 0 is asked: another one's answer would choose what all go back to.
  if (!finding_ || from != 0) return {};
  finding_ = false;
  return FormAnew(now, &newest);
}

AddressedMessages GroupJob::FormAnew(TimePoint now, const v1::NewestSnapshot* newest) {
  AddressedMessages out = GoOn(newest);
  if (finding_) return out;
  for (const auto& [node, message] : std::exchange(early_, {})) {
    AddressedMessages more = Dispatch(now, node, message);
    std::move(more.begin(), more.end(), std::back_inserter(out));
  }
  return out;
}

AddressedMessages GroupJob::GoOn(const v1::NewestSnapshot* newest) {
  if (job_ != nullptr && job_->has_steps() && job_->steps->lost()) {
    return EndJob("the group formed anew after the job was lost", "PEER_LOST");
  }
  const v1::MemberState* holder = nullptr;  // a node that has the job
  int32_t without = 0;                      // one that has lost the job's memory
  bool everywhere = job_ != nullptr && job_->has_steps();
  bool has_state = false;
  for (const auto& [node, state] : states_) {
    if (!state.job().empty() && (holder == nullptr || state.has_state())) holder = &state;
    has_state = has_state || state.has_state();
    const bool same = everywhere && state.job() == job_->name && state.has_memory() &&
                      state.job_incarnation() == job_->incarnation;
    if (same) continue;
    everywhere = false;
    if (!state.has_memory()) without = node;
  }
  if (everywhere) {
    if (!job_->interrupted()) {
      job_->Enter(Phase::kInterrupted);
      job_->interruption = Interruption{OutcomeReason::kPeerLost, "the group formed anew"};
    }
    return Reform();
  }
  // A job that registers is nobody's yet but its trainers'.
  if (holder == nullptr) {
    job_.reset();  // nor is one that every node has given up while the group was broken
    return {};
  }
  if (!has_state || !options_.snapshots || newest != nullptr) {
    return GoBackOrEnd(*holder, has_state, without,
                       newest == nullptr ? v1::NewestSnapshot() : *newest);
  }
  finding_ = true;
  AddressedMessages out;
  Addressed& here = out.emplace_back();
  here.node = 0;
  here.message.mutable_find_snapshot()->set_epoch(epoch_);
  here.message.mutable_find_snapshot()->set_job(holder->job());
  return out;
}

AddressedMessages GroupJob::GoBackOrEnd(const v1::MemberState& holder, bool has_state,
                                        int32_t without, const v1::NewestSnapshot& newest) {
  std::string detail = absl::StrCat("the daemon of node ", without, " began anew");
  if (has_state && newest.has_newest() && holder.has_plan()) {
    RollBack(holder.plan(), FromProto(newest.newest()), detail);
    return {};
  }
  if (!has_state) {
    detail += " before the job had any state: start the job again";
  } else if (newest.error().empty()) {
    absl::StrAppend(&detail, ", and there is no snapshot",
                    options_.snapshots ? " of the job in the snapshot directory" : "",
                    ": the state that it owned is lost with its predecessor");
  } else {
    absl::StrAppend(&detail, ", and whether there is a snapshot cannot be said: ", newest.error(),
                    "; start the job again with resume when it can");
  }
  v1::CoordinatorMessage message;
  v1::JobEnded& ended = *message.mutable_job_ended();
  ended.set_job(holder.job());
  ended.set_why(detail);
  ended.set_reason(has_state && newest.error().empty() ? "STATE_LOST" : "PEER_LOST");
  ended_ = {holder.job_incarnation(), message};
  job_.reset();
  AddressedMessages out;
  for (const auto& [node, state] : states_) {
    if (state.job() == ended.job()) out.push_back({node, message});
  }
  return out;
}

void GroupJob::RollBack(v1::PlanInputs plan, const SnapshotId& to, const std::string& why,
                        bool asked) {
  NextEpoch();
  *plan.mutable_restore() = ToProto(to);
  auto job = std::make_unique<Job>();
  job->name = plan.job();
  job->world_size = WorldSizeOf(plan);
  job->incarnation = plan.job_incarnation();
  job->restore = to;
  job->launch = plan.launch();
  job->owner_uid = plan.owner_uid();
  job->goes_back = true;
  job->back_epoch = epoch_;
  job->back_why = why;
  job->back_asked = asked;
  if (job_ != nullptr) {
    // Nodes that keep their sessions tell them again; those of a node that began anew are gone.
    // Whoever loads a snapshot has looked at why lanes died.
    if (!asked) {
      job->deaths_in = job_->deaths_in;
      job->deaths = job_->deaths;
    }
    job->places = job_->places;
    job->snapshot_counts =
        job_->snapshots != nullptr ? job_->snapshots->counts() : job_->snapshot_counts;
  }
  incarnations_ = std::max(incarnations_, job->incarnation);
  job->wire = std::make_shared<const v1::PlanInputs>(std::move(plan));
  job_ = std::move(job);
  OrderPlan();
}

void GroupJob::OnLoadSnapshot(const v1::LoadSnapshotOf& load) {
  if (job_ == nullptr || (!job_->has_plan() && !job_->goes_back)) return;
  // While the group is broken nobody hears it; who asked will ask again.
  if (!Formed()) return;
  RollBack(*job_->wire, FromProto(load.to()), load.why(), /*asked=*/true);
}

AddressedMessages GroupJob::RestartWhenAttached(TimePoint now) {
  const bool complete = job_->attached.size() == static_cast<size_t>(job_->world_size);
  if (!job_->goes_back) {
    // The last rank of a job that begins from a snapshot may have come while there were no lanes.
    if (!job_->from_snapshot() || job_->steps->has_state() || !complete) return {};
    return Restart(now);
  }
  job_->steps->Suspend();
  for (int32_t rank = 0; rank < job_->world_size; ++rank) {
    const auto open = job_->open_ranks.find(rank);
    if (job_->attached.contains(rank) && open != job_->open_ranks.end()) {
      job_->steps->OnRankBack(now, TrainerRank(rank), open->second.second);
    } else if (open == job_->open_ranks.end()) {
      // Its place waits, as that of any trainer that died.
      (void)job_->steps->OnRankGone(now, TrainerRank(rank), 0,
                                    absl::StrCat("rank ", rank, " has not come back"));
    }
  }
  return complete ? Restart(now) : AddressedMessages();
}

AddressedMessages GroupJob::Restart(TimePoint now) {
  job_->goes_back = false;
  return Broadcast(now, job_->steps->Restart());
}

}  // namespace dmuond::scheduler
