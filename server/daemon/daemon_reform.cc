// New epochs: a broken group, lanes that are replaced, and jobs that are lost.
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"
#include "server/shared/publish_board.h"

namespace dmuond::server {

void Daemon::TellMemberState() {
  v1::MemberMessage message;
  v1::MemberState& state = *message.mutable_member_state();
  state.set_epoch(epoch_);
  if (job_ != nullptr && job_->failed.ok()) {
    state.set_job(job_->name);
    state.set_job_incarnation(job_->wire.job_incarnation());
    state.set_world_size(job_->world_size);
    state.set_has_memory(job_->plan != nullptr);
    state.set_has_state(job_->has_state || job_->wire.restore_step() > 0);
    if (job_->planned()) *state.mutable_plan() = job_->wire;
  }
  fault::FaultPoint("daemon.member_state");
  Tell(std::move(message));
  if (leaving_.has_value()) TellLeaving();
}

void Daemon::HandleFindSnapshot(const v1::FindSnapshot& find) {
  if (reads_ == nullptr) return;
  newest_owed_ = find;
  if (reads_->hangs()) return TellNewestSnapshot(DirectoryHangs(*reads_));
  reads_->Post([this, disk = reads_.get(), find] {
    const absl::StatusOr<int64_t> newest = NewestStep(disk->storage(), find.job());
    StateLock lock(mutex_);
    if (newest_owed_.has_value() && newest_owed_->epoch() == find.epoch()) {
      TellNewestSnapshot(newest);
    }
  });
}

void Daemon::TellNewestSnapshot(const absl::StatusOr<int64_t>& step) {
  const v1::FindSnapshot find = *std::exchange(newest_owed_, std::nullopt);
  v1::MemberMessage message;
  v1::NewestSnapshot& newest = *message.mutable_newest_snapshot();
  newest.set_epoch(find.epoch());
  if (step.ok()) {
    newest.set_step(*step);
  } else {
    log::Error("whether there is a snapshot cannot be said",
               {{"job", find.job()}, {"epoch", find.epoch()}, {"what", step.status()}});
    newest.set_error(std::string(step.status().message()));
  }
  Tell(std::move(message));
}

void Daemon::HandleBroken(const std::string& why) {
  epoch_ = 0;
  fault::FaultPoint("daemon.broken");
  halted_ = false;
  mutex_.Changed();
  if (job_ == nullptr || prepared_.has_value()) return;
  const absl::Status lost = Error(absl::StatusCode::kUnavailable, "PEER_LOST", why);
  // One that goes back to a snapshot begins to do so again when the group has formed.
  const bool waits = job_->steps.has_value() || job_->rolled_back;
  if (!waits || options_.coordinator.step.session_linger.count() == 0) return Abandon(lost);
  if (!job_->broken_since.has_value()) job_->broken_since = std::chrono::steady_clock::now();
  log::Warn("the job waits for the group to form anew",
            {{"job", job_->name}, {"epoch", epoch_}, {"step", LastCommitted()}, {"what", why}});
  mutex_.Changed();
}

void Daemon::EndBrokenJob() {
  if (job_ == nullptr || !job_->broken_since.has_value() || !job_->failed.ok()) return;
  const auto linger = options_.coordinator.step.session_linger;
  if (std::chrono::steady_clock::now() - *job_->broken_since < linger) return;
  Abandon(Error(
      absl::StatusCode::kUnavailable, "PEER_LOST",
      Say("the group has not formed anew within ", Named("linger_ms", linger.count()), " ms")));
}

void Daemon::Abandon(absl::Status status) {
  log::Error("job lost", {{"job", job_->name},
                          {"epoch", epoch_},
                          {"step", LastCommitted()},
                          {"what", std::string(status.message())}});
  Fail(std::move(status));
  job_->abandoned = true;
  if (sessions_.empty()) EndJob("nobody is left in a job that was lost");
}

void Daemon::HandleJobEnded(const v1::JobEnded& ended) {
  if (job_ == nullptr || job_->name != ended.job()) return;
  if (ended.reason().empty()) {
    // One that was lost ends with its last session, which has yet to hear of that. And of one that
    // registers, the news of who is here now has crossed with this.
    if (job_->abandoned || (!job_->planned() && !sessions_.empty())) return;
    return EndJob(ended.why());
  }
  if (ended.reason() == scheduler::kJobEnded) {
    return EndJob(ended.why(), scheduler::JobWasEnded(job_->name, LastCommitted(), ended.why()));
  }
  const bool state_lost = ended.reason() == "STATE_LOST";
  // What is wrong with the trainers' weights is told as an error, under its own reason.
  const bool weights = absl::StartsWith(ended.reason(), "WEIGHTS_");
  if (job_->steps.has_value() && !weights) {
    // The outcome of the step that was open, for whoever waits for it.
    const scheduler::OpenAttempt open = job_->steps->open();
    scheduler::Decision decision;
    decision.attempt = open.attempt;
    decision.step = open.step;
    decision.verdict = scheduler::Verdict::kAbort;
    decision.outcome.step = open.step;
    decision.outcome.attempt = open.attempt;
    decision.outcome.reason =
        state_lost ? scheduler::OutcomeReason::kStateLost : scheduler::OutcomeReason::kPeerLost;
    decision.outcome.detail = ended.why();
    decision.outcome.next_attempt = scheduler::Attempt(open.attempt.value() + 1);
    job_->steps->OnDecision(decision);
  }
  const absl::StatusCode code = weights      ? absl::StatusCode::kFailedPrecondition
                                : state_lost ? absl::StatusCode::kDataLoss
                                             : absl::StatusCode::kUnavailable;
  Abandon(
      Error(code, ended.reason(), ended.why(), {ended.metadata().begin(), ended.metadata().end()}));
}

// Kills them: the state table says what they have come to, and whoever waits in a lane's queue is
// answered by its successor.
void Daemon::GiveUpLanes() {
  ++generation_;
  job_->snapshots.Abandon("the lanes are replaced");
  job_->snapshots.StopRestore();
  lane_host_.KillAll();
  job_->lanes.GiveUp();
}

void Daemon::HandleReform(const v1::Reform& reform) {
  fault::FaultPoint("daemon.reform");
  epoch_ = reform.epoch();
  newest_epoch_.store(reform.epoch());
  if (job_ == nullptr || job_->plan == nullptr || !job_->failed.ok()) return TellCannotGoOn();
  ReplaceLanes(reform.epoch(), reform.why());
}

void Daemon::TellCannotGoOn() {
  if (job_ != nullptr && !job_->failed.ok()) return TellPlanFailed(job_->failed);
  TellPlanFailed(Error(absl::StatusCode::kUnavailable, draining_ ? "DRAINING" : "JOB_ENDED",
                       "this node does not have the job any more"));
}

void Daemon::ReplaceLanes(uint32_t epoch, const std::string& why) {
  log::Warn("new lanes", {{"job", job_->name},
                          {"epoch", absl::StrCat(epoch)},
                          {"step", absl::StrCat(LastCommitted())},
                          {"what", why}});
  job_->reforming = true;
  job_->broken_since.reset();
  for (auto& [id, session] : sessions_) session.lanes_attached.clear();
  GiveUpLanes();
  mutex_.Changed();
}

void Daemon::StartNewLanes() {
  if (job_ == nullptr || !job_->reforming || !job_->failed.ok() || lane_host_.ending() ||
      job_->preparing != nullptr || !job_->lanes.all_absent()) {
    return;
  }
  fault::FaultPoint("daemon.new_lanes");
  if (std::exchange(job_->forget_state, false)) {
    for (int32_t i = 0; i < options_.lanes; ++i) {
      const auto table = job_->memory->table(scheduler::LaneIndex(i));
      std::memset(table->data(), 0, table->size());
    }
  }
  // What the old lanes have said on the board belongs to the old epoch.
  absl::Status status =
      job_->memory->AllocateBoard(lane::PublishBoardBytes(job_->plan->buckets, options_.lanes));
  if (status.ok()) status = StartLanes();
  const auto now = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point>& since = job_->lanes_lack_resources_since;
  if (!absl::IsResourceExhausted(status)) since.reset();
  if (status.ok()) return;
  if (absl::IsResourceExhausted(status)) {
    if (!since.has_value()) {
      since = now;
      log::Warn("new lanes wait for what the machine lacks",
                {{"job", job_->name}, {"epoch", epoch_}, {"what", status}});
    }
    // The job's state may be in this memory alone, and what is lacking now there may be at the next
    // tick. The coordinator waits for a --register_timeout, and is told why before that.
    if (now - *since < options_.coordinator.register_timeout / 2) return GiveUpLanes();
  }
  TellPlanFailed(status);
}

void Daemon::OnLanesReady() {
  if (job_->wire.restore_step() > 0 && !job_->snapshots.restored) return StartRestore();
  if (job_->reforming) MapAgain();
  if (!job_->lanes.mapping()) TellPlanReady();
}

void Daemon::MapAgain() {
  for (const auto& [rank, command] : job_->attachments) {
    std::vector<int> fds;
    for (const v1::Arena& arena : command.attach().arenas()) {
      fds.push_back(job_->memory->arena_fd(scheduler::TrainerRank(rank), arena.id()));
    }
    fds.push_back(job_->memory->timeline_fd(scheduler::TrainerRank(rank)));
    for (int32_t i = 0; i < options_.lanes; ++i) {
      const scheduler::LaneIndex lane(i);
      // One that is gone already is reported by OnLaneGone.
      if (lane_host_.Send(lane, command, fds).ok()) job_->lanes.BeginMapping(rank, lane);
    }
  }
}

void Daemon::TellPlanReady() {
  if (std::exchange(job_->reforming, false)) QueueRanksAgain();
  v1::MemberMessage message;
  v1::PlanReady& ready = *message.mutable_plan_ready();
  ready.set_node(options_.node);
  ready.set_digest(job_->plan->digest);
  ready.set_epoch(job_->lanes.epoch());
  fault::FaultPoint("daemon.plan_ready");
  mutex_.Changed();
  // Last: if every rank has left meanwhile, the coordinator in this process ends the job by this.
  Tell(std::move(message));
}

// The coordinator may have missed what happened here while the link was down; it ignores what it
// knows already. Only queues: the coordinator's answer may end the job that is read here.
void Daemon::QueueRanksAgain() {
  for (const auto& [rank, gone] : job_->gone) {
    *told_.emplace_back().mutable_rank_gone() = gone;
  }
  for (const auto& [id, session] : sessions_) {
    told_.push_back(NewsOfSession(session));
    if (session.state == Session::State::kAttached && !session.must_acknowledge.has_value()) {
      told_.push_back(NewsOfAttached(session));
    }
  }
}

}  // namespace dmuond::server
