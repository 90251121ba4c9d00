// The lane processes of this node: started, spoken to, killed, and seen to their end. Which of them
// there should be, and what they are told, scheduler::LaneSet and the daemon say.
//
// A lane's place is free for a successor when the process before it has ended: they share memory.
//
// Threads: the daemon's lock, but for Reap().
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
#include "dmuond/v1/lane.pb.h"
#include "kernels/mutex.h"
#include "scheduler/types.h"
#include "server/daemon/lanes/lane_process.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

class LaneHost {
 public:
  struct Options {
    std::string binary;                  // path of dmuond-lane
    const NodeDevice* device = nullptr;  // of the lanes
    int32_t lanes = 1;                   // places
    int lock = -1;                       // as LaneProcess::Options'
  };
  // What a process of a generation says, and its end; from a thread of its own, which holds no
  // lock.
  struct Callbacks {
    std::function<void(uint64_t generation, scheduler::LaneIndex, const v1::LaneReport&)> on_report;
    std::function<void(uint64_t generation, scheduler::LaneIndex, const std::string& last_words)>
        on_gone;
  };
  LaneHost(Options options, Callbacks callbacks);

  // A process for a place that is free, which is told `configure` first. `generation` names it in
  // callbacks. NOT_FOUND, PERMISSION_DENIED: as LaneProcess::Start.
  absl::Status Start(scheduler::LaneIndex lane, uint64_t generation,
                     const v1::LaneCommand& configure, const std::vector<int>& fds);
  // As LaneProcess::Send. UNAVAILABLE (LANE_LOST): there is none.
  absl::Status Send(scheduler::LaneIndex lane, const v1::LaneCommand& command,
                    const std::vector<int>& fds = {});
  // As LaneProcess::Keep and SendKept, of all that there are.
  void Keep(scheduler::LaneIndex lane, const v1::LaneCommand& command);
  void SendKept();
  // Kills one that hangs; its end is told as any other.
  void Condemn(scheduler::LaneIndex lane, std::string why);
  // All end: at once, or as they are told to. No callback of theirs begins any more.
  void KillAll();
  void EndAll();

  [[nodiscard]] pid_t pid(scheduler::LaneIndex lane) const;  // 0: there is none
  [[nodiscard]] std::optional<std::chrono::milliseconds> ProcessorTime(
      scheduler::LaneIndex lane) const;
  // Processes that were ended, and may still be there. Until there are none, no place is free.
  [[nodiscard]] bool ending() const { return !ending_.empty() || reaping_; }

  // Waits for the end of those that were ended, not for long: not even SIGKILL ends one that hangs
  // in a driver. Between Begin and End, which the lock is held for, it is not.
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
  [[nodiscard]] LaneProcess* At(scheduler::LaneIndex lane) const;

  const Options options_;
  const Callbacks callbacks_;
  std::vector<std::unique_ptr<LaneProcess>> places_;
  std::vector<std::unique_ptr<LaneProcess>> ending_;
  bool reaping_ = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_HOST_H_
