// Lanes that live and do nothing: they are found out, killed, and replaced as any lane that dies.
#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/daemon.h"
#include "server/daemon/errors.h"
#include "server/daemon/log.h"

namespace dmuond::server {
namespace {

// A process that SIGKILL does not end by then never ends.
constexpr std::chrono::seconds kKilledWithin{60};

}  // namespace

void Daemon::WatchLanes(Deadline now) {
  if (job_ == nullptr || !job_->failed.ok()) return;
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    LaneState& lane = job_->lanes[i];
    if (lane.process == nullptr || lane.gone) continue;
    if (lane.condemned_at.has_value()) {
      if (now - *lane.condemned_at < kKilledWithin) continue;
      return Abandon(Error(
          absl::StatusCode::kUnavailable, "LANE_LOST",
          Say("lane ", Named("lane", lane.program.lane.value()), " (pid ",
              Named("pid", lane.process->pid()), ") hangs and does not even end by SIGKILL: the ",
              "kernel holds it, in the device's driver, say. Its memory cannot be given to ",
              "another one")));
    }
    const bool owes = lane.ready && !job_->reforming && job_->steps.has_value() &&
                      lane.published_attempt < job_->applied_attempt;
    const LaneWatch::Look look = lane.watch->OnTick(
        now, owes, [&process = *lane.process] { return process.ProcessorTime(); });
    if (!look.hangs.empty()) {
      Condemn(static_cast<int32_t>(i), look.hangs);
      continue;
    }
    if (look.overdue &&
        ExpelAwaited(lane, absl::StrCat("the weights after attempt ", job_->applied_attempt,
                                        " wait for its `submitted` word"))) {
      return;  // the job may be another now
    }
    if (!look.ping.has_value()) continue;
    v1::LaneCommand command;
    command.mutable_ping()->set_number(*look.ping);
    lane.process->Send(command).IgnoreError();  // its end is reported by OnLaneGone
  }
}

void Daemon::TellProgress(Deadline now) {
  constexpr std::chrono::seconds kEvery{1};
  constexpr int kLogEvery = 10;
  if (job_ == nullptr || job_->plan == nullptr || !job_->failed.ok() || epoch_ == 0) return;
  std::string awaited;
  uint64_t done = job_->attachments.size() * job_->lanes.size() - job_->mapping.size();
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const LaneState& lane = job_->lanes[i];
    if (lane.ready) ++done;
    if (!lane.ready || job_->snapshots.loading > 0 || !job_->mapping.empty()) {
      absl::StrAppend(&awaited, awaited.empty() ? "" : "; ", "lane ", lane.program.lane.value(),
                      " ",
                      lane.process == nullptr ? "waits for its predecessor's end"
                                              : AwaitedFrom(static_cast<int32_t>(i)));
    }
  }
  if (!dead_lanes_.empty()) awaited = "the end of older lanes";
  if (awaited.empty() && IsRestoring()) {
    const uint64_t read =
        job_->snapshots.restore == nullptr ? 0 : job_->snapshots.restore->read_bytes.load();
    awaited = absl::StrCat("the snapshot of step ", job_->wire.restore_step(), ", of which ", read,
                           " bytes are read");
    done += read;
  }
  if (awaited.empty()) {
    job_->progress_tells = 0;
    return;
  }
  if (now - job_->progress_told < kEvery) return;
  job_->progress_told = now;
  if (++job_->progress_tells % kLogEvery == 0) {
    log::Info("not ready yet",
              {{"job", job_->name}, {"epoch", absl::StrCat(epoch_)}, {"awaited", awaited}});
  }
  v1::MemberMessage message;
  v1::NodeProgress& progress = *message.mutable_node_progress();
  progress.set_node(options_.node);
  progress.set_epoch(epoch_);
  progress.set_done(done);
  progress.set_awaited(awaited);
  Tell(std::move(message));
}

void Daemon::HandlePong(int32_t lane, const v1::LaneReport::Pong& pong) {
  LaneWatch::Answer answer;
  answer.number = pong.number();
  answer.progress = pong.progress();
  answer.device_busy = pong.device_busy();
  answer.awaits_rail = pong.awaits_rail();
  answer.awaited_ranks = {pong.awaited_ranks().begin(), pong.awaited_ranks().end()};
  if (job_->lanes[lane].watch.has_value()) job_->lanes[lane].watch->OnAnswer(answer);
}

void Daemon::HandleGatherOverdue(const v1::GatherOverdue& overdue) {
  if (job_ == nullptr || job_->reforming || !job_->steps.has_value() ||
      job_->steps->open().attempt.value() != overdue.attempt()) {
    return;
  }
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const LaneState& lane = job_->lanes[i];
    if (lane.process == nullptr || lane.gone || lane.gathered_attempt >= overdue.attempt()) {
      continue;
    }
    const bool answers = lane.watch->answers();
    if (answers && ExpelAwaited(lane, overdue.detail())) return;
    // It is the other node's lane that hangs, and that node is told, too.
    if (answers && lane.watch->last().awaits_rail) continue;
    Condemn(static_cast<int32_t>(i), overdue.detail());
  }
}

bool Daemon::ExpelAwaited(const LaneState& lane, const std::string& why) {
  std::vector<uint64_t> expelled;
  for (const int32_t rank : lane.watch->last().awaited_ranks) {
    for (const auto& [id, session] : sessions_) {
      if (session.rank == rank) expelled.push_back(id);
    }
  }
  for (const uint64_t id : expelled) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) continue;
    const Session& session = found->second;
    RemoveSession(id, /*closed=*/false,
                  absl::StrCat("rank ", session.rank, " (pid ", session.pid,
                               ") counts as dead: it has submitted, and its device has not come "
                               "to it; ",
                               why));
  }
  return !expelled.empty();
}

void Daemon::Condemn(int32_t lane, const std::string& why) {
  LaneState& state = job_->lanes[lane];
  if (state.condemned_at.has_value()) return;
  state.condemned_at = std::chrono::steady_clock::now();
  const std::string awaited = AwaitedFrom(lane);
  log::Error("lane hangs and is killed", {{"job", job_->name},
                                          {"lane", absl::StrCat(state.program.lane.value())},
                                          {"pid", absl::StrCat(state.process->pid())},
                                          {"awaited", awaited},
                                          {"what", why}});
  state.process->Condemn(absl::StrCat("it hung and was killed: ", why, "; awaited: ", awaited));
}

std::string Daemon::AwaitedFrom(int32_t lane) const {
  const LaneState& state = job_->lanes[lane];
  if (!state.ready) return "to be ready";
  if (job_->snapshots.loading > 0) return "to take the state of a snapshot";
  for (const auto& [rank, mapper] : job_->mapping) {
    if (mapper == lane) return absl::StrCat("to map the memory of rank ", rank);
  }
  if (!job_->steps.has_value()) return "nothing yet";
  if (state.published_attempt < job_->applied_attempt) {
    return absl::StrCat("the weights after attempt ", job_->applied_attempt);
  }
  const uint64_t open = job_->steps->open().attempt.value();
  if (state.gathered_attempt < open) return absl::StrCat("the gradients of attempt ", open);
  return absl::StrCat("the decision of attempt ", open);
}

}  // namespace dmuond::server
