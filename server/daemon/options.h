// How a daemon is set up, once its flags are read.
#ifndef DMUOND_SERVER_DAEMON_OPTIONS_H_
#define DMUOND_SERVER_DAEMON_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "scheduler/job/group_job.h"
#include "server/daemon/lanes/lane_binary.h"
#include "server/storage/storage.h"

namespace dmuond::server {

struct DaemonOptions {
  int32_t node = 0;
  int32_t nodes = 1;
  int32_t lanes = 1;
  int32_t places = 1;        // for jobs; the same on every node
  int32_t jobs_per_uid = 0;  // of one user on this node; 0: as many as there are places
  int32_t threads_per_lane = 1;
  LaneBinary lane_binary;
  std::string rail_address;  // that lanes' peer groups listen on
  std::string socket;
  std::string group_name;
  int lock = -1;                 // SocketDir's, which lanes inherit
  std::string core_type;         // OpenBLAS core type of the lanes; empty: its own choice
  std::string token;             // OpenSession must carry it; empty: none
  int64_t job_memory_bytes = 0;  // 0: no limit
  std::chrono::milliseconds step_timeout{600'000};
  std::chrono::milliseconds lane_timeout{30'000};  // as LaneWatchOptions'
  std::chrono::milliseconds rail_timeout{0};       // as PeerGroupSetup's silence_max
  scheduler::GroupJobOptions coordinator;
  storage::Storage* storage = nullptr;  // of snapshots; null: none are made. Outlives the daemon
  int32_t snapshot_keep = 2;
  // Those of ended jobs are removed so long after the newest of them; 0: they stay.
  std::chrono::milliseconds snapshots_of_ended_jobs{0};
  int64_t snapshot_staging_bytes = 0;  // per lane; 0: state is copied straight
  // An operation in the storage that takes longer hangs.
  std::chrono::milliseconds snapshot_timeout{300'000};

  // A trainer waits for weights at most so long: as many lanes hang as a step may lose, each as
  // long as it may, and each is replaced; and once the group has to form anew.
  [[nodiscard]] std::chrono::milliseconds published_timeout() const {
    return scheduler::kLaneDeathsMax *
               (2 * coordinator.step.work_timeout() + coordinator.register_timeout) +
           coordinator.step.session_linger;
  }
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_OPTIONS_H_
