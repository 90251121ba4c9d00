#include "server/daemon/lanes/lane_host.h"

#include <utility>

#include "server/common/errors.h"
#include "server/common/log.h"

namespace dmuond::server {

using scheduler::LaneIndex;

LaneHost::LaneHost(Options options, Callbacks callbacks)
    : options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      places_(options_.lanes),
      released_(options_.lanes) {}

LaneProcess* LaneHost::At(LaneIndex lane) const {
  const auto place = static_cast<size_t>(lane.value());
  return place < places_.size() ? places_[place].get() : nullptr;
}

absl::Status LaneHost::Start(LaneIndex lane, uint64_t generation, const v1::LaneCommand& configure,
                             const std::vector<int>& fds) {
  LaneProcess::Callbacks callbacks;
  callbacks.on_report = [this, generation, lane](const v1::LaneReport& report,
                                                 const std::vector<wire::UniqueFd>& /*fds*/) {
    callbacks_.on_report(generation, lane, report);
  };
  callbacks.on_gone = [this, generation, lane](const std::string& last_words) {
    callbacks_.on_gone(generation, lane, last_words);
  };
  std::unique_ptr<LaneProcess> process = std::move(released_[lane.value()]);
  const bool reused = process != nullptr && process->Reuse(callbacks);
  if (!reused) {
    absl::StatusOr<std::unique_ptr<LaneProcess>> started =
        LaneProcess::Start(OptionsOf(lane, configure), std::move(callbacks));
    if (!started.ok()) return started.status();
    process = *std::move(started);
  }
  // The end of one that is gone already is told as any other.
  if (absl::Status sent = process->Send(configure, fds); !sent.ok() && !absl::IsUnavailable(sent)) {
    process->Kill();
    ending_.push_back(std::move(process));
    return sent;
  }
  if (reused) {  // it was told nothing while it waited
    v1::LaneCommand level;
    level.mutable_log_level()->set_level(std::string(log::Name(log::CurrentLevel())));
    process->Keep(level).IgnoreError();
  }
  places_[lane.value()] = std::move(process);
  return absl::OkStatus();
}

LaneProcess::Options LaneHost::OptionsOf(LaneIndex lane, const v1::LaneCommand& configure) const {
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
  return options;
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

void LaneHost::GiveUpAll() {
  const std::optional<std::chrono::milliseconds> patience = options_.device->ReleasesLanesWithin();
  for (std::unique_ptr<LaneProcess>& process : places_) {
    if (process == nullptr) continue;
    if (patience.has_value()) {
      process->Release(*patience);
    } else {
      process->Kill();
    }
    ending_.push_back(std::exchange(process, nullptr));
  }
  keeps_ = true;
}

void LaneHost::EndAll() {
  for (auto* const processes : {&places_, &released_}) {
    for (std::unique_ptr<LaneProcess>& process : *processes) {
      if (process != nullptr) ending_.push_back(std::exchange(process, nullptr));
    }
  }
  for (const std::unique_ptr<LaneProcess>& process : ending_) process->BeginStop();
  keeps_ = false;
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
  for (std::unique_ptr<LaneProcess>& process : reaper.processes_) {
    if (keeps_ && process->released()) {
      released_[process->lane_index()] = std::move(process);
      continue;
    }
    if (!keeps_) process->BeginStop();
    ending_.push_back(std::move(process));
  }
}

void LaneHost::Reaper::Wait(std::chrono::steady_clock::time_point deadline) {
  std::vector<std::unique_ptr<LaneProcess>> alive;
  for (std::unique_ptr<LaneProcess>& process : processes_) {
    if (!process->WaitUntilAtRest(deadline) || process->released()) {
      alive.push_back(std::move(process));
    }
  }
  processes_ = std::move(alive);
}

}  // namespace dmuond::server
