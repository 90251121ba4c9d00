#include "server/daemon/lanes/lane_host.h"

#include <iterator>
#include <utility>

#include "server/common/errors.h"

namespace dmuond::server {

using scheduler::LaneIndex;

LaneHost::LaneHost(Options options, Callbacks callbacks)
    : options_(std::move(options)), callbacks_(std::move(callbacks)), places_(options_.lanes) {}

LaneProcess* LaneHost::At(LaneIndex lane) const {
  const auto place = static_cast<size_t>(lane.value());
  return place < places_.size() ? places_[place].get() : nullptr;
}

absl::Status LaneHost::Start(LaneIndex lane, uint64_t generation, const v1::LaneCommand& configure,
                             const std::vector<int>& fds) {
  LaneProcess::Options options;
  options.binary = options_.binary;
  options.lane_index = lane.value();
  options.lock = options_.lock;
  options.device = options_.device->OfLane(lane);
  options.environment = options_.device->OfLaneEnvironment();
  options.flags.push_back("--job=" + configure.configure().job());
  if (const std::string near = options_.device->ProcessorsNear(lane); !near.empty()) {
    options.flags.push_back("--processors=" + near);
  }
  LaneProcess::Callbacks callbacks;
  callbacks.on_report = [this, generation, lane](const v1::LaneReport& report,
                                                 const std::vector<wire::UniqueFd>& /*fds*/) {
    callbacks_.on_report(generation, lane, report);
  };
  callbacks.on_gone = [this, generation, lane](const std::string& last_words) {
    callbacks_.on_gone(generation, lane, last_words);
  };
  absl::StatusOr<std::unique_ptr<LaneProcess>> process =
      LaneProcess::Start(std::move(options), std::move(callbacks));
  if (!process.ok()) return process.status();
  // The end of one that is gone already is told as any other.
  if (absl::Status sent = (*process)->Send(configure, fds);
      !sent.ok() && !absl::IsUnavailable(sent)) {
    (*process)->Kill();
    ending_.push_back(*std::move(process));
    return sent;
  }
  places_[lane.value()] = *std::move(process);
  return absl::OkStatus();
}

absl::Status LaneHost::Send(LaneIndex lane, const v1::LaneCommand& command,
                            const std::vector<int>& fds) {
  LaneProcess* const process = At(lane);
  if (process != nullptr) return process->Send(command, fds);
  return Error(absl::StatusCode::kUnavailable, "LANE_LOST",
               Say("lane ", Named("lane", lane.value()), " is being replaced"));
}

void LaneHost::Keep(LaneIndex lane, const v1::LaneCommand& command) {
  // One that is gone needs it no longer; its end is told.
  if (LaneProcess* const process = At(lane); process != nullptr) {
    process->Keep(command).IgnoreError();
  }
}

void LaneHost::SendKept() {
  for (const std::unique_ptr<LaneProcess>& process : places_) {
    if (process != nullptr) process->SendKept();
  }
}

void LaneHost::Condemn(LaneIndex lane, std::string why) {
  if (LaneProcess* const process = At(lane); process != nullptr) process->Condemn(std::move(why));
}

void LaneHost::KillAll() {
  if (options_.device->AsksLanesToEnd()) return EndAll();
  for (const std::unique_ptr<LaneProcess>& process : places_) {
    if (process != nullptr) process->Kill();
  }
  EndAll();
}

void LaneHost::EndAll() {
  for (std::unique_ptr<LaneProcess>& process : places_) {
    if (process != nullptr) ending_.push_back(std::exchange(process, nullptr));
  }
}

pid_t LaneHost::pid(LaneIndex lane) const {
  const LaneProcess* const process = At(lane);
  return process == nullptr ? 0 : process->pid();
}

std::optional<std::chrono::milliseconds> LaneHost::ProcessorTime(LaneIndex lane) const {
  const LaneProcess* const process = At(lane);
  return process == nullptr ? std::nullopt : process->ProcessorTime();
}

LaneHost::Reaper LaneHost::BeginReaping() {
  reaping_ = true;
  return Reaper(std::exchange(ending_, {}));
}

void LaneHost::EndReaping(Reaper reaper) {
  reaping_ = false;
  std::move(reaper.processes_.begin(), reaper.processes_.end(), std::back_inserter(ending_));
}

void LaneHost::Reaper::Wait(std::chrono::steady_clock::time_point deadline) {
  std::vector<std::unique_ptr<LaneProcess>> alive;
  for (std::unique_ptr<LaneProcess>& process : processes_) {
    process->BeginStop();
    if (!process->WaitUntilGone(deadline)) alive.push_back(std::move(process));
  }
  processes_ = std::move(alive);
}

}  // namespace dmuond::server
