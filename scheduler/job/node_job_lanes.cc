// The lanes of a job: they are started and replaced, take a snapshot's state and trainers' memory,
// report and die. What they report of steps is in node_job_steps.cc, of snapshots in
// node_job_snapshots.cc.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/impossible.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/saved_trainer_state.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

void NodeJob::ReplaceLanes(const std::string& why) {
  Say(node::Note::Level::kWarn, "new lanes", {{"step", LastCommitted()}, {"what", why}});
  job_->Enter(Phase::kStarting);
  job_->lanes_wanted = true;
  job_->lane_retry.reset();
  job_->broken_since.reset();
  GiveUpLanes();
}

void NodeJob::OnParked(const v1::Parked& parked) {
  if (job_ == nullptr || job_->planned.plan == nullptr || !job_->failed.ok()) return;
  Say(node::Note::Level::kError,
      "the job is parked: its lanes cannot work, its state stays in memory, and they are tried "
      "again",
      {{"step", LastCommitted()}, {"what", parked.why()}});
  job_->Enter(Phase::kParked);
  job_->lanes_wanted = false;
  job_->lane_retry.reset();
  GiveUpLanes();
}

void NodeJob::GiveUpLanes() {
  job_->over_old_memory = true;
  ranks_.ForgetMappings();
  Wake();
  Do(node::AbandonCopies{"the lanes are replaced"});
  Do(node::StopRestoring{});
  // At once: the state table says what they have come to, and whoever waits in a lane's queue is
  // answered by its successor.
  Do(node::EndLanes{.others_follow = true});
  job_->lanes.GiveUp();
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
  if (started.ok()) {
    job_->lanes_wanted = false;
    job_->state_is_void = false;
    for (size_t i = 0; i < job_->lanes.size(); ++i) {
      job_->lanes.OnStarted(LaneIndex(static_cast<int32_t>(i)), epoch_);
    }
    return Take();
  }
  Do(node::EndLanes{.others_follow = true});
  OnLanesNotStarted(now, started);
  return Take();
}

void NodeJob::OnLanesNotStarted(TimePoint now, const absl::Status& why) {
  constexpr std::chrono::milliseconds kFirstPause{100};
  constexpr std::chrono::milliseconds kLongestPause{5'000};
  job_->lanes_wanted = false;
  // The job's state may be in this memory alone, and what is lacking now may be there later:
  // memory, processes, a file. The coordinator waits for a --register_timeout, and is told why
  // before that.
  if (job_->over_old_memory) {
    std::optional<LaneRetry>& retry = job_->lane_retry;
    const std::string what(why.message());
    if (!retry.has_value()) retry = LaneRetry{.since = now};
    if (retry->why != what) {
      Say(node::Note::Level::kWarn, "new lanes cannot start and are tried again", {{"what", what}});
    }
    retry->why = what;
    retry->pause = std::clamp(2 * retry->pause, kFirstPause, kLongestPause);
    retry->next = now + retry->pause;
    if (now - retry->since < options_.register_timeout / 2) return;
    retry.reset();
  }
  TellPlanFailed(why);
}

void NodeJob::RetryLanes(TimePoint now) {
  if (job_->phase != Phase::kStarting || !job_->lane_retry.has_value() || job_->lanes_wanted ||
      !job_->lanes.all_absent() || now < job_->lane_retry->next) {
    return;
  }
  job_->lanes_wanted = true;
  Wake();
}

void NodeJob::OnLaneBits(TimePoint now, LaneIndex lane, const v1::LaneBits& bits) {
  if (job_->phase != Phase::kStarting) return;
  const absl::Status same = job_->lanes.CheckBits(lane, bits);
  if (same.ok()) return;
  const bool known_elsewhere = LanesKnownElsewhere();
  // All end: none of these processes may be kept for others' work, with what it has loaded.
  Do(node::EndLanes{});
  job_->lanes.GiveUp();
  if (!job_->over_old_memory || !known_elsewhere) return OnLanesNotStarted(now, same);
  // Lanes of other nodes are about to connect, or have connected, with its siblings, which are
  // gone: they need an epoch of their own, too.
  job_->lane_retry.reset();
  TellLaneLost(lane, std::string(same.message()));
}

absl::StatusOr<std::string> NodeJob::AcceptLanes(TimePoint now, node::Actions& actions) {
  if (!job_->lanes.refused()) {
    return Error(absl::StatusCode::kFailedPrecondition, "LANES_NOT_REFUSED",
                 scheduler::Say("no lane of job '", Named("job", job_->name), "' on node ",
                                Named("node", options_.node),
                                " is refused for other bits: ask the daemon whose log says so"));
  }
  std::string what = job_->lanes.Accept(LastCommitted());
  Say(node::Note::Level::kWarn, "the job goes on with lanes that an operator has accepted",
      {{"step", LastCommitted()}, {"what", what}});
  if (job_->lane_retry.has_value()) job_->lane_retry = LaneRetry{.since = now, .next = now};
  v1::MemberMessage message;
  message.mutable_lanes_accepted()->set_node(options_.node);
  message.mutable_lanes_accepted()->set_what(what);
  Tell(std::move(message));
  actions = Take();
  return what;
}

bool NodeJob::LanesKnownElsewhere() const {
  return options_.nodes > 1 && job_->lanes.any_checked();
}

void NodeJob::TellLaneLost(LaneIndex lane, const std::string& detail) {
  v1::MemberMessage message;
  message.mutable_lane_lost()->set_lane(job_->lanes[lane].id.value());
  message.mutable_lane_lost()->set_detail(detail);
  message.mutable_lane_lost()->set_epoch(job_->lanes.epoch());
  Tell(std::move(message));
}

void NodeJob::PrepareLanes() {
  job_->lane_retry.reset();
  if (job_->wire.has_restore() && !job_->restored) {
    if (!job_->host_copies) {
      return TellPlanFailed(Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                                  scheduler::Say("this node has no --snapshot_dir")));
    }
    job_->Enter(Phase::kRestoring);
    Say(node::Note::Level::kInfo, "restoring", {{"step", job_->wire.restore().step()}});
    Do(node::Restore{FromProto(job_->wire.restore())});
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
                                  const std::optional<SnapshotId>& older) {
  // A node that cannot restore ends the job on all of them; others may be at it.
  if (job_ != nullptr && job_->phase == Phase::kFailed) return Take();
  if (job_ == nullptr || job_->phase != Phase::kRestoring || job_->lanes.loading()) {
    Impossible("NodeJob", Name(phase()), "restored");
    return Take();
  }
  if (!restored.ok()) {
    Say(node::Note::Level::kError, "a snapshot cannot be restored",
        {{"step", job_->wire.restore().step()},
         {"what", restored.status().ToString(absl::StatusToStringMode::kWithNoExtraData)}});
    absl::Status why = restored.status();
    if (ReasonOf(why).empty()) why = WithReason(why, "SNAPSHOT_BROKEN");
    TellPlanFailed(why, older);
    return Take();
  }
  const auto& trainers = job_->planned.inputs->layout.trainers;
  const Attempt attempt(restored->from.manifest.attempt());
  for (size_t i = 0; i < trainers.size(); ++i) {
    if (trainers[i].node.value() != options_.node) continue;
    const auto rank = static_cast<int32_t>(i);
    std::string bytes = SavedTrainerState(restored->from, rank);
    if (!bytes.empty()) job_->trainer_states[rank] = {attempt, std::move(bytes)};
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
  Say(node::Note::Level::kInfo, "restored", {{"step", job_->wire.restore().step()}});
  PrepareLanes();
}

node::Actions NodeJob::OnLaneReport(TimePoint now, LaneIndex lane, const v1::LaneReport& report) {
  using Kind = v1::LaneReport::ReportCase;
  if (job_ == nullptr) return Take();
  job_->lanes.OnReport(lane);
  switch (report.report_case()) {
    case Kind::kReady:
      if (job_->lanes.OnReady(lane, report.ready().device()) && job_->phase == Phase::kStarting) {
        PrepareLanes();
      }
      break;
    case Kind::kBits:
      OnLaneBits(now, lane, report.bits());
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
    case Kind::kDetached:
      job_->lanes.OnUnmapped(report.detached().rank(), report.detached().incarnation(), lane);
      Wake();
      break;
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

node::Actions NodeJob::OnLaneGone(TimePoint now, LaneIndex lane, const std::string& last_words) {
  if (job_ == nullptr) return Take();
  const bool began = job_->lanes[lane].begins();
  if (!job_->lanes.OnGone(lane)) return Take();
  Do(node::AbandonCopies{absl::StrCat("lane ", lane.value(), " ended: ", last_words)});
  const int32_t id = job_->lanes[lane].id.value();
  Say(node::Note::Level::kError, "lane lost",
      {{"step", LastCommitted()}, {"lane", id}, {"what", last_words}});
  if (began && job_->phase == Phase::kStarting && job_->over_old_memory && !LanesKnownElsewhere()) {
    // No other node knows of this node's lanes yet: a library or a thread was lacking, say.
    Do(node::EndLanes{.others_follow = true});
    job_->lanes.GiveUp();
    OnLanesNotStarted(now, absl::UnavailableError(absl::StrCat(
                               "lane ", id, " ended before it was configured: ", last_words)));
    return Take();
  }
  // The coordinator says what comes of it: other lanes, or that this was once too often, or that a
  // job that had not begun is refused.
  TellLaneLost(lane, last_words);
  return Take();
}

}  // namespace dmuond::scheduler
