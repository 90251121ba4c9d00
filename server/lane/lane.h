// The lane process's one thread: takes commands, lets the engine work, and waits for words and
// messages without burning a core.
//
//   Lane lane(device, wire::UniqueFd(fd), MakeGlooGroup);
//   absl::Status status = lane.Run();
//
// Threads: Run() on one thread.
#ifndef DMUOND_SERVER_LANE_LANE_H_
#define DMUOND_SERVER_LANE_LANE_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "kernels/device.h"
#include "server/lane/channel.h"
#include "server/lane/engine.h"
#include "server/lane/lane_job.h"
#include "server/lane/peer_group.h"
#include "server/lane/timing.h"

namespace dmuond::server::lane {

class Lane {
 public:
  // `device` must outlive the object. `bits`: what the process computes with, without its modules.
  Lane(kernels::Device& device, wire::UniqueFd socket, PeerGroupFactory make_group,
       v1::LaneBits bits = {});

  // Serves the daemon until Shutdown (OK), or until it is gone (UNAVAILABLE). Any other error has
  // been reported to the daemon as Failed.
  absl::Status Run();

 private:
  absl::Status Serve();
  absl::Status MakeGroup(const v1::LaneCommand::Configure& configure);
  absl::Status Drain();
  absl::Status Handle();
  absl::Status Configure(const v1::LaneCommand::Configure& configure);
  absl::Status Release();
  void LeaveRail();
  absl::Status CompleteRendezvous(const v1::RendezvousComplete& rendezvous);
  absl::StatusOr<bool> Connect();
  absl::Status Start();
  absl::Status TellBits();
  absl::Status Wait();
  [[nodiscard]] bool RailPolls() const { return group_ != nullptr && group_->needs_polls(); }
  absl::Status OnGoes(const v1::Goes& goes);
  absl::Status Answer(const v1::LaneCommand::Ping& ping);
  // Says when the rail falls silent, and when it is not any more. For how long it has been; 0: not
  // so long that it is worth telling.
  std::chrono::milliseconds LookAtRail();

  kernels::Device& device_;
  Channel channel_;
  PeerGroupFactory make_group_;
  const v1::LaneBits bits_;
  wire::UniqueFd wake_;  // eventfd: the rail has news
  int spins_;            // polls before the first sleep
  v1::LaneCommand command_;
  std::vector<wire::UniqueFd> fds_;
  bool shutdown_ = false;
  uint64_t progress_ = 0;  // how often something has got done
  Clock::time_point last_progress_;

  std::unique_ptr<LaneJob> job_;
  std::unique_ptr<Engine> engine_;                // null until connected
  std::unique_ptr<kernels::Stream> rail_stream_;  // null: one node
  std::unique_ptr<PeerGroup> group_;  // null: one node. Destroyed first: it writes into the job
  bool connecting_ = false;
  std::chrono::milliseconds worth_telling_{0};
  bool rail_silent_ = false;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_LANE_H_
