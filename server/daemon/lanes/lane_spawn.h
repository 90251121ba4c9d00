// Starts a lane's program with exactly the descriptors that it needs. Part of lane_process.
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_SPAWN_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_SPAWN_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "server/daemon/lanes/lane_binary.h"

namespace dmuond::server {

struct SpawnedLane {
  pid_t pid = 0;          // a child that the caller must wait for
  wire::UniqueFd pidfd;   // readable when it has ended
  wire::UniqueFd socket;  // our end, SOCK_STREAM
  wire::UniqueFd output;  // its stdout and stderr, non-blocking
};

// Runs `binary --fd=3 --lane=INDEX --device=DEVICE` and `flags` with this process's log level and
// format: see LaneProcess. It inherits `lock` as well, unless that is -1. Needs /proc. Threads:
// any.
absl::StatusOr<SpawnedLane> SpawnLane(
    const LaneBinary& binary, int lane_index, const std::string& device,
    const std::vector<std::pair<std::string, std::string>>& environment, int lock,
    const std::vector<std::string>& flags = {});

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_SPAWN_H_
