// The lanes of the job on this node, as processes over its memory: performs what NodeJob orders.
//
// Threads: the daemon's lock, but for Reaper::Wait().
#ifndef DMUOND_SERVER_DAEMON_LANES_JOB_LANES_H_
#define DMUOND_SERVER_DAEMON_LANES_JOB_LANES_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "dmuond/v1/lane.pb.h"
#include "scheduler/job/node_actions.h"
#include "scheduler/plan.h"
#include "server/daemon/lanes/lane_host.h"
#include "server/daemon/memory/node_memory.h"

namespace dmuond::server {

class JobLanes {
 public:
  struct Options {
    LaneHost::Options host;
    int32_t threads_per_lane = 1;
    std::string rail_address;                   // that lanes' peer groups listen on
    std::chrono::milliseconds rail_timeout{0};  // as PeerGroupSetup's silence_max
    int64_t snapshot_staging_bytes = 0;
  };
  // `callbacks` are LaneHost's: nothing is told of processes that were ended.
  JobLanes(Options options, LaneHost::Callbacks callbacks);

  // REQUIRES: `memory` is prepared. RESOURCE_EXHAUSTED: the machine lacks memory, descriptors or
  // processes.
  absl::Status Start(const scheduler::node::StartLanes& order, const v1::PlanInputs& wire,
                     const scheduler::Plan& plan, NodeMemory& memory);
  // Kept until SendTurn(), or SendKept() if it may wait, or until the next command with
  // descriptors, which is sent at once: what a lane hears together wakes it once.
  void Command(const scheduler::node::CommandLanes& order, const NodeMemory& memory);
  // All that is kept, if some of it may not wait.
  void SendTurn() {
    if (turn_) SendKept();
  }
  void SendKept() {
    turn_ = false;
    host_.SendKept();
  }
  // Sends to every process, ready or not.
  void Broadcast(const v1::LaneCommand& command);
  // Sends a command with descriptors that it does not name.
  absl::Status Send(scheduler::LaneIndex lane, const v1::LaneCommand& command,
                    const std::vector<int>& fds) {
    return host_.Send(lane, command, fds);
  }
  // Keeps what a lane has measured on its device; later lanes in its place are told of it.
  void KeepTuning(scheduler::LaneIndex lane, const std::string& tuning) {
    tunings_[lane.value()] = tuning;
  }
  // How long a lane's rail has carried nothing, though it should.
  void KeepSilence(scheduler::LaneIndex lane, int64_t silent_ms) {
    silent_ms_[lane.value()] = silent_ms;
  }
  [[nodiscard]] int64_t silent_ms(scheduler::LaneIndex lane) const {
    return silent_ms_[lane.value()];
  }
  void End(bool others_follow);
  void Condemn(const scheduler::node::CondemnLane& order);

  // The generation of the present processes: those of other generations were ended.
  [[nodiscard]] uint64_t generation() const { return generation_; }
  [[nodiscard]] LaneHost& host() { return host_; }

 private:
  // The first command of a lane, and the descriptors that go with it.
  [[nodiscard]] v1::LaneCommand ConfigureOf(uint32_t epoch, scheduler::LaneIndex lane,
                                            const v1::PlanInputs& wire, const NodeMemory& memory,
                                            std::vector<int>& fds) const;

  const Options options_;
  LaneHost host_;
  std::vector<std::string> tunings_;  // by lane
  std::vector<int64_t> silent_ms_;    // by lane
  bool turn_ = false;                 // a command is kept that may not wait
  uint64_t generation_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_JOB_LANES_H_
