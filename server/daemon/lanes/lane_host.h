// The lane processes of this node: starts them, sends them commands, kills them, and waits for
// their end. scheduler::NodeJob decides which of them there are, and what they are told.
//
// Lanes of one place share memory, so a place is free only when its last process has ended, or has
// let go of all its work and waits for other work.
//
// Threads: the daemon's lock, but for Reaper::Wait().
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_HOST_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_HOST_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "dmuond/v1/lane.pb.h"
#include "scheduler/types.h"
#include "server/daemon/lanes/lane_binary.h"
#include "server/daemon/lanes/lane_process.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

class LaneHost {
 public:
  struct Options {
    LaneBinary binary;                   // dmuond-lane
    const NodeDevice* device = nullptr;  // of the lanes
    int32_t lanes = 1;                   // places
    int lock = -1;                       // as LaneProcess::Options'
  };
  // The reports and the end of a process, with its generation. The process's thread calls, and
  // holds no lock.
  struct Callbacks {
    std::function<void(uint64_t generation, scheduler::LaneIndex, const v1::LaneReport&)> on_report;
    std::function<void(uint64_t generation, scheduler::LaneIndex, const std::string& last_words)>
        on_gone;
  };
  LaneHost(Options options, Callbacks callbacks);

  // Starts a process in a free place, or uses the one that waits there; `configure` is its first
  // command. Callbacks have
  // `generation`. NOT_FOUND, PERMISSION_DENIED: as LaneProcess::Start.
  absl::Status Start(scheduler::LaneIndex lane, uint64_t generation,
                     const v1::LaneCommand& configure, const std::vector<int>& fds);
  // As LaneProcess::Send. UNAVAILABLE (LANE_LOST): the place has no process.
  absl::Status Send(scheduler::LaneIndex lane, const v1::LaneCommand& command,
                    const std::vector<int>& fds = {});
  // As LaneProcess::Keep, and SendKept() of all processes.
  void Keep(scheduler::LaneIndex lane, const v1::LaneCommand& command);
  void SendKept();
  // Kills a lane that hangs; on_gone tells its end, as any other's.
  void Condemn(scheduler::LaneIndex lane, std::string why);
  // Tells all processes to end. No callback of theirs begins any more.
  void EndAll();
  // The same at once, because others follow: they are killed, or let go of their work and wait
  // (NodeDevice::ReleasesLanesWithin()).
  void GiveUpAll();

  [[nodiscard]] pid_t pid(scheduler::LaneIndex lane) const;  // 0: there is none
  [[nodiscard]] std::optional<std::chrono::milliseconds> ProcessorTime(
      scheduler::LaneIndex lane) const;
  // Processes that were ended may still run, or do what they did. No place is free before that.
  [[nodiscard]] bool ending() const { return !ending_.empty() || reaping_; }

  // Waits for processes that were ended, for a limited time: not even SIGKILL ends one that hangs
  // in a driver. The lock is held for BeginReaping() and EndReaping(), and not between them.
  class Reaper {
   public:
    explicit Reaper(std::vector<std::unique_ptr<LaneProcess>> processes)
        : processes_(std::move(processes)) {}
    void Wait(std::chrono::steady_clock::time_point deadline);

   private:
    friend class LaneHost;
    std::vector<std::unique_ptr<LaneProcess>> processes_;
  };
  [[nodiscard]] Reaper BeginReaping();
  void EndReaping(Reaper reaper);

 private:
  [[nodiscard]] LaneProcess::Options OptionsOf(scheduler::LaneIndex lane,
                                               const v1::LaneCommand& configure) const;
  [[nodiscard]] LaneProcess* At(scheduler::LaneIndex lane) const;

  const Options options_;
  const Callbacks callbacks_;
  std::vector<std::unique_ptr<LaneProcess>> places_;
  std::vector<std::unique_ptr<LaneProcess>> released_;  // by place, as places_
  std::vector<std::unique_ptr<LaneProcess>> ending_;
  bool keeps_ = false;  // those that let go of their work: others are to follow
  bool reaping_ = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_HOST_H_
