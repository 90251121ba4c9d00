// Time on one node: lanes that live and do nothing, a group that does not form anew, and what the
// coordinator is told of a node that is not ready.
#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "scheduler/job/node_job.h"
#include "scheduler/reason.h"
#include "scheduler/shown_pid.h"

namespace dmuond::scheduler {

node::Actions NodeJob::OnTick(TimePoint now, const Sight& sight) {
  if (job_ == nullptr || job_->phase == Phase::kFailed) return {};
  if (job_->broken_since.has_value() && now - *job_->broken_since >= options_.session_linger) {
    Abandon(Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                  scheduler::Say("the group has not formed anew within --session_linger, ",
                                 Named("linger_ms", options_.session_linger.count()),
                                 " ms: the job is over. When all daemons are back, start all ranks "
                                 "with resume to go on from its newest snapshot")));
    return Take();
  }
  RetryLanes(now);
  WatchLanes(now, sight);
  if (job_ == nullptr || job_->phase == Phase::kFailed) return Take();
  TellProgress(now, sight);
  if (actions_.empty()) return {};  // whatever it changes, it says
  return Take();
}

LaneSet::Owed NodeJob::Owed() const {
  if (lanes_come() || !job_->steps.has_value()) return {};
  return {job_->applied_attempt, job_->steps->open().attempt.value()};
}

void NodeJob::WatchLanes(TimePoint now, const Sight& sight) {
  Obey(now, job_->lanes.OnTick(now, Owed(), sight.processor_time),
       absl::StrCat("the weights after attempt ", job_->applied_attempt,
                    " wait for its `submitted` word"),
       sight);
}

void NodeJob::OnGatherOverdue(TimePoint now, const v1::GatherOverdue& overdue) {
  if (job_ == nullptr || lanes_come() || !job_->steps.has_value()) return;
  const Attempt open = job_->steps->open().attempt;
  if (Drops(OfAnotherAttempt(Attempt(overdue.attempt()), open), "gather_overdue")) return;
  Obey(now, job_->lanes.OnGatherOverdue(now, overdue.attempt(), overdue.detail()), overdue.detail(),
       {});
}

void NodeJob::Obey(TimePoint now, const std::vector<LaneSet::Order>& orders, const std::string& why,
                   const Sight& sight) {
  for (const LaneSet::Order& order : orders) {
    if (const auto* ping = std::get_if<LaneSet::Ping>(&order)) {
      v1::LaneCommand command;
      command.mutable_ping()->set_number(ping->number);
      ToLane(ping->lane, std::move(command));
    } else if (const auto* kill = std::get_if<LaneSet::Kill>(&order)) {
      Do(node::CondemnLane{kill->lane, kill->why, kill->awaited});
    } else if (const auto* expel = std::get_if<LaneSet::Expel>(&order)) {
      if (Expel(expel->ranks, why)) return;
      if (!expel->else_condemn) continue;
      const LaneSet::Kill blamed = job_->lanes.Condemn(now, expel->lane, why, Owed());
      Do(node::CondemnLane{blamed.lane, blamed.why, blamed.awaited});
    } else {
      const LaneIndex lane = std::get<LaneSet::Unkillable>(order).lane;
      return Abandon(Error(
          absl::StatusCode::kUnavailable, "LANE_LOST",
          scheduler::Say("lane ", Named("lane", job_->lanes[lane].id.value()), " (",
                         SayPid(sight.pid ? sight.pid(lane) : 0),
                         ") hangs and does not even end by SIGKILL: the kernel holds it, in the "
                         "device's driver, say. Its memory cannot be given to another one")));
    }
  }
}

void NodeJob::TellProgress(TimePoint now, const Sight& sight) {
  constexpr std::chrono::seconds kEvery{1};
  constexpr int kSayEvery = 10;
  if (!planned() || epoch_ == 0 || parked()) return;
  std::string awaited;
  uint64_t done = job_->lanes.done();
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const LaneIndex index(static_cast<int32_t>(i));
    const LaneSet::Lane& lane = job_->lanes[index];
    if (lane.ready() && !job_->lanes.loading() && !job_->lanes.mapping()) continue;
    absl::StrAppend(
        &awaited, awaited.empty() ? "" : "; ", "lane ", lane.id.value(), " ",
        lane.lives() ? job_->lanes.AwaitedFrom(index, Owed()) : "waits for its predecessor's end");
  }
  if (sight.lanes_end) awaited = "the end of older lanes";
  if (job_->lane_retry.has_value()) {
    awaited = absl::StrCat("lanes, which cannot start: ", job_->lane_retry->why);
  }
  if (job_->phase == Phase::kPreparing) {
    done = sight.prepared_bytes;
    awaited =
        sight.planned ? absl::StrCat("memory, of which ", done, " bytes are there") : "its plan";
  }
  if (awaited.empty() && restores()) {
    awaited = absl::StrCat("the snapshot of step ", job_->wire.restore().step(), ", of which ",
                           sight.read_bytes, " bytes are read");
    done += sight.read_bytes;
  }
  if (awaited.empty()) {
    job_->progress_tells = 0;
    return;
  }
  if (now - job_->progress_told < kEvery) return;
  job_->progress_told = now;
  if (++job_->progress_tells % kSayEvery == 0) {
    Say(node::Note::Level::kInfo, "not ready yet", {{"awaited", awaited}});
  }
  v1::MemberMessage message;
  v1::NodeProgress& progress = *message.mutable_node_progress();
  progress.set_node(options_.node);
  progress.set_epoch(epoch_);
  progress.set_done(done);
  progress.set_awaited(awaited);
  Tell(std::move(message));
}

}  // namespace dmuond::scheduler
