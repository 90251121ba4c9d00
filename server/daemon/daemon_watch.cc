// Lanes that live and do nothing: they are found out, killed, and replaced as any lane that dies.
#include <chrono>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {

scheduler::LaneSet::Owed Daemon::OwedByLanes() const {
  if (job_->reforming || !job_->steps.has_value()) return {};
  return {job_->applied_attempt, job_->steps->open().attempt.value()};
}

void Daemon::WatchLanes(Deadline now) {
  if (job_ == nullptr || !job_->failed.ok()) return;
  Obey(job_->lanes.OnTick(now, OwedByLanes(),
                          [this](scheduler::LaneIndex lane)
                              DMUOND_REQUIRES(mutex_) { return lane_host_.ProcessorTime(lane); }),
       absl::StrCat("the weights after attempt ", job_->applied_attempt,
                    " wait for its `submitted` word"));
}

void Daemon::Obey(const std::vector<scheduler::LaneSet::Order>& orders, const std::string& why) {
  using scheduler::LaneSet;
  for (const LaneSet::Order& order : orders) {
    if (const auto* ping = std::get_if<LaneSet::Ping>(&order)) {
      v1::LaneCommand command;
      command.mutable_ping()->set_number(ping->number);
      ToLane(ping->lane, command);
    } else if (const auto* kill = std::get_if<LaneSet::Kill>(&order)) {
      KillLane(*kill);
    } else if (const auto* expel = std::get_if<LaneSet::Expel>(&order)) {
      if (Expel(expel->ranks, why)) return;  // the job may be another now
      if (!expel->else_condemn) continue;
      KillLane(
          job_->lanes.Condemn(std::chrono::steady_clock::now(), expel->lane, why, OwedByLanes()));
    } else {
      const scheduler::LaneIndex lane = std::get<LaneSet::Unkillable>(order).lane;
      return Abandon(Error(
          absl::StatusCode::kUnavailable, "LANE_LOST",
          Say("lane ", Named("lane", job_->lanes[lane].id.value()), " (pid ",
              Named("pid", lane_host_.pid(lane)), ") hangs and does not even end by SIGKILL: the ",
              "kernel holds it, in the device's driver, say. Its memory cannot be given to ",
              "another one")));
    }
  }
}

void Daemon::TellProgress(Deadline now) {
  constexpr std::chrono::seconds kEvery{1};
  constexpr int kLogEvery = 10;
  if (job_ == nullptr || !job_->planned() || !job_->failed.ok() || epoch_ == 0) return;
  std::string awaited;
  uint64_t done = job_->lanes.done();
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const scheduler::LaneIndex index(static_cast<int32_t>(i));
    const scheduler::LaneSet::Lane& lane = job_->lanes[index];
    if (lane.ready() && !job_->lanes.loading() && !job_->lanes.mapping()) continue;
    absl::StrAppend(&awaited, awaited.empty() ? "" : "; ", "lane ", lane.id.value(), " ",
                    lane.lives() ? job_->lanes.AwaitedFrom(index, OwedByLanes())
                                 : "waits for its predecessor's end");
  }
  if (lane_host_.ending()) awaited = "the end of older lanes";
  if (const PrepareProgress* preparing = job_->preparing.get(); preparing != nullptr) {
    done = preparing->done;
    awaited = preparing->planned ? absl::StrCat("memory, of which ", done, " bytes are there")
                                 : "its plan";
  }
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

void Daemon::HandlePong(scheduler::LaneIndex lane, const v1::LaneReport::Pong& pong) {
  scheduler::LaneWatch::Answer answer;
  answer.number = pong.number();
  answer.progress = pong.progress();
  answer.device_busy = pong.device_busy();
  answer.awaits_rail = pong.awaits_rail();
  answer.awaited_ranks = {pong.awaited_ranks().begin(), pong.awaited_ranks().end()};
  job_->lanes.OnPong(lane, answer);
}

void Daemon::HandleGatherOverdue(const v1::GatherOverdue& overdue) {
  if (job_ == nullptr || job_->reforming || !job_->steps.has_value() ||
      job_->steps->open().attempt.value() != overdue.attempt()) {
    return;
  }
  Obey(job_->lanes.OnGatherOverdue(std::chrono::steady_clock::now(), overdue.attempt(),
                                   overdue.detail()),
       overdue.detail());
}

bool Daemon::Expel(const std::vector<int32_t>& ranks, const std::string& why) {
  std::vector<uint64_t> expelled;
  for (const int32_t rank : ranks) {
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

void Daemon::KillLane(const scheduler::LaneSet::Kill& kill) {
  log::Error("lane hangs and is killed", {{"job", job_->name},
                                          {"lane", absl::StrCat(job_->lanes[kill.lane].id.value())},
                                          {"pid", absl::StrCat(lane_host_.pid(kill.lane))},
                                          {"awaited", kill.awaited},
                                          {"what", kill.why}});
  lane_host_.Condemn(
      kill.lane, absl::StrCat("it hung and was killed: ", kill.why, "; awaited: ", kill.awaited));
}

}  // namespace dmuond::server
